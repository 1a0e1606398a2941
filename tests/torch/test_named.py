"""Constraints by name (`fs.constraints`) on modules: the same numbers as in JAX."""

import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedsolve as fs

torch = pytest.importorskip("torch")
nn, F = torch.nn, torch.nn.functional
importlib.import_module("fedsolve.torch")

N, S, D = 5, 12, 4


def clients(sizes=(S,) * N):
    rng = np.random.default_rng(0)
    made = [
        {
            "x": rng.standard_normal((size, D)),
            "y": np.arange(size) % 2,
            "group": rng.integers(0, 3, size),
        }
        for size in sizes
    ]
    return fs.stack_clients(made)


RAGGED = (12, 7, 9, 4, 12)


def linear():
    torch.manual_seed(0)
    return nn.Linear(D, 1).double()


def score(model, data):
    return model(data["x"])[:, 0]


def each_loss(model, data):
    return F.binary_cross_entropy_with_logits(
        score(model, data), data["y"].double(), reduction="none"
    )


def loss(model, data):
    return each_loss(model, data).mean()


def jax_score(params, data):
    return data["x"] @ params["weight"][0] + params["bias"][0]


def jax_each(params, data):
    z = jax_score(params, data)
    return jax.nn.softplus(z) - data["y"] * z


def pair(make, sizes, **options):
    """The problem in PyTorch, and the same one in JAX."""
    ours = fs.torch.problem(
        linear(), loss, clients(sizes), make(score, each_loss), mode="compiled", **options
    )
    start = {name: p.detach().numpy() for name, p in linear().named_parameters()}

    def mean(params, data):
        return jnp.mean(jax_each(params, data))

    plain = fs.Problem(mean, clients(sizes), start, make(jax_score, jax_each), **options)
    return ours, plain


CONSTRAINTS = {
    "group loss": lambda score, loss: fs.constraints.group_loss(loss, 0.68, group="group"),
    "sensitivity": lambda score, loss: fs.constraints.sensitivity(score, at_least=0.7),
    "odds": lambda score, loss: fs.constraints.equalized_odds(score, 0.05, group="group"),
    "tail": lambda score, loss: fs.constraints.cvar(loss, at_most=0.9, tail=0.5, levels=5),
    "each": lambda score, loss: fs.EachClient(fs.constraints.sensitivity(score, at_least=0.7)),
    "several": lambda score, loss: {
        "found": fs.constraints.sensitivity(score, at_least=0.7),
        "loss": fs.constraints.group_loss(loss, 0.68, group="group"),
    },
}


EQUAL = (S,) * N


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("group loss", RAGGED),
        ("each", RAGGED),
        ("several", EQUAL),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [
                ("group loss", EQUAL),
                ("sensitivity", RAGGED),
                ("odds", EQUAL),
                ("tail", RAGGED),
            ]
        ),
    ],
)
def test_a_constraint_has_the_numbers_of_jax(name, sizes):
    algorithm = fs.FedSGM(0.2, local_steps=2, participants=4, uplink=fs.TopK(0.6))
    ours, plain = (
        fs.solve(problem, algorithm, rounds=5, precision="float64")
        for problem in pair(CONSTRAINTS[name], sizes)
    )
    assert ours.history["switch"].sum() > 0
    for column in ("objective", "constraint", "switch"):
        np.testing.assert_allclose(
            ours.history[column], plain.history[column], rtol=1e-10, atol=1e-12, err_msg=column
        )
    for key in plain.params:
        np.testing.assert_allclose(ours.params[key], plain.params[key], rtol=0, atol=1e-12)


def test_minibatches_and_audits_have_the_numbers_of_jax():
    algorithm = fs.FedSGM(0.2, local_epochs=1)
    runs = [
        fs.solve(problem, algorithm, rounds=4, precision="float64")
        for problem in pair(CONSTRAINTS["group loss"], RAGGED, batch_size=4)
    ]
    np.testing.assert_allclose(
        runs[0].history["constraint"], runs[1].history["constraint"], rtol=1e-10
    )
    ours, plain = (run.audit(clients(RAGGED), ranges=(0.0, 9.0), sites=False) for run in runs)
    for one, other in zip(ours.verdicts, plain.verdicts, strict=True):
        assert (one.name, one.verdict, one.samples) == (other.name, other.verdict, other.samples)
        assert one.value == pytest.approx(other.value, rel=1e-5)


def test_dropout_is_drawn_in_steps_along_the_constraint_and_not_in_measurements():
    def network(rate):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(D, 8), nn.Tanh(), nn.Dropout(rate), nn.Linear(8, 1)).double()

    bound = fs.constraints.group_loss(each_loss, 0.1, group="group")  # always violated
    problems = {
        rate: fs.torch.problem(network(rate), loss, clients(), bound, mode="compiled")
        for rate in (0.0, 0.5)
    }
    measured = [
        fs.solve(problem, fs.FedSGM(1e-9), rounds=1, precision="float64").history["constraint"][0]
        for problem in problems.values()
    ]
    assert measured[0] == pytest.approx(measured[1], rel=1e-6)
    same, again, other = (
        fs.solve(problems[0.5], fs.FedSGM(0.1), rounds=1, seed=seed, precision="float64")
        for seed in (0, 0, 1)
    )
    assert same.history["constraint"] == again.history["constraint"]
    assert same.history["constraint"] != other.history["constraint"]
    audit = same.audit(clients(), ranges=(0.0, 9.0), sites=False)
    assert not audit.met


def centred(model, data):
    found = each_loss(model, data)
    return found - found.mean() + 1.0


def test_what_cannot_be_done_raises():
    def named(values):
        return fs.constraints.group_loss(values, 0.5, group="group")

    with pytest.raises(fs.InvalidInput, match=r"no number for each sample .* clients differ"):
        fs.torch.problem(linear(), loss, clients(RAGGED), named(centred), mode="compiled")
    with pytest.raises(fs.InvalidInput, match="one number for each of 12 samples, got shape"):
        fs.torch.problem(linear(), loss, clients(), named(loss), mode="compiled")
    message = "group_loss needs functions that can be compiled; in callbacks, give"
    with pytest.raises(fs.InvalidInput, match=message):
        fs.torch.problem(linear(), loss, clients(), named(each_loss), mode="callback")
    several = {"a": named(each_loss), "b": lambda model, data: model.weight.sum()}
    with pytest.raises(fs.InvalidInput, match=message):
        fs.torch.problem(linear(), loss, clients(), several, mode="callback")
