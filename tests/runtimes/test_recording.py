"""Rounds that are recorded without clients, and exchanges as values."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedsolve as fs
from fedsolve.federation.exchange import Exchange
from fedsolve.federation.options import RoundOptions
from fedsolve.federation.state import State
from fedsolve.runtimes.recording import (
    Pending,
    first_cohort,
    play_until_unanswered,
    record_round,
)
from fedsolve.runtimes.simulation import Simulation
from tests.support import examples

PROBLEM = examples.least_squares().on_device()
FEDSGM = fs.FedSGM(
    0.05, 0.1, participants=3, local_steps=2, uplink=fs.TopK(0.4), downlink=fs.TopK(0.4)
)


def start(algorithm, problem=PROBLEM):
    return State.start(problem, algorithm, jax.random.key(3))


def test_a_record_has_every_exchange_and_publication():
    record = record_round(PROBLEM, FEDSGM, start(FEDSGM))
    assert [each.method for each in record.exchanges] == ["measure", "improve"]
    measured, improved = record.exchanges
    assert measured.message is None
    assert measured.reply.shape == ()
    sigma, _ = improved.message
    assert (sigma.shape, sigma.dtype) == ((), jnp.float32)
    assert improved.reply.indices.shape == (2,)  # Top-K of 5 entries
    assert [packet.indices.shape for packet in record.packets] == [(2,)]
    assert record.one_cohort


@pytest.mark.parametrize(
    "algorithm",
    [
        fs.FedAvg(0.1),  # everyone: known before the program runs
        fs.FedAvg(0.1, selection=fs.participation.Top(2), weighting="FOLB"),  # asks all first
    ],
)
def test_a_round_of_several_cohorts_is_recognised(algorithm):
    assert not record_round(PROBLEM, algorithm, start(algorithm)).one_cohort


def test_more_clients_than_the_problem_has():
    state = State.start(PROBLEM, FEDSGM, jax.random.key(3), clients=100)
    everyone = fs.FedAvg(0.1, weighting="FOLB", selection=fs.participation.Top(3))
    wide = State.start(PROBLEM, everyone, jax.random.key(3), clients=100)
    record = record_round(PROBLEM, everyone, wide, clients=100)
    assert record.exchanges[0].method == "assess"
    assert int(jnp.max(first_cohort(PROBLEM, FEDSGM, state, 100))) < 100


def test_the_first_cohort_is_the_one_that_is_asked():
    state = start(FEDSGM)
    _, info = Simulation(PROBLEM, state).play(FEDSGM)
    np.testing.assert_array_equal(first_cohort(PROBLEM, FEDSGM, state, 6), info["cohort"])


def test_a_round_played_from_answers_is_the_round():
    """Each question is answered outside, until the state after the round is there."""
    state, answers, asked = start(FEDSGM), [], []
    while True:
        found = play_until_unanswered(PROBLEM, FEDSGM, state, RoundOptions(), 6, answers)
        if not isinstance(found, Pending):
            break
        asked.append(found.method)
        key = jax.random.fold_in(jax.random.wrap_key_data(state.seed), state.round)
        exchange = Exchange(
            PROBLEM,
            key,
            found.w,
            state.round,
            found.number,
            getattr(FEDSGM, found.method),
            found.message,
        )
        rows = jax.tree.map(
            lambda leaf, who=found.cohort: leaf[who],
            (PROBLEM.samples, (state.clients, state.memory)),
        )
        answers.append(jax.vmap(exchange.answer)(found.cohort, *rows)[1])
    assert asked == ["measure", "improve"]
    expected, info = Simulation(PROBLEM, state).play(FEDSGM)
    np.testing.assert_allclose(found[0].w, expected.w, rtol=1e-6)
    np.testing.assert_allclose(found[1]["switch"], info["switch"])


class Draws(fs.Algorithm):
    """Every client answers with a random number, twice."""

    def init(self, w):
        return None

    def draw(self, client, state):
        return state, jax.random.uniform(client.key)

    def round(self, fed, server, key):
        first = fed.ask(self.draw, fed.everyone)
        second = fed.ask(self.draw, fed.everyone)
        fed.publish(fs.Identity()(jnp.zeros_like(fed.w)))
        return server, {"first": first.values, "second": second.values}


def test_exchanges_and_clients_draw_with_keys_of_their_own():
    history = fs.solve(PROBLEM, Draws(), rounds=3).history
    drawn = np.concatenate([history["first"].ravel(), history["second"].ravel()])
    assert len(np.unique(drawn)) == 3 * 2 * PROBLEM.n
