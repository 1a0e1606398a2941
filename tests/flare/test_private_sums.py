"""Privacy over a link: sites add the noise, the server never has a sum without it."""

import jax.numpy as jnp
import numpy as np
import pytest

import fedsolve as fs

pytest.importorskip("dp_accounting")
pytest.importorskip("cryptography")

from fedsolve.flare.roster import TooFew
from fedsolve.flare.server import serve
from fedsolve.flare.site import SiteClients
from fedsolve.flare.summing import SummingRoster
from fedsolve.privacy.distributed import PrivateSum, Terms, normal
from fedsolve.privacy.secure import unflattened
from fedsolve.runtimes.placement import numbers_on_device, precision_of
from fedsolve.storage.arrays import encode
from tests.support.in_process import SITES, Wires, part

DELTA = 0.01
SECURE = fs.SecureSum(clip=50.0, threshold=1.0)  # every site must be there: the exact deviation


def still(size=400, clients=6):
    """Nothing to learn: every gradient is zero, and the constraint's value is 0.3."""
    return fs.Problem(
        lambda w, data: 0.0 * jnp.sum(w * data["x"]),
        {"x": np.ones((clients, 1))},
        params=np.zeros(size),
        constraint=lambda w, data: 0.3 + 0.0 * jnp.sum(w),
    )


class PrivateWires(Wires):
    def __init__(self, terms, *args):
        self.terms = terms
        super().__init__(*args)

    def start(self, site):
        own = part(self.problem, *SITES[site])
        given = {"aggregation": self.terms.secure, "terms": self.terms}
        args = self.home / site, own, self.algorithm, self.seed, self.precision
        self.shares[site] = SiteClients(*args, **given)
        self.shares[site].answer(encode({"kind": "hello", "total": self.problem.n}, {}))


def deploy(terms, problem, algorithm, wires, home, rounds):
    home.mkdir(exist_ok=True)
    log = []
    with precision_of("float64") as dtype:
        placed, tuned = problem.on_device(dtype), numbers_on_device(algorithm, dtype)
        link = SummingRoster(wires, placed, tuned, log.append, rule=terms.secure, home=home)
    given = {"aggregation": terms.secure, "privacy": terms.private}
    args = (link, list(SITES), problem, algorithm, rounds, 0, home)
    return serve(*args, precision="float64", **given), log


def test_sums_have_the_noise_that_is_accounted_for(tmp_path):
    clips = {"improve": 0.5, "measure": 2.0, "evaluation": 3.0}
    noises = {"improve": 4.0, "measure": 1.0, "evaluation": 2.0}
    private = fs.Private(clip=clips, noise=noises, delta=DELTA)
    problem, algorithm, rounds = still(), fs.FedSGM(0.1, tolerance=100.0), 12
    terms = Terms(SECURE, private, rounds)
    wires = PrivateWires(terms, problem, algorithm, tmp_path)
    run, log = deploy(terms, problem, algorithm, wires, tmp_path / "server", rounds)
    assert all(line.startswith("ready: ") for line in log)
    moves = np.asarray(run.params) / 0.1 / np.sqrt(rounds)
    assert np.std(moves) == pytest.approx(4.0 * 0.5 / 6, rel=0.15)
    for column, mean, noise in (
        ("constraint_estimate", 0.3, 1.0 * 2.0 / 6),
        ("objective", 0.0, 2.0 * 3.0 / 6),
        ("constraint", 0.3, 2.0 * 3.0 / 6),
    ):
        values = run.history[column] - mean
        assert np.std(values) == pytest.approx(noise, rel=0.6), column
        assert abs(np.mean(values)) < 4 * noise / np.sqrt(rounds)
    # It costs what a simulation costs in which everyone takes part, and goes on from there.
    simulated = private.plan(problem, algorithm, rounds).ledger.accountant
    expected = [simulated.epsilon(r, r) for r in (1, rounds)]
    np.testing.assert_allclose(run.history["epsilon"][[0, -1]], expected, rtol=1e-6)
    again = PrivateWires(terms, problem, algorithm, tmp_path / "again")
    other, _ = deploy(terms, problem, algorithm, again, tmp_path / "other", 1)
    for name in ("objective", "constraint", "constraint_estimate"):  # no seed tells the noise
        assert other.history[name][0] != run.history[name][0]


