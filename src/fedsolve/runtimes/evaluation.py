"""Evaluation: objective, constraint and metrics over all clients, at one w."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from fedsolve.algorithms.base import Algorithm
from fedsolve.compression.clipping import limit
from fedsolve.compression.packets import weighted_sum
from fedsolve.errors import InvalidInput
from fedsolve.federation.options import RoundOptions, lowest_clip
from fedsolve.federation.replies import Replies
from fedsolve.federation.rules import EVALUATION, Context, Draw, Rule
from fedsolve.federation.state import AT_EVALUATION, SeedWords, State, noise_of
from fedsolve.problem.constraints import Mean
from fedsolve.problem.problem import Problem
from fedsolve.problem.samples import Samples
from fedsolve.runtimes.blocks import map_clients
from fedsolve.runtimes.whole import is_light
from fedsolve.types import Info, PRNGKey, PyTree, Round, Vector

Values = dict[str, PyTree]  # by quantity, one row for each client
GRADIENTS = "clients' gradients"  # an entry that is not for the history
Shares = Float[Array, " n"] | None  # what each client counts in a weighted objective


def client_values(
    problem: Problem,
    w: Vector,
    key: PRNGKey | None = None,
    first: Round = 0,
    options: RoundOptions | None = None,
    gradient: bool = False,
    own_gradients: bool = False,
    memory: PyTree = None,
) -> Values:
    """Return `problem.values` of each client.

    Args:
        problem: The problem.
        w: Where.
        key: The evaluation's key, for problems that draw their data.
        first: The number of the first client, where the problem has a part of all clients.
        options: How clients are computed: how many at once, on which devices.
        gradient: Whether to add the entry `gradient`: sums of gradients of objectives, one row for
            each block of clients, so that there need not be one for each client.
        own_gradients: Whether that entry has one row for each client.
        memory: What clients keep, one row each, where they keep parts of the model.
    """
    options = options or RoundOptions()
    keeps = problem.keeps_own
    if keeps and memory is None:
        raise InvalidInput(
            "Clients keep parts of this model, so it can be evaluated only where their states are."
        )

    def one(w: Vector, index: Round, samples: Samples, *kept: PyTree) -> Values:
        own = None if key is None else jax.random.fold_in(key, first + index)
        return problem.values(w, samples, own, *kept)

    def each(indices: Int[Array, " b"], samples: Samples) -> Values:
        def objective(w: Vector, index: Round, samples: Samples) -> tuple[Float[Array, ""], Values]:
            found = one(w, index, samples)
            return found["objective"], found

        slopes = jax.vmap(jax.grad(objective, has_aux=True), in_axes=(None, 0, 0))
        slope, found = slopes(w, indices, samples)
        return found | {"gradient": slope}

    def block(indices: Int[Array, " b"], samples: Samples, *kept: PyTree) -> Values:
        if own_gradients:
            return each(indices, samples)

        def total(w: Vector) -> tuple[Float[Array, ""], Values]:
            axes = (None, 0, 0, *(0 for _ in kept))
            found = jax.vmap(one, in_axes=axes)(w, indices, samples, *kept)
            return jnp.sum(jnp.where(indices < problem.n, found["objective"], 0)), found

        if not gradient:
            return total(w)[1]
        slope, found = jax.grad(total, has_aux=True)(w)
        return found | {"gradient": slope[None]}

    everyone = np.arange(problem.n, dtype=np.int32)
    if own_gradients and options.mesh is None and options.clients_at_once is None:
        alone = jax.tree.map(lambda leaf: leaf[:1], problem.samples)
        if is_light(lambda samples: each(jnp.arange(1), samples), alone):
            return each(jnp.asarray(everyone), problem.samples)
    data = (problem.samples, memory) if keeps else (problem.samples,)
    return map_clients(block, everyone, data, options)


def evaluate(
    problem: Problem,
    w: Vector,
    key: PRNGKey | None = None,
    options: RoundOptions | None = None,
    shares: Shares = None,
    keep: bool = False,
    memory: PyTree = None,
    through: Through | None = None,
) -> Info:
    """Return f and g over all clients, the metrics, and what else is to be followed, at w.

    With `keep`, also the clients' gradients, as `GRADIENTS`.
    """
    options = RoundOptions() if options is None else options
    gradient = options.wants_gradient
    given = {"options": options, "gradient": gradient, "own_gradients": keep, "memory": memory}
    values = client_values(problem, w, key, **given)
    found = combined(problem, w, values, shares, through)
    if keep:
        found[GRADIENTS] = values["gradient"]
    for name, diagnostic in options.follow:
        told = diagnostic(problem, problem.params_at(w))
        for path, leaf in jax.tree.leaves_with_path(told):
            part = jax.tree_util.keystr(path, simple=True, separator=".")
            found[f"{name}.{part}" if part else name] = jnp.asarray(leaf)
    return found


def evaluate_state(
    problem: Problem,
    algorithm: Algorithm,
    state: State,
    options: RoundOptions,
    keep: bool = False,
) -> Info:
    """Evaluate after a round, with the compression error that clients hold back there."""
    shares = algorithm.objective_weights(state.server, state.participation)
    problem = state.problem_now(problem)
    through = Through.of(options, state)
    found = evaluate(
        problem, state.w, state.evaluation_key, options, shares, keep, state.memory, through
    )
    if through is not None:
        return found  # what clients hold back is their own affair
    error = algorithm.uplink_error(state.clients, state.w, state.round)
    return found if error is None else found | {"uplink_error": error}


class Through(eqx.Module):
    """The rules through which the clients' values of one evaluation go."""

    rules: tuple[Rule, ...]
    seed: SeedWords
    round: Round

    @classmethod
    def of(cls, options: RoundOptions, state: State) -> Through | None:
        """Return the rules for an evaluation in that state, if there are any."""
        rules = tuple(rule for rule in options.rules if rule.covers_evaluation())
        return cls(rules, state.seed, state.round) if rules else None

    def replies(self, values: Values) -> dict[str, Replies]:
        """Return each quantity, of which only sums and means can be had."""
        found: dict[str, Replies] = {}
        context = Context(EVALUATION, self.draw(), lambda name: None)
        for name, heard in self.heard(values).items():
            for rule in self.rules:
                heard = rule.receive(heard, context)
            found[name] = heard
        return found

    def heard(self, values: Values) -> dict[str, Replies]:
        """Return what the first rule gets."""
        limited = values_limited(self.rules, values)
        arrived = np.ones(len(values["objective"]), bool)
        return {name: Replies(own, arrived) for name, own in limited.items()}

    def draw(self) -> Draw:
        """Return what draws the noise."""
        return noise_of(self.seed, self.round, AT_EVALUATION)


