"""Several constraints at once: names, tolerances, and the rules by which clients reduce them."""

import dataclasses

import cvxpy as cp
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedsolve as fs
from fedsolve.algorithms.switching import shares_among
from fedsolve.federation.replies import Replies
from tests.support.clients import client

RULES = ("steepest", "violation", "round robin", "blend")
TARGETS = np.asarray([[3.0, 2.0, 1.0], [2.0, 3.0, 0.0], [4.0, 1.0, 2.0]])


def first(w, data):
    return w[0] - 1 + 0 * data["c"][0]


def total(w, data):
    return jnp.sum(w) - data["c"][0]


def problem(constraint):
    return fs.Problem(
        lambda w, data: jnp.sum((w - data["c"]) ** 2) / 2, {"c": TARGETS}, np.zeros(3), constraint
    )


def several(**options):
    return fs.Several({"first": first, "total": total}, **options)


def optimum(tolerances):
    w = cp.Variable(3)
    f = sum(cp.sum_squares(w - c) for c in TARGETS) / 6
    limits = [w[0] - 1 <= tolerances[0], cp.sum(w) - TARGETS[:, 0].mean() <= tolerances[1]]
    cp.Problem(cp.Minimize(f), limits).solve(solver=cp.CLARABEL)
    return np.asarray(w.value), float(f.value)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("make", ["FedSGM", "PenaltyFedAvg"])
def test_every_rule_finds_the_optimum_under_both_constraints(rule, make):
    """By CVXPY; both constraints are active there."""
    tolerances = (0.2, 0.1)
    w, f = optimum(tolerances)
    options = {"rho": 5.0} if make == "PenaltyFedAvg" else {}
    algorithm = getattr(fs, make)(fs.Diminishing(0.3), among=rule, **options)
    run = fs.solve(problem(several(tolerances=tolerances)), algorithm, 3000, evaluate_every=30)
    assert run.best.constraint == pytest.approx(0, abs=0.05)
    np.testing.assert_allclose(run.params, w, atol=0.1)
    assert run.history["objective"][-1] == pytest.approx(f, abs=0.15)


def test_the_history_has_every_constraint_by_name_and_their_maximum():
    tolerances = {"first": 0.5}
    run = fs.solve(problem(several(tolerances=tolerances)), fs.FedSGM(0.3), rounds=4)
    w = np.asarray(run.params)
    parts = w[0] - 1, w.sum() - TARGETS[:, 0].mean()
    assert run.history["constraint.first"][-1] == pytest.approx(parts[0], abs=1e-6)
    assert run.history["constraint.total"][-1] == pytest.approx(parts[1], abs=1e-6)
    first_less, second = run.history["constraint.first"] - 0.5, run.history["constraint.total"]
    assert (first_less > second).any()  # so the tolerance matters
    np.testing.assert_allclose(run.history["constraint"], np.maximum(first_less, second), atol=1e-6)


def test_a_list_is_the_maximum_to_the_bit():
    """Without tolerances, the steepest rule is the subgradient of `Maximum`."""
    one = fs.solve(problem([first, total]), fs.FedSGM(0.2, 0.05, local_steps=2), rounds=30)
    other = fs.solve(
        problem(fs.Maximum(first, total)), fs.FedSGM(0.2, 0.05, local_steps=2), rounds=30
    )
    np.testing.assert_allclose(one.params, other.params, rtol=1e-6)
    np.testing.assert_allclose(
        one.history["constraint"], other.history["constraint"], rtol=1e-5, atol=1e-6
    )
    assert "constraint.first" in one.history
    assert list(problem([first, lambda w, data: w[1]]).constraint.names) == ["first", "g2"]


def test_rules_of_sharing():
    v = jnp.asarray([0.2, -0.1, 0.6])

    def shares(rule, violations=v, round=0):
        return np.round(np.asarray(shares_among(rule, violations, jnp.int32(round))), 6).tolist()

    assert shares("steepest") == [0, 0, 1]
    assert shares("violation") == [0.25, 0, 0.75]
    assert shares("blend") == [0.5, 0, 0.5]
    assert [shares("round robin", round=t) for t in range(3)] == [[1, 0, 0], [0, 0, 1], [1, 0, 0]]
    for rule in RULES:  # none is violated
        assert shares(rule, jnp.asarray([-0.2, -0.1, -0.6])) == [0, 1, 0]
    assert shares("violation", jnp.asarray([jnp.inf, -1.0, jnp.inf])) == [0.5, 0, 0.5]


def test_constraints_of_different_kinds_stand_together():
    """A mean, a rate and a bound at every client, each with its columns."""
    rng = np.random.default_rng(0)
    data = {"x": rng.standard_normal((4, 30, 2)), "y": rng.integers(0, 2, (4, 30))}

    def score(w, data):
        return data["x"] @ w

    found = {
        "size": lambda w, data: w @ w - 4,
        "recall": fs.constraints.sensitivity(score, at_least=0.6),
        "local": fs.EachClient(lambda w, data: jnp.mean(score(w, data) ** 2) - 1),
    }
    made = fs.Problem(lambda w, data: jnp.mean(-score(w, data)), data, np.ones(2), found)
    for rule in RULES:
        run = fs.solve(made, fs.FedSGM(0.1, among=rule, participants=3), rounds=6)
        names = {f"constraint.{name}" for name in found} | {"recall", "local.violators"}
        assert names <= set(run.history)
    debug = fs.solve(made, fs.FedSGM(0.1, among=rule, participants=3), 3, runtime="debug")
    compiled = fs.solve(made, fs.FedSGM(0.1, among=rule, participants=3), 3)
    np.testing.assert_allclose(debug.params, compiled.params, rtol=1e-5)