def test_what_was_spent_stays_spent_and_sites_see_to_it(tmp_path):
    problem, algorithm = still(20), fs.FedSGM(0.1, tolerance=100.0)
    private = fs.Private(clip=1.0, noise=6.0, delta=DELTA)
    home, three = tmp_path / "server", Terms(SECURE, private, 3)
    wires = PrivateWires(three, problem, algorithm, tmp_path)
    first, _ = deploy(three, problem, algorithm, wires, home, 3)
    # A server without its journal, or with an older one, gets nothing a second time: its sums are
    # those to which nobody answers, until it waits.
    with pytest.raises(TooFew):
        deploy(three, problem, algorithm, wires, tmp_path / "second", 3)
    # A site that agreed on three rounds has no fourth.
    six = Terms(SECURE, private, 6)
    with pytest.raises(TooFew, match="budget is for 3 rounds"):
        deploy(six, problem, algorithm, wires, home, 6)
    more = PrivateWires(six, problem, algorithm, tmp_path)
    run, _ = deploy(six, problem, algorithm, more, home, 6)
    assert run.rounds == 6
    np.testing.assert_array_equal(run.history["epsilon"][:3], first.history["epsilon"])
    louder = Terms(SECURE, fs.Private(clip=1.0, noise=3.0, delta=DELTA), 9)
    wires = PrivateWires(louder, problem, algorithm, tmp_path)
    with pytest.raises(fs.InvalidInput, match="spend its budget twice"):
        deploy(louder, problem, algorithm, wires, home, 9)


def rule_of(clip=1.0, deviation=2.0, threshold=2 / 3):
    with precision_of("float64"):
        return PrivateSum({"improve": clip}, threshold, deviations={"improve": deviation})


def test_each_site_adds_its_share_and_together_they_are_enough():
    rule, size, members, threshold = rule_of(), 20_000, 4, 3
    rows = {"x": np.zeros((2, size))}
    with precision_of("float64"):
        total = sum(rule.words("improve", rows, 8, threshold) for _ in range(members))
        scale = float(rule.scale("improve", 8))
    noise = total.view(np.int32) / scale
    assert np.std(noise) == pytest.approx(2.0 * np.sqrt(4 / 3), rel=0.03)
    one = rule.words("improve", rows, 8, threshold).view(np.int32) / scale
    assert np.std(one) == pytest.approx(2.0 / np.sqrt(3), rel=0.03)


def test_answers_come_through_the_noise_and_nothing_overflows():
    rule, size = rule_of(clip=1.0, deviation=1e-4), 50
    values = np.random.default_rng(0).standard_normal((8, size))
    values /= np.linalg.norm(values, axis=1, keepdims=True)
    with precision_of("float64"):
        words = rule.words("improve", {"x": values[:5]}, 8, 3)
        words = words + rule.words("improve", {"x": values[5:]}, 8, 3)
        known = {"x": np.zeros(size)}
        scale = float(rule.scale("improve", 8))
        total = unflattened(words, known)["x"][0].view(np.int32) / scale
        np.testing.assert_allclose(total, values.sum(0), atol=1e-3)
        loud = rule_of(clip=1.0, deviation=30.0)
        most = 8 * 1.0 + 12 * 30.0 * np.sqrt(2)
        assert most * float(loud.scale("improve", 8)) < 2**31


def test_noise_that_the_ring_would_round_away_is_refused():
    rule = rule_of(clip=1.0, deviation=1e-3)
    with precision_of("float64"), pytest.raises(fs.InvalidInput, match="too coarse for the noise"):
        rule.words("improve", {"x": np.zeros((1, 4))}, 10_000_000, 3)


def test_normal_numbers_are_normal():
    from scipy.stats import kstest

    values = normal(50_000)
    assert kstest(values, "norm").pvalue > 1e-4
    assert not np.any(values[:100] == normal(100))


@pytest.mark.parametrize(
    ("terms", "sentence"),
    [
        (
            lambda: Terms(SECURE, fs.Private(noise=1.0, evaluation="outside"), 3),
            "tells f and g without noise",
        ),
        (lambda: Terms(SECURE, fs.Private(noise=1.0), 3), "needs run.privacy.delta"),
        (
            lambda: Terms(SECURE, fs.Private(noise=8.0, epsilon=3.0, delta=DELTA), 99).agreed(
                still(), fs.FedSGM(0.1), 6
            ),
            "The budget is spent after",
        ),
        (
            lambda: Terms(SECURE, fs.Private(noise=1.0, delta=0.2), 3).agreed(
                still(), fs.FedSGM(0.1), 6
            ),
            "delta must be below 1/n",
        ),
    ],
)
def test_terms_that_cannot_be_kept_are_refused(terms, sentence):
    with pytest.raises(fs.InvalidInput, match=sentence):
        terms()
