"""FedSGM's and IncentFedAvg's theorems, transcribed from the papers independently of the package:
statements as functions of the papers' letters, and what their proofs need at any step size."""

import numpy as np


def full(D, G, E, T):
    """Theorems 3 and 5."""
    return np.sqrt(4 * D**2 * G**2 * E / T), np.sqrt(D**2 / (4 * G**2 * E**3 * T))


def full_compressed(D, G, E, T, q, q0):
    """Theorems 6 and 8: ε, η, Γ."""
    gamma = 2 * E**2 + 2 * E * np.sqrt(1 - q) / q + 4 * E * np.sqrt(10 * (1 - q0)) / (q0 * q)
    return *_common(D, G, E, T, gamma), gamma


def forerunner(D, G, E, T, n, qu, soft):
    """The forerunner's Theorems 6 and 7; its soft proof takes ε = 2√(2D²G²Γ/(ET))."""
    gamma = 2 * E**2 + E * qu / (2 * n)
    epsilon, eta = _common(D, G, E, T, gamma)
    return (2 * epsilon if soft else epsilon), eta, gamma


def partial(D, G, E, T, m, delta, sigma):
    """Theorem 4: ε, η."""
    epsilon, eta = full(D, G, E, T)
    epsilon += 4 * D * G / np.sqrt(m * T) * np.sqrt(2 * np.log(3 / delta))
    epsilon += 2 * sigma * np.sqrt(2 / m * np.log(6 * T / delta))
    return epsilon, eta


def partial_compressed(D, G, E, T, n, m, q, q0, delta, sigma):
    """Theorem 7 with the 1 − q_0 of its proof in the third term: ε, η, Γ."""
    gamma = sum(
        [
            2 * E**2,
            16 * E * n / m * np.sqrt(10 * (1 - q) * (1 - q0)) / (q0 * q**2),
            8 * E * np.sqrt(10 * (1 - q0)) / (q0 * q),
            20 * E / q**2,
            n / m * 4 * E * np.sqrt(10 * (1 - q)) / q**2,
        ]
    )
    epsilon, eta = _common(D, G, E, T, gamma)
    epsilon += n / m * 2 * D * G * np.sqrt(1 - q) / (q * T)
    epsilon += 4 * G * D / np.sqrt(m * T) * np.sqrt(2 * np.log(3 / delta))
    epsilon += 2 * sigma * np.sqrt(2 / m * np.log(6 * T / delta))
    return epsilon, eta, gamma


def stochastic(D, G, E, T, n, m, delta, sigma, sigma_xi, sigma_b, N_b):
    """Theorem 9: ε, η, G_eff."""
    G_eff = 3 * E**2 * G**2 + E**2 * sigma_xi**2 * (1 + np.log(7 * n * T * E / delta))
    G_eff += 4 / m * (E * G**2 + sigma_xi**2) * np.log(28 * T / delta)
    eta = np.sqrt(D**2 / (2 * G_eff * E * T))
    epsilon = np.sqrt(2 * D**2 * G_eff / (E * T))
    epsilon += 4 * G * D * np.sqrt(2 / (m * T) * np.log(7 / delta))
    epsilon += 2 * D * sigma_xi * np.sqrt(2 / (m * E * T) * np.log(7 / delta))
    epsilon += 2 * np.sqrt(2 / m * (sigma**2 + sigma_b**2 / N_b) * np.log(14 * T / delta))
    return epsilon, eta, G_eff


def weakly_convex(D, G, E, T, m, delta, sigma, rho, rho_hat, g_feas):
    """Theorem 10: ε, η, Λ, and the bound on the mean of ‖w_t − ŵ(w_t)‖."""
    Lambda = (G * D + rho_hat * D**2) / -g_feas
    epsilon = np.sqrt(4 * D**2 * G**2 * E / T) + D**2 * rho / (8 * E * T)
    epsilon += 4 * G * D / np.sqrt(m * T) * np.sqrt(2 * np.log(4 / delta))
    epsilon += 2 * sigma * np.sqrt(2 / m * np.log(8 * T / delta)) * (1 + Lambda)
    eta = np.sqrt(D**2 / (4 * G**2 * E**3 * T))
    return epsilon, eta, Lambda, np.sqrt((1 + Lambda) * epsilon / (rho_hat - 2 * rho))


