"""Guarantees of PPBC and PPBC+: step sizes and bounds of Theorems 3.2, 3.4, E.2 and E.6.

Paper: "Partial participation with bias correction" (under review, ICLR 2026), sections 3, D and E.

| here | paper | |
|---|---|---|
| `smoothness` | L | of f, the mean over clients |
| `strong_convexity` | μ | of f; with it Theorem 3.4 (E.6 for PPBC+), without 3.2 (E.2) |
| `delta_1`, `delta_2` | δ1, δ2 | (1/M) Σ ‖∇f_m − ∇f‖² ≤ δ1‖∇f‖² + δ2 |
| `noise` | σ | E‖∇f_m(x, ξ) − ∇f_m(x)‖² ≤ σ² |
| `clients`, `participants` | M, C | |
| `cap` | α | weights in the sum are at most α/M |
| `epoch_end` | p | by default C/M, as in the corollaries |
| `availability` | min q_m | PPBC+ |
| `gap`, `distance` | f(x^{0,0}) − f*, ‖x^{0,0} − x*‖ | |
| `epochs`, `accuracy` | K, ε | |

What the statements leave open, or the proofs give otherwise:
- **Epochs.** Lemma C.1 is about P(H = j) = p(1 − p)^{j−1}, j ≥ 1, the law of epochs that are not
  empty. So K counts those, as `epochs` in the history does, and K/p iterations are expected.
- **Countings.** Lemma D.1 needs Σ(1/M − π_m) = 0, 0 ≤ π̃_m ≤ α/M and |Σ(π̃_m − π_m)| ≤ 1. All
  countings have that: `"retained"` with the cap (α = 1 where all weights are equal), `"uniform"`
  with α = 1, and `"renormalised"` with its cap, for then Σπ̃ = 1. Without a cap α = M.
- **Theorem E.2.** With the 96 of Lemma E.1 and the 384 of (41), γ ≤ p min q/(768Lα(δ1 + 1)) leaves
  nothing of the γp/4·‖∇f(x^{k,0})‖² of the descent, where γp/8 is claimed. The statement is true:
  Lemma E.1 holds with 64 for 96, so that the surrogate takes only γp/12.
- **Corollaries 3.5 and E.7** take the larger of two ratios in the logarithm of γ, which is infinite
  if σ or δ2 is 0. Here both noises are in one ratio, which is at most the smaller of the two.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from fedsolve.algorithms.guarantee import PPBCGuarantee
from fedsolve.errors import InvalidInput
from fedsolve.fields import check_count, check_positive
from fedsolve.types import ArrayLike

MOST_EPOCHS = 10**40


def ppbc(
    *,
    clients: int,
    smoothness: float | int,
    epochs: int | None = None,
    accuracy: float | int | None = None,
    participants: int | None = None,
    epoch_end: float | int | None = None,
    cap: float | int | None = None,
    delta_1: float | int = 0.0,
    delta_2: float | int = 0.0,
    noise: float | int = 0.0,
    availability: ArrayLike | None = None,
    gap: float | int | None = None,
    strong_convexity: float | int | None = None,
    distance: float | int | None = None,
    step_size: float | int | None = None,
) -> PPBCGuarantee:
    """Compute γ, θ and the bound of Theorem 3.2, 3.4, E.2 or E.6, and what a run costs.

    With `gap`: smooth functions (3.2; with `availability` E.2). With `strong_convexity` and
    `distance`: strongly convex ones (3.4; with `availability` E.6).

    Args:
        clients: M.
        smoothness: L, of f.
        epochs: K. Give this or `accuracy`.
        accuracy: ε. K is then such that the bound is at most ε².
        participants: C, the clients that send in a round; None for all.
        epoch_end: p; by default C/M.
        cap: α, such that weights in the sum are at most α/M; None for M, no cap.
        delta_1: δ1.
        delta_2: δ2.
        noise: σ, of a client's minibatch gradients.
        availability: q, one number or one for each client; None for PPBC.
        gap: f(x^{0,0}) − f*, or a bound on it.
        strong_convexity: μ, of f.
        distance: ‖x^{0,0} − x*‖, or a bound on it.
        step_size: γ; by default that of the corollaries, with K in it.

    Returns:
        The step size, θ, the bound, the expected iterations and communications.

    Raises:
        InvalidInput: If a number is out of range, the step size is too large, or the arguments
            belong to no theorem.

    Example:
        >>> import fedsolve as fs
        >>> found = fs.theory.ppbc(
        ...     clients=10, participants=2, smoothness=1.0, gap=1.0, epochs=10**6, cap=1.0
        ... )
        >>> found.theorem, round(found.step_size, 6), found.communications
        ('PPBC, Theorem 3.2', 0.000521, 20000000.0)
    """
    check_count("clients", clients)
    sends = clients if participants is None else participants
    check_count("participants", sends, most=clients)
    p = sends / clients if epoch_end is None else float(epoch_end)
    if not 0 < p <= 1:
        raise InvalidInput(f"epoch_end is a probability above 0, got {p:g}.")
    alpha = float(clients) if cap is None else float(cap)
    if not 1 <= alpha <= clients:
        raise InvalidInput(f"cap must be from 1 to the {clients} clients, got {alpha:g}.")
    check_positive("smoothness", smoothness)
    for name, value in (("delta_1", delta_1), ("delta_2", delta_2), ("noise", noise)):
        check_positive(name, value, zero=True)
    if (epochs is None) == (accuracy is None):
        raise InvalidInput("Give epochs (K) or accuracy (ε), one of them.")
    constants = _Constants(
        M=clients,
        L=float(smoothness),
        alpha=alpha,
        p=p,
        q=None if availability is None else _least_rate(availability, clients),
        delta_1=float(delta_1),
        delta_2=float(delta_2),
        sigma=float(noise),
        mu=_check_strong(strong_convexity, smoothness),
        start=_check_start(gap, strong_convexity, distance),
    )
    if accuracy is not None:
        check_positive("accuracy", accuracy)
        epochs = _epochs_for(constants, float(accuracy) ** 2, step_size)
    assert epochs is not None
    check_count("epochs", epochs)
    largest = constants.largest
    gamma = constants.step_size(epochs) if step_size is None else float(step_size)
    check_positive("step_size", gamma)
    if gamma > largest * (1 + 1e-12):
        raise InvalidInput(f"step_size {gamma:g} is above {largest:.6g}, the largest allowed here.")
    return PPBCGuarantee(
        theorem=constants.theorem,
        step_size=gamma,
        momentum=constants.momentum(gamma),
        epoch_end=p,
        bound=constants.bound(gamma, epochs),
        epochs=epochs,
        largest=largest,
        clients=clients,
        participants=sends,
        cap=alpha,
        availability=constants.q,
        strongly_convex=constants.mu is not None,
        strong_convexity=constants.mu,
        stochastic=constants.sigma > 0,
        unchecked=_unchecked(constants),
    )


@dataclasses.dataclass(frozen=True)
class _Constants:
    """The constants of the theorems, by the paper's letters, and the theorems' formulas."""

    M: int
    L: float
    alpha: float
    p: float
    q: float | None
    delta_1: float
    delta_2: float
    sigma: float
    mu: float | None
    start: float  # f(x^{0,0}) − f*, or ‖x^{0,0} − x*‖²

    @property
    def theorem(self) -> str:
        if self.q is None:
            return "PPBC, Theorem 3.2" if self.mu is None else "PPBC, Theorem 3.4"
        return "PPBC+, Theorem E.2" if self.mu is None else "PPBC+, Theorem E.6"

    @property
    def largest(self) -> float:
        """The largest γ that the theorem allows."""
        scale = self.L * self.alpha * (self.delta_1 + 1)
        if self.mu is None:
            return self.p / (384 * scale) if self.q is None else self.p * self.q / (768 * scale)
        p = self.p**2
        return p / (96 * scale) if self.q is None else p * self.q / (384 * scale)

    def momentum(self, gamma: float) -> float:
        """Return the largest θ that the theorem allows."""
        if self.mu is None:
            return gamma * self.L * self.p**2 / 2
        return gamma * self.mu * self.p**2 / 4

    @property
    def variances(self) -> tuple[tuple[int, float], ...]:
        """The terms of the bound that are powers of γ: exponent and coefficient."""
        M, L, a, p, q = self.M, self.L, self.alpha, self.p, self.q
        d, s = self.delta_2, self.sigma**2
        if self.mu is not None:
            each = 144 * d + 74 * s / M if q is None else 296 * (2 * d + s)
            return ((1, 8 * a * each / (self.mu * p**3 * (q or 1))),)
        if q is None:
            return (
                (1, 768 * L * a * d / p),
                (2, 384 * L**2 * a * d / p**3),
                (1, 400 * L * a * s / (M * p)),
                (2, 192 * L**2 * a * s / (M * p**3)),
            )
        return (
            (2, 1536 * L**2 * a * d / (p**3 * q)),
            (1, 3200 * L * a * d / (p * q)),
            (2, 768 * L**2 * a * s / (p**3 * q)),
            (1, 1600 * L * a * s / (p * q)),
        )

    def bound(self, gamma: float, epochs: int) -> float:
        """Return the bound on (1/K) Σ E‖∇f(x^{k,0})‖², or on E‖x^{K,0} − x*‖²."""
        rest = sum(value * gamma**power for power, value in self.variances)
        if self.mu is None:
            return 16 * self.start / (gamma * epochs) + rest
        return self.start * math.exp(epochs * math.log1p(-gamma * self.mu / 8)) + rest

    def step_size(self, epochs: int) -> float:
        """γ of the corollaries: no term of the bound is larger than the one that falls with γ."""
        if self.mu is None:
            steps = [
                (16 * self.start / (epochs * value)) ** (1 / (power + 1))
                for power, value in self.variances
                if value > 0
            ]
            return min([self.largest, *(step for step in steps if step > 0)])
        ((_, value),) = self.variances
        if value == 0:
            return self.largest
        ratio = self.mu * self.start * epochs / (8 * value)
        return min(self.largest, 8 * math.log(max(2.0, ratio)) / (self.mu * epochs))


def _epochs_for(constants: _Constants, wanted: float, step_size: float | int | None) -> int:
    """Return the K from which on the bound is at most `wanted`."""

    def enough(epochs: int) -> bool:
        gamma = constants.step_size(epochs) if step_size is None else float(step_size)
        return constants.bound(gamma, epochs) <= wanted

    high = 1
    while not enough(high):
        high *= 2
        if high > MOST_EPOCHS:
            raise InvalidInput(
                f"With these constants the bound is above {wanted:g} even after {MOST_EPOCHS:g} "
                "epochs."
            )
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high


def _least_rate(availability: ArrayLike, clients: int) -> float:
    """Return min q_m."""
    rates = np.asarray(availability, float)
    if rates.shape not in ((), (clients,)) or not np.all((rates > 0) & (rates <= 1)):
        raise InvalidInput(
            f"availability must be a probability above 0, or one for each of the {clients} clients."
        )
    return float(rates.min())


def _check_strong(strong_convexity: float | int | None, smoothness: float | int) -> float | None:
    """Return μ; raise if it is above L."""
    if strong_convexity is None:
        return None
    check_positive("strong_convexity", strong_convexity)
    if strong_convexity > smoothness * (1 + 1e-9):
        raise InvalidInput(
            f"strong_convexity {strong_convexity:g} is above the smoothness {smoothness:g}."
        )
    return float(strong_convexity)


def _check_start(
    gap: float | int | None, strong_convexity: float | int | None, distance: float | int | None
) -> float:
    """Return what the theorem's first term falls from."""
    if strong_convexity is None:
        if gap is None or distance is not None:
            raise InvalidInput(
                "Give gap (Theorems 3.2 and E.2), or strong_convexity and distance (3.4 and E.6)."
            )
        check_positive("gap", gap, zero=True)
        return float(gap)
    if distance is None or gap is not None:
        raise InvalidInput("With strong_convexity give distance, and no gap.")
    check_positive("distance", distance, zero=True)
    return float(distance) ** 2


def _unchecked(constants: _Constants) -> tuple[str, ...]:
    """Return the assumptions of the theorem that nothing here checks."""
    found = ["f is L-smooth, and δ1, δ2 (and σ) hold wherever the run goes."]
    if constants.mu is not None:
        found.append("f is μ-strongly convex.")
    if constants.q is not None:
        found.append("Clients are up independently of one another and of other rounds, with q_m.")
    found.append("The bound is on an expectation: a single run may exceed it.")
    return tuple(found)
