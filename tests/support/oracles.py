"""Independent NumPy transcriptions, written from the papers and not from our code."""

import numpy as np


def top_k(v, fraction):
    """Top-K: the ceil(fraction·d) entries of largest magnitude."""
    keep = max(1, int(np.ceil(fraction * v.size - 1e-9)))
    kept = np.zeros_like(v)
    largest = np.argsort(-np.abs(v), kind="stable")[:keep]
    kept[largest] = v[largest]
    return kept


def same(v):
    return v


def hard(z):
    return 1.0 if z > 0 else 0.0


def soft(beta):
    return lambda z: min(1.0, max(0.0, 1.0 + beta * z))


def fedsgm(
    clients,
    w0,
    cohorts,
    step_size,
    tolerance,
    switch,
    local_steps=1,
    uplink=same,
    downlink=same,
    feedback=True,
    project=same,
):
    """FedSGM, Algorithm 1, line by line. `clients` is a list of (∇f_j, g_j, ∇g_j).

    Returns every w_t (t = 0 … T), the average w̄, and each client's Σ Δ_j, Σ v_j and e_j.
    """
    w, x = w0.copy(), w0.copy()
    residual = [np.zeros_like(w0) for _ in clients]
    moved = [np.zeros_like(w0) for _ in clients]
    sent = [np.zeros_like(w0) for _ in clients]
    path, weights = [w.copy()], []
    for t, cohort in enumerate(cohorts):
        eta = step_size(t) if callable(step_size) else step_size
        estimate = np.mean([clients[j][1](w) for j in cohort])  # lines 3-4
        sigma = switch(estimate - tolerance)
        weights.append(1 - sigma)
        received = []
        for j in cohort:  # lines 5-28
            grad_f, _, grad_g = clients[j]
            local = w.copy()
            for _ in range(local_steps):
                local = local - eta * ((1 - sigma) * grad_f(local) + sigma * grad_g(local))
            delta = (w - local) / eta
            if feedback:
                v = uplink(residual[j] + delta)
                residual[j] = residual[j] + delta - v
            else:
                v = uplink(delta)
            moved[j], sent[j] = moved[j] + delta, sent[j] + v
            received.append(v)
        x = project(x - eta * np.mean(received, axis=0))  # lines 29-
        w = w + downlink(x - w)
        path.append(w.copy())
    weights = np.asarray(weights)
    average = weights @ np.asarray(path[:-1]) / weights.sum() if weights.sum() > 0 else None
    return np.asarray(path), average, (moved, sent, residual)


def penalty_fedavg(
    clients,
    w0,
    cohorts,
    step_size,
    tolerance,
    rho,
    local_steps=1,
    switch=hard,
    uplink=same,
    downlink=same,
):
    """FedAvg on f + ρ[g − ε]₊ (FedSGM's appendix). `clients` is a list of (∇f_j, g_j, ∇g_j).

    What clients send is compressed with EF14, what the server sends with EF21-P.
    """
    w, x, path = w0.copy(), w0.copy(), [w0.copy()]
    residual = [np.zeros_like(w0) for _ in clients]
    for cohort in cohorts:
        penalty = rho * switch(np.mean([clients[j][1](w) for j in cohort]) - tolerance)
        received = []
        for j in cohort:
            grad_f, _, grad_g = clients[j]
            local = w.copy()
            for _ in range(local_steps):
                local = local - step_size * (grad_f(local) + penalty * grad_g(local))
            wanted = residual[j] + (w - local) / step_size
            received.append(uplink(wanted))
            residual[j] = wanted - received[-1]
        x = x - step_size * np.mean(received, axis=0)
        w = w + downlink(x - w)
        path.append(w.copy())
    return np.asarray(path)


def lagrangian_fedavg(
    clients, w0, cohorts, step_size, dual_step, tolerance, bound=np.inf, local_steps=1
):
    """FedAvg on f + λ(g − ε) with projected dual ascent; returns all w and all λ."""
    w, dual, path, duals = w0.copy(), 0.0, [w0.copy()], [0.0]
    for cohort in cohorts:
        ends = []
        for j in cohort:
            grad_f, _, grad_g = clients[j]
            local = w.copy()
            for _ in range(local_steps):
                local = local - step_size * (grad_f(local) + dual * grad_g(local))
            ends.append(local)
        violation = np.mean([clients[j][1](w) for j in cohort]) - tolerance
        w, dual = np.mean(ends, axis=0), min(max(dual + dual_step * violation, 0.0), bound)
        path.append(w)
        duals.append(dual)
    return np.asarray(path), np.asarray(duals)