def right_hand_side(eta, D, G, E, T, extra=0.0):
    """D²/(2ηET) + ηG²(E/2 + 1 + E²/3 + extra): what the proofs of Theorems 3, 5, 6 and 8 reach
    before they choose η; ε must not be smaller."""
    return D**2 / (2 * eta * E * T) + eta * G**2 * (E / 2 + 1 + E**2 / 3 + extra)


def direct_right_hand_side(eta, D, G, E, T, extra=0.0, rho=0.0):
    """The same where ‖w_t − w_{j,τ}‖ ≤ ητG bounds both terms of local drift: 4ηG·Σ_τ ητG, and for
    ρ-weak convexity 2ηρ·Σ_τ (ητG)², over 2ηE."""
    drift = sum(4 * eta * G * eta * tau * G for tau in range(E))
    drift += sum(2 * eta * rho * (eta * tau * G) ** 2 for tau in range(E))
    return (D**2 / T + (eta * E * G) ** 2 + drift) / (2 * eta * E) + eta * G**2 * extra


def soft_gap(epsilon, S):
    """The most that (20), mean[(1 − σ)(f − f*) + σ g] ≤ S, allows for f(w̄) − f* with β = 2/ε: the
    largest over a = mean(1 − σ), where g = ε − (1 − σ)/β wherever both gradients are mixed."""
    a = np.linspace(1e-4, 1, 200_001)
    return max(np.max(epsilon - (epsilon - S) / a + (1 - a) * epsilon / 2), epsilon)


def sampled_compressed_price(E, n, m, q, q0):
    """Γ as the steps of Theorem 7's proof add up for a compressor with ‖C(v)‖ ≤ ‖v‖.

    ‖e_j‖ ≤ 2√(1−q)EG/q gives ‖v_t‖ ≤ V = EG(1 + 2√(1−q)/q), and ‖x_t − w_t‖ ≤ 2η√(1−q_0)V/q_0. In
    units of 2η²E·G²:
    """
    s, s0 = np.sqrt(1 - q), np.sqrt(1 - q0)
    V = E * (1 + 2 * s / q)
    far, residual = 2 * s0 / q0 * V, n / m * 2 * s / q * E
    terms = V**2 + 2 * far * 2 * residual + 2 * far * V + 2 * V * residual
    return 1 + E**2 / 3 + terms / (2 * E)


def strategic_convex(gamma, m, H, R, r, L, nu, G, B, delta, rho, D, own):
    """IncentFedAvg's Theorem 4.8, step by step as its proof goes: what is left over 4 of D_f in
    Lemma 6.8 at round r, c_min of Lemma 6.10, what its condition leaves of consensus errors, and
    the bound, with Σ ‖∇f_i‖² ≤ m(G² + 2LB²D_f) in Lemma 6.7. `own` is Σ ‖∇f_i(x*)‖²."""
    at_r = delta * rho**r
    left = 1 - m * L * B**2 * at_r**1.5 - 4 * L * gamma * (m**2 * at_r**2 * B**2 + 1)
    c_min = 1 - m * H * np.sqrt(delta) / (1 - np.sqrt(rho)) * gamma
    consensus = c_min / 4 - 18 * m * L**2 * gamma**2 * (2 * m * L * gamma + 1) * B**2 * H**2
    total = D**2
    for _ in range(r, R):
        total += 2 * L * gamma * 9 * gamma**2 * (nu**2 + m * G**2) * H**3  # Lemma 6.9, a round
        total += H * gamma**2 * nu**2
    for round in range(R):  # these are summed from the first round on
        d = delta * rho**round
        total += 4 * H * gamma**2 * m**2 * d**2 * G**2 + H * gamma * d**1.5 * (m * G**2 + own)
    return left, c_min, consensus, 4 / (gamma * c_min) * total / ((R - r) * H)


def _common(D, G, E, T, gamma):
    return np.sqrt(2 * D**2 * G**2 * gamma / (E * T)), np.sqrt(D**2 / (2 * G**2 * E * T * gamma))
