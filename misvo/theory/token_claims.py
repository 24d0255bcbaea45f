"""Checks of the claims about one token at a fixed prefix: Section 4.1 and the appendices on Proposition 1.

Each runs over every prefix of every policy. KLs are taken by definition, Σ p log(p/q), and derivatives by the
complex step.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from .check import Check, Statement, error, ratio
from .derivatives import jacobian
from .inputs import Inputs, error_curve, steering_probes
from .tabular import TabularPolicy, kl_divergence, log_softmax

QUADRATURE_NODES, QUADRATURE_WEIGHTS = np.polynomial.legendre.leggauss(64)  # on [−1, 1]


def positions(policies: list[TabularPolicy], inputs: Inputs) -> Iterator[tuple[TabularPolicy, int, np.ndarray]]:
    """(policy, t, u_t) for every policy, probe and position."""
    for policy in policies:
        for u in steering_probes(policy, inputs.rng):
            for t in range(policy.horizon):
                yield policy, t, u[t]


def reference_laws(policy: TabularPolicy, t: int) -> np.ndarray:
    """π_ref(· | prefix) for every prefix of length t: (V**t, V)."""
    return np.exp(log_softmax(policy.logits(t)))


def kl_at(policy: TabularPolicy, t: int, u: np.ndarray) -> np.ndarray:
    """Token KL by definition at every prefix, for u of shape (..., d): (..., V**t)."""
    shift = (u @ policy.head.T)[..., None, :]
    return kl_divergence(log_softmax(policy.logits(t) + shift), log_softmax(policy.logits(t)))


def token_kl_exact(inputs: Inputs) -> Check:
    statement = Statement(
        "token-kl-exact", "KL(π_u‖π_ref) = A(z) − A(z+δ) + ⟨π_u, δ⟩", "Sec. 4.1, eq:per-token-kl-exact"
    )
    errors = [
        error(inputs.formulas.token_kl(policy.logits(t), policy.head @ u), kl_at(policy, t, u))
        for policy, t, u in positions(inputs.policies, inputs)
    ]
    return statement.identity("error against Σ p log(p/q)", errors)


def token_kl_integral(inputs: Inputs) -> Check:
    statement = Statement("token-kl-integral", "KL(π_u‖π_ref) = ∫₀¹ τ δᵀC_τ δ dτ", "App. B.3, eq:kl-integral")
    taus, weights = (QUADRATURE_NODES + 1) / 2, QUADRATURE_WEIGHTS / 2
    errors = []
    for policy, t, u in positions(inputs.policies, inputs):
        shift, z = policy.head @ u, policy.logits(t)[0]
        laws = np.exp(log_softmax(z + taus[:, None] * shift))  # (nodes, V)
        values = [inputs.formulas.kl_integrand(p, shift, tau) for p, tau in zip(laws, taus, strict=True)]
        errors.append(error(weights @ np.array(values), kl_at(policy, t, u)[0]))
    return statement.identity("quadrature error", errors)


def fisher_information(inputs: Inputs) -> Check:
    """F_t(u_t) against E[∇log π ∇log πᵀ] with the complex-step gradient of log π."""
    statement = Statement("fisher-information", "F_t(u) = WᵀC_πW is the Fisher matrix", "Prop. 1, eq:fisher-u")
    errors = []
    for policy, t, u in positions(inputs.policies, inputs):
        z = policy.logits(t)

        def log_law(v: np.ndarray, policy=policy, z=z) -> np.ndarray:
            return log_softmax(z + (v @ policy.head.T)[..., None, :])

        law, scores = np.exp(log_law(u)), jacobian(log_law, u)  # (V**t, V), (V**t, V, d)
        truth = np.einsum("nv,nvd,nve->nde", law, scores, scores)
        errors.append(error(inputs.formulas.token_fisher(policy.head, law), truth))
    return statement.identity("error against E[score scoreᵀ]", errors)


def quadratic_gap(inputs: Inputs, policy: TabularPolicy, t: int, u: np.ndarray) -> np.ndarray:
    """|KL − ½ uᵀF_t(0)u| at every prefix of length t: (V**t,)."""
    quadratic = inputs.formulas.token_quadratic(policy.head, reference_laws(policy, t), u)
    return np.abs(kl_at(policy, t, u) - quadratic)


def token_kl_order(inputs: Inputs) -> Check:
    statement = Statement("token-kl-order", "KL = ½ uᵀF_t(0)u + O(‖u‖³)", "Prop. 1, eq:kl-quadratic")

    def curve(policy: TabularPolicy):
        def gap(u: np.ndarray) -> float:
            return max(quadratic_gap(inputs, policy, t, u[t]).max() for t in range(policy.horizon))

        return error_curve(policy, inputs.rng, gap)

    return statement.order("slope of the remainder", 3, map(curve, inputs.policies))


def token_kl_remainder(inputs: Inputs) -> Check:
    """Tightest on a skewed coin, where the remainder is a third of the third cumulant: 0.09 of the bound."""
    statement = Statement("token-kl-remainder", "|remainder| ≤ σ³‖u‖³", "App. B.3, app:kl-quad-proof")
    ratios = [
        ratio(quadratic_gap(inputs, policy, t, u), inputs.formulas.token_remainder_bound(policy.head, u))
        for policy, t, u in positions(inputs.all_policies, inputs)
    ]
    return statement.bound("remainder / bound", ratios)


def variance_identity(inputs: Inputs) -> Check:
    statement = Statement("variance-identity", "uᵀF_t(0)u = Var_π_ref[(Wu)_i]", "Remark 1, eq:fisher-variance")
    errors = []
    for policy, t, u in positions(inputs.policies, inputs):
        law, shift = reference_laws(policy, t), policy.head @ u
        mean = law @ shift
        variance = (law * (shift - mean[:, None]) ** 2).sum(-1)
        errors.append(error(2 * inputs.formulas.token_quadratic(policy.head, law, u), variance))
    return statement.identity("error against the variance", errors)


def constant_shift(inputs: Inputs) -> Check:
    """W gets a column of ones, so that one steering direction moves all logits alike."""
    statement = Statement("constant-shift", "a constant logit shift is free", "Remark 1, rem:kl-properties")
    formulas, errors = inputs.formulas, []
    for policy in inputs.policies:
        head = np.column_stack([policy.head, np.ones(policy.vocabulary)])
        u = np.append(np.zeros(policy.width), inputs.rng.normal())
        for t in range(policy.horizon):
            z, law = policy.logits(t), reference_laws(policy, t)
            moved = formulas.log_partition_gradient(z + head @ u) - law
            costs = formulas.token_quadratic(head, law, u), formulas.token_kl(z, head @ u)
            errors += [np.abs(part).max() for part in (moved, *costs)]
    return statement.identity("largest of Fisher cost, KL, |Δπ|", errors)


def kl_global_bound(inputs: Inputs) -> Check:
    """A fair coin reaches half of the bound: C_p ⪯ I/2, not only I."""
    statement = Statement("kl-global-bound", "KL(π_u‖π_ref) ≤ ½‖Wu‖²", "App. B.4, eq:kl-global-bound")
    ratios = [
        ratio(kl_at(policy, t, u), inputs.formulas.shift_bound(policy.head, u))
        for policy, t, u in positions(inputs.all_policies, inputs)
    ]
    return statement.bound("KL / bound", ratios)


def quadratic_global_bound(inputs: Inputs) -> Check:
    statement = Statement("quadratic-global-bound", "½uᵀF_t(0)u ≤ ½‖Wu‖²", "App. B.4, app:kl-bound")
    formulas = inputs.formulas
    ratios = [
        ratio(
            formulas.token_quadratic(policy.head, reference_laws(policy, t), u),
            formulas.shift_bound(policy.head, u),
        )
        for policy, t, u in positions(inputs.all_policies, inputs)
    ]
    return statement.bound("Fisher quadratic / bound", ratios)


def norm_global_bound(inputs: Inputs) -> Check:
    statement = Statement("norm-global-bound", "½‖Wu‖² ≤ ½σ²‖u‖²", "App. B.4, eq:kl-global-bound")
    ratios = [
        ratio(0.5 * ((policy.head @ u) ** 2).sum(), inputs.formulas.norm_bound(policy.head, u))
        for policy, _, u in positions(inputs.all_policies, inputs)
    ]
    return statement.bound("½‖Wu‖² / bound", ratios)


def kl_unordered(inputs: Inputs) -> Check:
    """Somewhere the KL exceeds the quadratic and somewhere the quadratic exceeds the KL."""
    statement = Statement("kl-unordered", "neither KL nor its quadratic bounds the other", "Sec. 4.1")
    above = below = 0.0
    for policy, t, u in positions(inputs.all_policies, inputs):
        quadratic = inputs.formulas.token_quadratic(policy.head, reference_laws(policy, t), u)
        kl = kl_at(policy, t, u)
        visible = np.minimum(kl, quadratic) > 1e-9  # below that, a quotient is rounding
        if visible.any():
            quotient = kl[visible] / quadratic[visible]
            above, below = max(above, quotient.max()), max(below, 1 / quotient.min())
    return statement.exists("least of max KL/quad, max quad/KL", min(above, below), 1.01)


def bregman_gradient(inputs: Inputs) -> Check:
    statement = Statement("bregman-gradient", "∇_u KL(π_u‖π_ref) = F_t(u)u", "App. B.5, eq:inner-grad-Fu")
    errors = []
    for policy, t, u in positions(inputs.policies, inputs):
        steered = np.exp(log_softmax(policy.logits(t) + policy.head @ u))
        truth = jacobian(lambda v, policy=policy, t=t: kl_at(policy, t, v), u)  # (V**t, d)
        errors.append(error(inputs.formulas.token_kl_gradient(policy.head, steered, u), truth))
    return statement.identity("error against the complex step", errors)
