"""Assumptions and guarantees of FedSGM's theorems.

Papers: "FedSGM: A Unified Framework …" (here FedSGM; Theorems 1 and 2 in the text are 3 to 8 in its
Appendix C, 9 is in D, 10 in E) and "Switching Gradient Methods for Constrained Federated
Optimization" (the forerunner), whose uplink is unbiased.

| here | papers | |
|---|---|---|
| `distance` | D | ‖w_0 − w*‖, or the diameter of X where clients or data are sampled |
| `lipschitz` | G | of every f_j and g_j |
| `rounds`, `local_steps` | T, E | |
| `clients`, `participants` | n, m | |
| `q`, `q_0` | q, q_0 | contraction of uplink and downlink |
| `q_u` | q_u | variance of an unbiased uplink |
| `failure` | δ | |
| `sigma` | σ | Ĝ(w) − g(w) is σ²/m-sub-Gaussian |
| `gradient_noise` | σ_ξ | of minibatch gradients |
| `constraint_noise`, `constraint_batch` | σ_b, N_b | of minibatch constraint values |
| `rho`, `rho_hat` | ρ, ρ̂ | weak convexity of f, and the proximal weight |
| `feasible_value` | g(w_feas) | a negative value of g, for Slater's condition |

All of them but Theorem 10 take η = √(D² / (2G²ETΓ)) and an ε that starts with √(2D²G²Γ / (ET)), and
differ in Γ and in what sampling adds to ε. Where a statement and its proof do not fit together, the
numbers here are the statement's, and `unchecked` lists what the proof leaves open. For soft
switching, ε is the statement's, and the bound on f(w̄) − f* is the one that is proven with it.
"""

from __future__ import annotations

import dataclasses
from math import log, sqrt

from fedsolve.algorithms.guarantee import EXPECTED, Guarantee
from fedsolve.compression.compressors import Compressor
from fedsolve.errors import InvalidInput
from fedsolve.fields import check_count, check_flag, check_kind, check_positive
from fedsolve.types import Table

Real = float | int


@dataclasses.dataclass(frozen=True)
class _Case:
    """The constants, by the papers' letters, and what decides which theorem applies.

    `from_compressors`: q, q_0 and q_u were read from compressors; `is_random`: these draw at
    random.
    """

    D: float
    G: float
    T: int
    E: int
    n: int
    m: int
    delta: float
    sigma: float
    soft: bool
    q: float
    q_0: float
    q_u: float
    stochastic: bool
    from_compressors: bool
    is_random: bool
    tight: bool

    @property
    def local(self) -> float:
        """The cost of local steps that is proven: the paper's, or ours."""
        return _direct_step_cost(self.E) if self.tight else _local_step_cost(self.E)

    @property
    def stated(self) -> float:
        """The cost of local steps in Γ: that of the statements, or ours."""
        return _direct_step_cost(self.E) if self.tight else 2.0 * self.E**2

    @property
    def ours(self) -> str:
        """What the theorem's name says of a Γ that is not the paper's."""
        return OURS if self.tight else ""

    @property
    def compressed(self) -> bool:
        """Whether anything is lost in compression."""
        return self.q < 1 or self.q_0 < 1 or self.q_u > 0

    @property
    def conditions(self) -> Table:
        """Return the fields of a guarantee that a run must match."""
        return {
            "rounds": self.T,
            "local_steps": self.E,
            "clients": self.n,
            "participants": self.m,
            "distance": self.D,
            "q": self.q,
            "q_0": self.q_0,
            "q_u": self.q_u,
            "stochastic": self.stochastic,
        }

    def guarantee(
        self,
        theorem: str,
        gamma: float,
        unchecked: list[str],
        sampling: float = 0.0,
        deviation: float = 0.0,
        factor: float = 1.0,
        proven: float = 1.0,
    ) -> Guarantee:
        """Build the guarantee from Γ and from what `sampling` adds to ε.

        `deviation` is how far Ĝ may be from g; `factor` multiplies the first term of ε; the bound
        on f(w̄) − f* is `proven` times ε.
        """
        D, G, T, E = self.D, self.G, self.T, self.E
        epsilon = factor * sqrt(2 * D**2 * G**2 * gamma / (E * T)) + sampling
        probability = 1.0 if sampling == 0 else 1 - self.delta
        return Guarantee(
            theorem=theorem,
            step_size=sqrt(D**2 / (2 * G**2 * E * T * gamma)),
            tolerance=epsilon,
            gamma=gamma,
            bound=proven * epsilon,
            constraint_bound=epsilon + deviation,
            probability=None if EXPECTED in unchecked else probability,
            beta=2 / epsilon if self.soft else None,
            multiplier=None,
            unchecked=tuple(unchecked),
            **self.conditions,
        )