def values_limited(rules: Sequence[Rule], values: Values) -> Values:
    """Return clients' values, each scaled to the norm that rules allow in an evaluation."""
    clip = lowest_clip(rules, EVALUATION)
    if clip is None:
        return values
    limited = jax.vmap(functools.partial(limit, bound=clip))
    return {name: limited(own) for name, own in values.items()}


def combined(
    problem: Problem,
    w: Vector,
    values: Values,
    shares: Shares = None,
    through: Through | None = None,
) -> Info:
    """Return f, g and the metrics at w from clients' values there, and of how many clients.

    With `shares` there is also the f (and the g, where it is a mean) in which clients count by
    these. With an entry `gradient` there is also ‖∇f(w)‖².
    """
    scalars = {k: v for k, v in values.items() if k not in ("constraint", "gradient")}
    covered: dict[str, Replies] = {}
    if through is None:
        found: Info = {k: jnp.mean(v) for k, v in scalars.items()}
    else:
        _check_through(values, shares)
        covered = through.replies(values)
        found = {k: jnp.mean(covered[k].mean()) for k in scalars}
    found["clients_evaluated"] = jnp.int32(len(values["objective"]))
    if "gradient" in values:
        parts = values["gradient"]  # of some clients together each
        slope = weighted_sum(jnp.full(len(parts), 1 / len(values["objective"])), parts)
        found["squared_gradient"] = jnp.sum(slope**2)
    if problem.constraint is not None:
        heard = Replies(values["constraint"], np.ones(len(values["objective"]), bool))
        heard = covered.get("constraint", heard)
        found["constraint"], _ = problem.constraint.combine(heard)
        found |= problem.constraint.report(heard)
    if shares is not None:
        each = {k: values[k] for k in ("objective", "constraint") if k in values}
        if not isinstance(problem.constraint, Mean):
            each.pop("constraint", None)
        total = jnp.sum(shares)  # of those that were heard
        found |= {f"weighted_{k}": jnp.sum(shares * v) / total for k, v in each.items()}
    params = problem.params_at(w)
    extra = () if problem.state is None else (problem.state,)
    return found | {name: metric(params, problem.test, *extra) for name, metric in problem.metrics}


def _check_through(values: Values, shares: Shares) -> None:
    """Raise if an evaluation has more than the rule between it and the clients covers."""
    if "gradient" in values:
        raise InvalidInput(
            "A rule on ‖∇f(w)‖² sees every client's gradient without noise: stop by the objective, "
            'or give evaluation="outside".'
        )
    if shares is not None:
        raise InvalidInput(
            "The weighted objective is not covered by privacy: use equal weights, or give "
            'evaluation="outside".'
        )