def ipp_conex(f_prime, psi, psi_prime, x0, outer, inner, eta, tau, theta, mu_0, mu_1):
    """Boob, Deng and Lan: inexact proximal point over ConEx (their Algorithm 1, γ_t = 1).

    `psi` is the constraint's value, feasible where it is ≤ 0. Returns what each outer iteration
    gives, and all inner points.
    """
    centre, y, outputs, path = x0.copy(), 0.0, [], []
    for _ in range(outer):

        def simple(x, c=centre):  # χ_1, kept as it is, not linearised
            return mu_1 * np.sum((x - c) ** 2)

        points = [centre, centre, centre]  # x_{−2}, x_{−1}, x_0
        for _ in range(inner):
            before, last, now = points[-3:]
            linear_now = psi(last) + psi_prime(last) @ (now - last)
            linear_last = psi(before) + psi_prime(before) @ (last - before)
            s = (1 + theta) * (linear_now + simple(now)) - theta * (linear_last + simple(last))
            y = max(y + s / tau, 0.0)
            # argmin of a quadratic: its derivative is zero
            slope = f_prime(now) + y * psi_prime(now)
            curve = 2 * mu_0 + 2 * y * mu_1
            points.append((eta * now + curve * centre - slope) / (eta + curve))
        path += points[3:]
        centre = np.mean(points[3:], axis=0)
        outputs.append(centre)
    return np.asarray(outputs), np.asarray(path)


def sigmoid(z):
    return np.where(z >= 0, 1 / (1 + np.exp(-np.abs(z))), 1 - 1 / (1 + np.exp(-np.abs(z))))


def neyman_pearson_clients(majority, minority):
    """(∇f_j, g_j, ∇g_j) of the Neyman-Pearson problem, for each client's two classes."""

    def client(a, b):
        return (
            lambda w: a.T @ sigmoid(a @ w) / len(a),
            lambda w: np.mean(np.logaddexp(0, -(b @ w))),
            lambda w: -b.T @ sigmoid(-(b @ w)) / len(b),
        )

    return [client(a, b) for a, b in zip(majority, minority, strict=True)]


def capped(weights, most):
    """The nearest point of {π ≥ 0, Σπ = 1, π ≤ most}, by bisection."""
    low, high = np.min(weights) - 1, np.max(weights)
    for _ in range(200):
        middle = (low + high) / 2
        above = np.clip(weights - middle, 0, most).sum() > 1
        low, high = (middle, high) if above else (low, middle)
    return np.clip(weights - low, 0, most)


def counted(scores, selected, counting, alpha=None):
    """π̂: what the selected clients have for a weight, in the three ways of counting."""
    m = len(scores)
    pi = np.asarray(scores) / np.sum(scores)
    if alpha is not None:
        pi = capped(pi, alpha / m)
    chosen = np.isin(np.arange(m), selected)
    if counting == "uniform":
        return chosen / m
    kept = np.where(chosen, pi, 0)  # R zeroes the others and retains these
    if counting == "retained":
        return kept
    kept = kept / kept.sum()
    if alpha is not None:
        kept[chosen] = capped(kept[chosen], alpha / m)
    return kept


def ppbc(grads, x0, epochs, step_size, theta, choose, up=None, q=1.0, choose_round=None):
    """PPBC and PPBC+, Algorithms 1 and 2, line by line. `grads` is a list of ∇f_m; an epoch is the
    list of its rounds' numbers, which may be empty; `choose(x)` gives π̂ at an epoch's start, and
    `choose_round(x, π̂)` gives π̃; up[t][m] is η_m.

    Returns x at the start of every epoch after the first.
    """
    m = len(grads)
    x, g_prev, starts = x0.copy(), np.zeros_like(x0), []
    for rounds in epochs:
        pi = choose(x)  # lines 4, 5
        g = [np.zeros_like(x0) for _ in range(m)]  # line 6
        for t in rounds:
            tilde = pi if choose_round is None else choose_round(x, pi)  # line 10
            eta = np.ones(m) if up is None else np.asarray(up[t], float)
            slopes = [eta[i] / q * grads[i](x) for i in range(m)]
            for i in range(m):  # line 12
                g[i] = g[i] + (1 - theta) * (1 / m - tilde[i]) * slopes[i]
            step = sum(tilde[i] * slopes[i] for i in range(m))
            x = x - step_size * ((1 - theta) * step + theta * g_prev)  # line 17
        g_prev = sum(g)  # line 22
        x = x - step_size * g_prev  # line 7 of the next epoch
        starts.append(x.copy())
    return np.asarray(starts)