# A guarantee is part of its algorithm, and so of the fingerprint in checkpoints: a run that was
# started with another wording of these sentences cannot be resumed.
CONVEX = "Every f_j and g_j is convex and Lipschitz with the G given (Assumption 1)."
OURS = ", with Fedsolve's own bound on local steps"
NEAR = "‖w_0 − w*‖ is at most the D given."
COMPACT = "X is convex and its diameter is at most the D given (Assumption 2)."
NO_PROJECTION = "X is all of R^d: the iterate x_t − η e_t of the proof is not projected."
CONTRACTION = "The compressors contract as q and q_0 say (Assumption 3)."
SAMPLED = "Ĝ(w_t) − g(w_t) is σ²/m-sub-Gaussian with the σ given (Assumption 4)."
ONE_COHORT = (
    "The clients that estimate g are independent of those whose gradients are taken (Assumption 4);"
    " Algorithm 1 takes one cohort for both."
)
OUTSIDE = "w_t stays in X: only x_t is projected, and w_t follows it by compressed steps."
PRODUCT = (
    "Γ's term 8E√(10(1−q_0))/(q_0 q) is less than the proof's own bounds on ‖x_t − w_t‖ and ‖v_t‖ "
    "give (80E√(1−q_0)/(q_0 q²)); Γ is enough for compressors with ‖C(v)‖ ≤ ‖v‖, such as Top-K."
)


def fedsgm(
    *,
    distance: Real,
    lipschitz: Real,
    rounds: int,
    local_steps: int = 1,
    clients: int = 1,
    participants: int | None = None,
    soft: bool = False,
    uplink: Compressor | None = None,
    downlink: Compressor | None = None,
    size: int | None = None,
    q: Real = 1.0,
    q_0: Real = 1.0,
    q_u: Real = 0.0,
    failure: Real = 0.05,
    sigma: Real | None = None,
    gradient_noise: Real | None = None,
    constraint_noise: Real = 0.0,
    constraint_batch: int = 1,
    rho: Real | None = None,
    rho_hat: Real | None = None,
    feasible_value: Real | None = None,
    tight: bool = False,
) -> Guarantee:
    """Compute step size, tolerance, β and the bound of the theorem that covers the case.

    Compression is given by compressors and the `size` of what they compress, or by their
    constants `q`, `q_0` and `q_u`. With `gradient_noise`, gradients are stochastic (Theorem 9);
    with `rho`, f is only weakly convex (Theorem 10).

    Args:
        distance: D, a bound on ‖w_0 − w*‖, or the diameter of X where clients or data are sampled.
        lipschitz: G, of every f_j and g_j.
        rounds: T.
        local_steps: E.
        clients: n.
        participants: m, the clients of a round; None for all.
        soft: Whether switching is soft.
        uplink: The compressor of what clients send.
        downlink: The compressor of what the server sends.
        size: d, the number of parameters; needed with compressors.
        q: The contraction of the uplink, in (0, 1]; 1 without compression.
        q_0: The contraction of the downlink, in (0, 1].
        q_u: The variance of an unbiased uplink.
        failure: δ, the probability with which the bound may fail.
        sigma: σ, where Ĝ(w) − g(w) is σ²/m-sub-Gaussian; needed with fewer participants than
            clients.
        gradient_noise: σ_ξ of minibatch gradients.
        constraint_noise: σ_b of minibatch constraint values.
        constraint_batch: N_b, the samples of a constraint value.
        rho: ρ, where f is ρ-weakly convex.
        rho_hat: ρ̂, the proximal weight; by default 3ρ.
        feasible_value: g(w_feas) < 0, for Slater's condition; needed with `rho`.
        tight: Whether Γ has 3E/2 − 1 for local steps in place of the paper's 2E². This bound is
            ours and not the paper's (the proof is in docs/theory.md); the theorem's name says so.

    Returns:
        The numbers to run FedSGM with, its bounds, and the assumptions that were not checked.

    Raises:
        InvalidInput: If no theorem covers the case, a constant that the theorem needs is missing,
            or a number is out of range.

    Example:
        >>> import fedsolve as fs
        >>> found = fs.theory.fedsgm(distance=5, lipschitz=4.7, rounds=2000, clients=20)
        >>> round(found.step_size, 5), round(found.bound, 4)
        (0.01189, 1.051)
        >>> found.theorem
        'FedSGM, Theorem 3 (Theorem 1, full participation)'
    """
    for name, value in (("distance", distance), ("lipschitz", lipschitz)):
        check_positive(name, value)
    check_count("rounds", rounds)
    check_count("local_steps", local_steps)
    check_count("clients", clients)
    check_count("constraint_batch", constraint_batch)
    if participants is not None:
        check_count("participants", participants, most=clients)
    for name, value in (("sigma", sigma), ("gradient_noise", gradient_noise), ("q_u", q_u)):
        if value is not None:
            check_positive(name, value, zero=True)
    check_positive("constraint_noise", constraint_noise, zero=True)
    check_flag("tight", tight)
    if not 0 < failure < 1:
        raise InvalidInput(f"failure is a probability between 0 and 1, got {failure}.")
    q, q_0, q_u, is_random = _compression(uplink, downlink, size, q, q_0, q_u)
    m = clients if participants is None else participants
    if m < clients and sigma is None:
        raise InvalidInput(
            "With fewer participants than clients the theorems need sigma: how far a cohort's "
            "constraint may be from everyone's (half the range of the g_j(w) is enough)."
        )
    case = _Case(
        D=float(distance),
        G=float(lipschitz),
        T=rounds,
        E=local_steps,
        n=clients,
        m=m,
        delta=failure,
        sigma=0.0 if m == clients else float(sigma or 0),
        soft=soft,
        q=float(q),
        q_0=float(q_0),
        q_u=float(q_u),
        stochastic=gradient_noise is not None,
        from_compressors=uplink is not None or downlink is not None,
        is_random=is_random,
        tight=tight,
    )
    if rho is not None:
        _check_alone("f is only weakly convex (Theorem 10)", case, gradient_noise)
        return _weakly_convex(case, rho, rho_hat, feasible_value)
    if gradient_noise is not None:
        _check_alone("gradients are stochastic (Theorem 9)", case)
        return _stochastic(case, gradient_noise, constraint_noise, constraint_batch)
    return _convex(case)


