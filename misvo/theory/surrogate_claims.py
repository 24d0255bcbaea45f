"""Checks of the bounds of Theorem 2: how far apart the Fisher cost matrices and the prefix laws can be.

Each runs over random policies and over coins, which bring the bounds as near to 1 as they get.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .check import Check, Statement, ratio
from .inputs import Inputs, steering_probes
from .tabular import TabularPolicy


def over_probes(inputs: Inputs, measure: Callable[[TabularPolicy, np.ndarray], float]) -> list[float]:
    return [measure(policy, u) for policy in inputs.all_policies for u in steering_probes(policy, inputs.rng)]


def fisher_scale(policy: TabularPolicy) -> float:
    """The size of a Fisher matrix, σ_max(W)²: what the rounding of a difference of two is relative to."""
    return np.linalg.norm(policy.head, 2) ** 2


def fisher_bound(inputs: Inputs) -> Check:
    """Tightest on a skewed coin: 0.09 of the bound."""
    formulas = inputs.formulas
    statement = Statement("fisher-bound", "‖F̃ᵘ_t − F̄ᵘ_t‖ ≤ 3σ³‖u_t‖", "Theorem 2, eq:surrogate-bounds")

    def measure(policy: TabularPolicy, u: np.ndarray) -> float:
        difference = formulas.iterate_fisher(policy, u) - formulas.prefix_fisher(policy, u)
        bounds = formulas.fisher_constant(policy.head) * np.linalg.norm(u, axis=-1)
        return ratio(np.linalg.norm(difference, 2, axis=(1, 2)), bounds, fisher_scale(policy))

    return statement.bound("distance / C₁‖u_t‖", over_probes(inputs, measure))


def drift_bound(inputs: Inputs) -> Check:
    """Tightest on a fork: σ³/(4√2) whatever V is, so 1/8 of the bound at V = 2 and less beyond."""
    formulas = inputs.formulas
    claim = "‖F̄ᵘ_t − F̄_t‖ ≤ √V σ³ Σ_{τ<t}‖u_τ‖"
    statement = Statement("drift-bound", claim, "Theorem 2, eq:surrogate-bounds")

    def measure(policy: TabularPolicy, u: np.ndarray) -> float:
        difference = formulas.prefix_fisher(policy, u) - formulas.frozen_fisher(policy)
        bounds = formulas.drift_constant(policy.head) * formulas.steering_before(u)
        return ratio(np.linalg.norm(difference, 2, axis=(1, 2)), bounds, fisher_scale(policy))

    return statement.bound("distance / C₂Σ‖u_τ‖", over_probes(inputs, measure))


def prefix_distances(policy: TabularPolicy, u: np.ndarray) -> np.ndarray:
    """‖π_u(y_<t) − π_ref(y_<t)‖₁ for every t: (T,)."""
    pairs = zip(policy.prefix_laws(u), policy.prefix_laws(policy.zero), strict=True)
    return np.array([np.abs(steered - reference).sum() for steered, reference in pairs])


def trajectory_bound(inputs: Inputs) -> Check:
    """Tightest on a fair coin: σ/√2 whatever V is, so half of the bound at V = 2 and less beyond."""
    formulas = inputs.formulas
    claim = "‖π_u(y_<t) − π_ref(y_<t)‖₁ ≤ √V σ Σ_{τ<t}‖u_τ‖"
    statement = Statement("trajectory-bound", claim, "Lemma 6, lem:seq-tv")

    def measure(policy: TabularPolicy, u: np.ndarray) -> float:
        bounds = formulas.trajectory_constant(policy.head) * formulas.steering_before(u)
        return ratio(prefix_distances(policy, u), bounds)

    return statement.bound("ℓ1 distance / bound", over_probes(inputs, measure))


def sequential_distance(inputs: Inputs) -> Check:
    """Met with equality when one position alone is steered."""
    formulas = inputs.formulas
    claim = "‖μ − ν‖₁ ≤ Σ_τ E_μ‖μ(·|y_<τ) − ν(·|y_<τ)‖₁"
    statement = Statement("sequential-distance", claim, "App. B.6, eq:autoregr-tv")

    def measure(policy: TabularPolicy, u: np.ndarray) -> float:
        return ratio(prefix_distances(policy, u), formulas.sequential_distance_bound(policy, u))

    return statement.bound("ℓ1 distance / bound", over_probes(inputs, measure))


def gradient_norms(matrices: np.ndarray, u: np.ndarray) -> np.ndarray:
    """‖M_t u_t‖ for every position: (T, d, d) and (T, d) to (T,)."""
    return np.linalg.norm(np.einsum("tde,te->td", matrices, u), axis=-1)


def fisher_gradient_bound(inputs: Inputs) -> Check:
    formulas = inputs.formulas
    claim = "‖(F̃ᵘ_t − F̄ᵘ_t)u_t‖ ≤ C₁‖u_t‖²"
    statement = Statement("fisher-gradient-bound", claim, "App. B.6, eq:taylorApproximationEquivalence")

    def measure(policy: TabularPolicy, u: np.ndarray) -> float:
        difference = formulas.iterate_fisher(policy, u) - formulas.prefix_fisher(policy, u)
        bounds = formulas.fisher_gradient_bound(policy.head, u)
        return ratio(gradient_norms(difference, u), bounds, fisher_scale(policy) * np.abs(u).max())

    return statement.bound("gradient distance / bound", over_probes(inputs, measure))


def drift_gradient_bound(inputs: Inputs) -> Check:
    formulas = inputs.formulas
    claim = "‖(F̄ᵘ_t − F̄_t)u_t‖ ≤ C₂‖u_t‖ Σ_{τ<t}‖u_τ‖"
    statement = Statement("drift-gradient-bound", claim, "App. B.6, eq:contextApproximationEquivalence")

    def measure(policy: TabularPolicy, u: np.ndarray) -> float:
        difference = formulas.prefix_fisher(policy, u) - formulas.frozen_fisher(policy)
        bounds = formulas.drift_gradient_bound(policy.head, u)
        return ratio(gradient_norms(difference, u), bounds, fisher_scale(policy) * np.abs(u).max())

    return statement.bound("gradient distance / bound", over_probes(inputs, measure))