def fedadmm(
    gradients,
    w0,
    cohorts,
    k0,
    lipschitz,
    penalties,
    accuracy,
    decay=0.95,
    most=3,
    dual_start="zero",
):
    """FedADMM, Algorithm 1 with (15), line by line. `gradients` is a list of ∇f_i.

    Returns the averaged w after each upload, and, of every iteration k = 0, 1, …, what (22) needs:
    (w, W, Π, ε).
    """
    m = len(gradients)
    alpha, sigma = 1 / m, np.sum(penalties)
    local = np.tile(w0, (m, 1))
    pi = np.zeros_like(local)
    if dual_start == "gradient":
        pi = np.stack([-alpha * grad(w0) for grad in gradients])
    z = penalties[:, None] * local + pi
    eps = np.full(m, float(accuracy))
    averaged, steps = [], [(z.sum(0) / sigma, local.copy(), pi.copy(), eps.copy())]
    for cohort in cohorts:
        w = z.sum(axis=0) / sigma  # (4)
        for _ in range(k0):
            for i in cohort:
                eps[i] *= decay  # (5)
                v = w.copy()
                for _ in range(most):  # (6) by (15)
                    step = alpha * lipschitz[i] * v + penalties[i] * w
                    step -= alpha * gradients[i](v) + pi[i]
                    v = step / (alpha * lipschitz[i] + penalties[i])
                    residual = alpha * gradients[i](v) + pi[i] + penalties[i] * (v - w)
                    if residual @ residual <= eps[i]:
                        break
                local[i] = v
                pi[i] = pi[i] + penalties[i] * (v - w)  # (7)
                z[i] = penalties[i] * v + pi[i]  # (8)
            steps.append((w, local.copy(), pi.copy(), eps.copy()))
        averaged.append(z.sum(axis=0) / sigma)
    return np.asarray(averaged), steps


def _descended(slope, w, step_size, local_steps):
    for _ in range(local_steps):
        w = w - step_size * slope(w)
    return w


def q_fedavg(clients, w0, cohorts, q, lipschitz, local_steps=1):
    """q-FedAvg (Li et al. 2020, Algorithm 2), steps of 1/L. `clients` is a list of (F_k, ∇F_k).

    Returns every w."""
    path = [w0]
    for cohort in cohorts:
        w, moves, bounds = path[-1], [], []
        for k in cohort:
            loss, slope = clients[k]
            far = lipschitz * (w - _descended(slope, w, 1 / lipschitz, local_steps))
            F = loss(w)
            moves.append(F**q * far)
            bounds.append(q * F ** (q - 1) * (far @ far) + lipschitz * F**q)
        path.append(w - np.sum(moves, axis=0) / np.sum(bounds))
    return np.asarray(path)


def afl(clients, w0, cohorts, step_size, weight_step, local_steps=1):
    """Stochastic-AFL (Mohri et al. 2019) with per-domain gradients, and FedAvg's local steps.

    `clients` is a list of (f_k, ∇f_k). Returns every w and every λ."""
    n = len(clients)
    path, mixtures = [w0], [np.full(n, 1 / n)]
    for cohort in cohorts:
        w, mixture = path[-1], mixtures[-1]
        move, rise = np.zeros_like(w), np.zeros(n)
        for k in cohort:
            loss, slope = clients[k]
            move += (
                n / len(cohort) * mixture[k] * (w - _descended(slope, w, step_size, local_steps))
            )
            rise[k] = n / len(cohort) * loss(w)
        path.append(w - move)
        mixtures.append(capped(mixture + weight_step * rise, 1.0))
    return np.asarray(path), np.asarray(mixtures)