def _convex(case: _Case) -> Guarantee:
    """Choose the theorem for convex f_j and full gradients."""
    partial = case.m < case.n
    if case.soft and partial:
        raise InvalidInput(
            "No theorem covers soft switching with partial participation; take hard switching, or "
            "all clients."
        )
    if case.q_u > 0:
        if partial or case.q < 1 or case.q_0 < 1:
            raise InvalidInput(
                "No theorem covers an unbiased uplink with partial participation or with a "
                "compressed downlink; take all clients and no downlink compression, or a "
                "contractive uplink such as TopK."
            )
        return _unbiased_uplink(case)
    if not partial:
        return _full_participation(case)
    if case.compressed and case.is_random:
        raise InvalidInput(
            "With partial participation Theorem 7 needs deterministic compressors, such as "
            "TopK; these draw at random."
        )
    return _partial_participation(case)


def _full_participation(case: _Case) -> Guarantee:
    """Apply Theorems 3 and 6 (hard), 5 and 8 (soft)."""
    E, q, q_0 = case.E, case.q, case.q_0
    compression = 2 * E * sqrt(1 - q) / q + 4 * E * sqrt(10 * (1 - q_0)) / (q_0 * q)
    compressed = compression > 0
    number, text = {
        (False, False): (3, 1),
        (True, False): (5, 2),
        (False, True): (6, 1),
        (True, True): (8, 2),
    }[case.soft, compressed]
    gamma = case.stated + compression
    unchecked = [CONVEX, NEAR]
    if compressed:
        unchecked += [NO_PROJECTION] + [EXPECTED] * case.is_random
        unchecked += [CONTRACTION] * (not case.from_compressors)
    proven = _soft_factor(gamma, case.local + compression) if case.soft else 1.0
    return case.guarantee(
        f"FedSGM, Theorem {number} (Theorem {text}, full participation){case.ours}",
        gamma,
        unchecked,
        proven=proven,
    )