def test_local_gradients_are_the_weighted_sum():
    made = problem(several())
    shares = jnp.asarray([0.3, 0.7])
    placed = made.on_device()
    assert isinstance(placed.constraint, fs.Several)
    focus = placed.constraint.focus(shares, (None, None))
    found = client(made, 1).constraint_grad(jnp.ones(3), focus=focus)
    np.testing.assert_allclose(found, [1.0, 0.7, 0.7], rtol=1e-6)


LIMITS = np.asarray([1.0, 3.0, 2.0, 0.5])


def capped(share=1.0):
    return fs.Problem(
        lambda w, data: jnp.sum((w - 4) ** 2) / 2,
        {"limit": LIMITS},
        np.zeros(1),
        fs.EachClient(lambda w, data: w[0] - data["limit"], share),
    )


@pytest.mark.parametrize(("share", "bound"), [(1.0, 0.5), (0.75, 1.0), (0.5, 2.0)])
def test_every_client_or_a_share_of_them_holds_its_own_constraint(share, bound):
    """min (w − 4)² with w ≤ limit_j for the share of clients with the largest limits."""
    run = fs.solve(capped(share), fs.FedSGM(fs.Diminishing(0.5)), 2000, evaluate_every=10)
    assert float(run.params[0]) == pytest.approx(bound, abs=0.05)
    assert run.history["worst_client"][-1] == 3
    over = float(run.params[0]) > LIMITS
    assert run.history["violators"][-1] == over.sum()


def test_only_violating_clients_descend():
    """The mean of what clients send is the mean of the violators' gradients."""
    made = capped().on_device()
    w = jnp.asarray([1.5])
    values = jnp.asarray([client(made, j).measure(w) for j in range(4)])
    np.testing.assert_allclose(values, 1.5 - LIMITS, rtol=1e-6)
    assert made.constraint is not None
    g, focus = made.constraint.combine(Replies(values, np.ones(4, bool)))
    assert float(g) == 1.0
    sent = [float(client(made, j).constraint_grad(w, focus=focus)[0]) for j in range(4)]
    assert sent == [2.0, 0.0, 0.0, 2.0]
    g, focus = made.constraint.combine(Replies(values - 2, np.ones(4, bool)))
    assert float(g) == -1.0
    sent = [float(client(made, j).constraint_grad(w - 2, focus=focus)[0]) for j in range(4)]
    assert sent == [0.0, 0.0, 0.0, 4.0]  # none violates: the worst one alone
    heard = np.asarray([True, True, True, False])
    assert float(made.constraint.combine(Replies(values, heard))[0]) == 0.5


BAD = {
    "2 constraints and 3 tolerances": lambda: several(tolerances=[0.1, 0.2, 0.3]),
    "tolerances name 'last'": lambda: several(tolerances={"last": 0.1}),
    "tolerance of total must be a finite": lambda: several(tolerances=[0.1, np.nan]),
    "needs at least one constraint": lambda: problem([]),
    "Two constraints have the name 'first'": lambda: problem([first, first]),
    "not another Several": lambda: fs.Several([several()]),
    "tolerance must be one number": lambda: fs.FedSGM(0.1, [0.1, 0.2]),  # type: ignore[arg-type]
    "among must be one of": lambda: fs.FedSGM(0.1, among="largest"),
    "share is the share of clients": lambda: fs.EachClient(first, share=0.0),
    "takes the constraint of one client": lambda: fs.EachClient(fs.EachClient(first)),
    "all clients in every round": lambda: fs.FedSGM.from_theory(
        problem(several()), 10, participants=2, distance=1.0, lipschitz=1.0
    ),
    "a mean over clients; this is a EachClient": lambda: fs.FedSGM.from_theory(
        problem([first, fs.EachClient(total)]), 10, distance=1.0, lipschitz=1.0
    ),
}


@pytest.mark.parametrize("sentence", BAD)
def test_bad_input_gets_a_sentence(sentence):
    with pytest.raises(fs.InvalidInput, match=sentence):
        BAD[sentence]()


def test_theory_holds_for_the_maximum_of_convex_constraints():
    """Theorem 1 with several local steps; f* by CVXPY. Another rule is another method."""
    tolerances = (0.2, 0.1)
    made = fs.Problem(
        lambda w, data: jnp.sum((w - data["c"]) ** 2) / 2,
        {"c": TARGETS},
        np.zeros(3),
        several(tolerances=tolerances),
        fs.Ball(4.0),
    )
    w, f = optimum(tolerances)
    assert np.linalg.norm(w) < 4
    for soft in (False, True):
        algorithm = fs.FedSGM.from_theory(made, rounds=400, local_steps=2, soft=soft)
        assert algorithm.guarantee is not None
        run = fs.solve(made, algorithm, 400, evaluate_every=400)
        found = run.certificate(optimum=f)
        assert isinstance(found, fs.theory.Certificate)
        assert found.holds
        other = dataclasses.replace(algorithm, among="blend")
        run = fs.solve(made, other, 400, evaluate_every=400)
        with pytest.raises(fs.InvalidInput, match="asks for among = steepest"):
            fs.theory.certificate(run, algorithm.guarantee, optimum=f)


def test_gradients_are_not_computed_for_constraints_of_no_share():
    """Under `vmap` over clients the choice stays a branch."""
    made = problem(several()).on_device()

    def slope(w, shares):
        return jax.vmap(
            lambda c: jax.grad(
                lambda w: made.constraint.descended(
                    w, fs.problem.samples.Samples({"c": c}), (shares, (None, None)), 1
                )
            )(w)
        )(made.samples.values["c"])

    text = str(jax.make_jaxpr(slope)(jnp.ones(3), jnp.asarray([1.0, 0.0])))
    assert text.count("cond[") >= 2