def proxal(clients, w0, outer, inner, local_steps, eta, beta, rho, epsilon, shared):
    """He, Peng and Sun's Algorithms 1 and 2 on copies v_j = (u_j, s_j) of (w, s).

    `clients` is a list of (∇f_j, g_j, ∇g_j). With `shared`, c_j(w, s) = g_j(w) − s_j and the
    server has Σ s_j = nε; without it, c_j = g_j(w) − ε. A client's best s_j is found by bisection,
    the server's step by solving its KKT system. Returns w after every step of ADMM, and the μ."""
    n = len(clients)
    kappa = 1 / ((n + 1) * beta)
    w, s, mu, path = w0.copy(), np.full(n, float(epsilon)), np.zeros(n), []
    for k in range(outer):
        if k > 0:
            mu = np.array([max(mu[j] + beta * (clients[j][1](w) - s[j]), 0) for j in range(n)])
        centre, level = w.copy(), s.copy()
        u, t = np.tile(w, (n, 1)), s.copy()
        a = [max(mu[j] + beta * (clients[j][1](w) - s[j]), 0) for j in range(n)]
        dual = np.array([-(clients[j][0](w) + a[j] * clients[j][2](w)) for j in range(n)])
        slack_dual = np.array(a, float)
        for step in range(inner):
            if step > 0:
                for j, (grad_f, g, grad_g) in enumerate(clients):

                    def best(value, j=j, s=s, mu=mu, level=level, slack_dual=slack_dual):
                        if not shared:
                            return epsilon
                        low, high = -1e4, 1e4  # its derivative grows
                        for _ in range(120):
                            x = (low + high) / 2
                            slope = -max(mu[j] + beta * (value - x), 0) + kappa * (x - level[j])
                            slope += slack_dual[j] + rho * (x - s[j])
                            low, high = (x, high) if slope < 0 else (low, x)
                        return x

                    for _ in range(local_steps):
                        weight = max(mu[j] + beta * (g(u[j]) - best(g(u[j]))), 0)
                        slope = grad_f(u[j]) + weight * grad_g(u[j]) + kappa * (u[j] - centre)
                        u[j] = u[j] - eta * (slope + dual[j] + rho * (u[j] - w))
                    t[j] = best(g(u[j]))
                    dual[j] += rho * (u[j] - w)
                    slack_dual[j] += rho * (t[j] - s[j])
            w = (rho * np.sum(u + dual / rho, axis=0) + kappa * centre) / (n * rho + kappa)
            if shared:
                system = np.eye(n + 1) * (rho + kappa)
                system[n], system[:, n] = 1, 1
                system[n, n] = 0
                right = np.append(rho * t + slack_dual + kappa * level, n * epsilon)
                s = np.linalg.solve(system, right)[:n]
            path.append(w.copy())
    return np.asarray(path), mu


def fedadmm_exact(quadratics, w0, cohorts, k0, penalties, on_time=None, scales=None, shrink=0.0):
    """FedADMM with exact solutions of (6) for f_i(w) = ½wᵀH_i w − b_iᵀw, `quadratics` = (H, b).

    Late answers (`on_time` false) are averaged a round later; a participant of round r has the
    penalty `scales[r]` σ_i; the average is shrunk by `shrink`/Σσ_i, as the lasso needs it.

    Returns the averaged w after each round, and W, Π, σ at the end.
    """
    m = len(penalties)
    sigma, w = np.array(penalties, float), w0.copy()
    local, pi = np.tile(w0, (m, 1)), np.zeros((m, len(w0)))
    known = sigma[:, None] * local, sigma.copy()  # z_i and σ_i, as they are averaged
    averaged = []
    for r, cohort in enumerate(cohorts):
        waiting = []
        late = np.zeros(len(cohort), bool) if on_time is None else ~on_time[r]
        for i, slow in zip(cohort, late, strict=True):
            if scales is not None:
                sigma[i] = scales[r] * penalties[i]
            hessian, b = quadratics[i]
            for _ in range(k0):
                matrix = hessian / m + sigma[i] * np.eye(len(w))
                local[i] = np.linalg.solve(matrix, b / m - pi[i] + sigma[i] * w)
                pi[i] = pi[i] + sigma[i] * (local[i] - w)
            if slow:
                waiting.append((i, sigma[i] * local[i] + pi[i], sigma[i]))
            else:
                known[0][i], known[1][i] = sigma[i] * local[i] + pi[i], sigma[i]
        mean = known[0].sum(axis=0) / known[1].sum()
        w = np.sign(mean) * np.maximum(np.abs(mean) - shrink / known[1].sum(), 0)
        averaged.append(w)
        for i, z, s in waiting:
            known[0][i], known[1][i] = z, s
    return np.asarray(averaged), local, pi, sigma