def _partial_participation(case: _Case) -> Guarantee:
    """Apply Theorems 4 and 7."""
    E, n, m, T, D, G = case.E, case.n, case.m, case.T, case.D, case.G
    q, q_0 = case.q, case.q_0
    unchecked = [CONVEX, COMPACT, SAMPLED, ONE_COHORT]
    deviation = case.sigma * sqrt(2 / m * log(6 * T / case.delta))
    sampling = 4 * D * G / sqrt(m * T) * sqrt(2 * log(3 / case.delta)) + 2 * deviation
    if q == q_0 == 1:
        theorem, gamma = 4, case.stated
    else:
        _check_stated("partial participation with compression (Theorem 7)", case)
        theorem = 7
        gamma = (
            2 * E**2
            + 16 * E * (n / m) * sqrt(10 * (1 - q) * (1 - q_0)) / (q_0 * q**2)
            + 8 * E * sqrt(10 * (1 - q_0)) / (q_0 * q)
            + 20 * E / q**2
            + (n / m) * 4 * E * sqrt(10 * (1 - q)) / q**2
        )
        sampling += (n / m) * 2 * D * G * sqrt(1 - q) / (q * T)
        unchecked += [OUTSIDE, PRODUCT] * (q_0 < 1) + [CONTRACTION] * (not case.from_compressors)
    return case.guarantee(
        f"FedSGM, Theorem {theorem} (Theorem 1, partial participation){case.ours}",
        gamma,
        unchecked,
        sampling,
        deviation,
    )


def _unbiased_uplink(case: _Case) -> Guarantee:
    """Apply the forerunner's Theorems 6 (hard) and 7 (soft), whose proof takes twice the ε."""
    gamma = case.stated + case.E * case.q_u / (2 * case.n)
    number, factor = (7, 2.0) if case.soft else (6, 1.0)
    return case.guarantee(
        f"FedSGM's forerunner, Theorem {number} (Theorem {2 if case.soft else 1}){case.ours}",
        gamma,
        [CONVEX, NEAR, EXPECTED],
        factor=factor,
    )


def _stochastic(case: _Case, noise: Real, of_values: Real, batch: int) -> Guarantee:
    """Apply Theorem 9: minibatch gradients and constraint values."""
    _check_stated("stochastic gradients (Theorem 9)", case)
    D, G, T, E, n, m, delta = case.D, case.G, case.T, case.E, case.n, case.m, case.delta
    effective = (
        3 * E**2 * G**2
        + E**2 * noise**2 * (1 + log(7 * n * T * E / delta))
        + 4 / m * (E * G**2 + noise**2) * log(28 * T / delta)
    )
    deviation = sqrt(2 / m * (case.sigma**2 + of_values**2 / batch) * log(14 * T / delta))
    sampling = (
        4 * G * D * sqrt(2 / (m * T) * log(7 / delta))
        + 2 * D * noise * sqrt(2 / (m * E * T) * log(7 / delta))
        + 2 * deviation
    )
    unchecked = [
        CONVEX,
        COMPACT,
        "Gradient noise δ has E exp(‖δ‖²/σ_ξ²) ≤ e with the σ_ξ given (Assumption 5).",
        "Constraint noise is σ_b²/N_b-sub-Gaussian (Assumption 5).",
        "The samples that estimate g are independent of those whose gradients are taken.",
    ]
    if m < n:
        unchecked += [SAMPLED, ONE_COHORT]
    return case.guarantee(
        "FedSGM, Theorem 9 (stochastic)", effective / G**2, unchecked, sampling, deviation
    )


def _weakly_convex(
    case: _Case, rho: Real, rho_hat: Real | None, feasible_value: Real | None
) -> Guarantee:
    """Apply Theorem 10.

    Γ is the proof's; η and ε are the statement's, which rounds it up to 2E². With the bound on
    local steps that is ours, all three have Γ' = 3E/2 − 1.
    """
    D, G, T, E, m, delta = case.D, case.G, case.T, case.E, case.m, case.delta
    check_positive("rho", rho)
    rho_hat = 3 * rho if rho_hat is None else rho_hat
    if not rho_hat > 2 * rho:
        raise InvalidInput(f"rho_hat must exceed 2 rho = {2 * rho:g}, got {rho_hat}.")
    if feasible_value is None or not feasible_value < 0:
        raise InvalidInput(
            "Theorem 10 needs feasible_value = g(w_feas) < 0 at some point inside X (Slater's "
            f"condition), got {feasible_value}."
        )
    multiplier = (G * D + rho_hat * D**2) / -feasible_value
    deviation = case.sigma * sqrt(2 / m * log(8 * T / delta))
    if case.tight:
        gamma = case.local
        step_size = sqrt(D**2 / (2 * G**2 * E * T * gamma))
        epsilon = sqrt(2 * D**2 * G**2 * gamma / (E * T))
        epsilon += step_size**2 * rho * G**2 * (E - 1) * (2 * E - 1) / 6
    else:
        gamma = _local_step_cost(E)
        step_size = sqrt(D**2 / (4 * G**2 * E**3 * T))
        epsilon = sqrt(4 * D**2 * G**2 * E / T) + D**2 * rho / (8 * E * T)
    epsilon += 4 * G * D / sqrt(m * T) * sqrt(2 * log(4 / delta)) + 2 * deviation * (1 + multiplier)
    return Guarantee(
        theorem=f"FedSGM, Theorem 10 (weakly convex){case.ours}",
        step_size=step_size,
        tolerance=epsilon,
        gamma=gamma,
        bound=sqrt((1 + multiplier) * epsilon / (rho_hat - 2 * rho)),
        constraint_bound=epsilon + deviation,
        probability=1 - delta,
        beta=None,
        multiplier=multiplier,
        unchecked=(
            "Every f_j is weakly convex with the ρ given, and every g_j is convex "
            "(Assumptions 6 and 7).",
            "Every f_j and g_j is Lipschitz with the G given (Assumption 8).",
            COMPACT,
            "g takes the value given in the relative interior of X (Assumption 9).",
            *([SAMPLED, ONE_COHORT] if m < case.n else []),
        ),
        **case.conditions,
    )


def _local_step_cost(E: int) -> float:
    """Return the cost of local steps in the proofs; the statements round it up to 2E²."""
    return E / 2 + 1 + E**2 / 3


def _direct_step_cost(E: int) -> float:
    """Return the cost of local steps by ‖w_t − w_{j,τ}‖ ≤ ητG: ours, proved in docs/theory.md."""
    return 3 * E / 2 - 1


def _soft_factor(gamma: float, needed: float) -> float:
    """Return the factor by which f(w̄) − f* may exceed ε = √(2D²G²Γ/(ET)) when β = 2/ε.

    With S = (ε/2)(1 + needed/Γ) for the left side of (20), 1 − σ_t = β(ε − g(w_t)) where both
    gradients are mixed, and a the mean of 1 − σ_t, (20) says f(w̄) − f* ≤ ε − (ε − S)/a + (1 − a)/β.
    The worst a gives ε + ε·max(0, 1/2 − √(1 − needed/Γ)).
    """
    return 1 + max(0.0, 0.5 - sqrt(1 - needed / gamma))


def _compression(
    uplink: Compressor | None,
    downlink: Compressor | None,
    size: int | None,
    q: Real,
    q_0: Real,
    q_u: Real,
) -> tuple[Real, Real, Real, bool]:
    """Return q, q_0, q_u and whether compressors draw at random, from either way to give them."""
    for name, value in (("q", q), ("q_0", q_0)):
        if not 0 < value <= 1:
            raise InvalidInput(
                f"{name} is the contraction of a compressor, in (0, 1], got {value}."
            )
    if uplink is None and downlink is None:
        return q, q_0, q_u, False
    if (q, q_0, q_u) != (1, 1, 0):
        raise InvalidInput("Give compressors or their constants (q, q_0, q_u), not both.")
    return constants(uplink, downlink, size)


def constants(
    uplink: Compressor | None, downlink: Compressor | None, size: int | None
) -> tuple[float, float, float, bool]:
    """Return q, q_0, q_u, and whether a compressor draws at random."""
    if size is None:
        raise InvalidInput("Compressors' constants depend on the size of w: give size as well.")
    check_count("size", size)
    for name, part in (("uplink", uplink), ("downlink", downlink)):
        if part is not None:
            check_kind(name, part, Compressor)
    q, q_u, q_0 = 1.0, 0.0, 1.0
    if uplink is not None and uplink.unbiased:  # no error feedback then: FedSGM sends C(Δ_j)
        q_u = uplink.variance(size)
    elif uplink is not None:
        q = _contraction("uplink", uplink, size)
    if downlink is not None:
        q_0 = _contraction("downlink", downlink, size)
    used = [part for part in (uplink, downlink) if part is not None]
    return q, q_0, q_u, not all(part.deterministic for part in used)


def _contraction(name: str, part: Compressor, size: int) -> float:
    """Return the contraction of a compressor, or raise if it has none."""
    if not part.contractive:
        raise InvalidInput(f"The {name} must be contractive, and {part} is not.")
    return part.contraction(size)


def _check_stated(setting: str, case: _Case) -> None:
    """Raise if the tighter bound on local steps is wanted where we have not proved it."""
    if case.tight:
        raise InvalidInput(f"tight=True is not proved for {setting}; leave it out.")


def _check_alone(assumption: str, case: _Case, gradient_noise: Real | None = None) -> None:
    """Raise if the case has a feature that no theorem combines with the assumption."""
    others = {
        "soft switching": case.soft,
        "compression": case.compressed,
        "stochastic gradients": gradient_noise,
    }
    for other, given in others.items():
        if given:
            raise InvalidInput(f"No theorem covers {other} where {assumption}.")
