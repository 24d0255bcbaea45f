"""Checks of the orders in ‖u‖: Proposition 2 and each step of the ladder `eq:surrogate-ladder`, which leads
from the frozen Fisher gradient to the gradient of the sequence KL.

An order is the slope of the error on log-log axes, the least over random policies; the gradient of the
sequence KL is taken by the complex step, not by Theorem 1. Explicit constants are in `surrogate_claims`.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .check import Check, Curve, Statement
from .derivatives import jacobian
from .inputs import Inputs, error_curve
from .tabular import TabularPolicy

LADDER = "Sec. 4.3, eq:surrogate-ladder"
DIFFERENCE = "slope of the difference"


def curves(inputs: Inputs, vectors: Callable[[TabularPolicy, np.ndarray], np.ndarray]) -> list[Curve]:
    """The norm of the stacked (T, d) vectors against ‖u‖, for each random policy."""
    return [
        error_curve(policy, inputs.rng, lambda u, policy=policy: np.linalg.norm(vectors(policy, u)))
        for policy in inputs.policies
    ]


def times(matrices: np.ndarray, u: np.ndarray) -> np.ndarray:
    """M_t u_t for every position: (T, d, d) and (T, d) to (T, d)."""
    return np.einsum("tde,te->td", matrices, u)


def suffix_order(inputs: Inputs) -> Check:
    statement = Statement("suffix-order", "g_t^suffix(u) = O(‖u‖²)", "Prop. 2, prop:suffix-second-order")
    return statement.order("slope of ‖g^suffix‖", 2, curves(inputs, inputs.formulas.suffix_term))


def ladder_drift(inputs: Inputs) -> Check:
    formulas = inputs.formulas
    statement = Statement("ladder-drift", "F̄_t u_t = F̄ᵘ_t u_t + O(‖u‖²)", LADDER)

    def difference(policy: TabularPolicy, u: np.ndarray) -> np.ndarray:
        return times(formulas.frozen_fisher(policy) - formulas.prefix_fisher(policy, u), u)

    return statement.order(DIFFERENCE, 2, curves(inputs, difference))


def ladder_fisher(inputs: Inputs) -> Check:
    formulas = inputs.formulas
    statement = Statement("ladder-fisher", "F̄ᵘ_t u_t = F̃ᵘ_t u_t + O(‖u‖²)", LADDER)

    def difference(policy: TabularPolicy, u: np.ndarray) -> np.ndarray:
        return times(formulas.prefix_fisher(policy, u) - formulas.iterate_fisher(policy, u), u)

    return statement.order(DIFFERENCE, 2, curves(inputs, difference))


def ladder_suffix(inputs: Inputs) -> Check:
    formulas = inputs.formulas
    statement = Statement("ladder-suffix", "F̃ᵘ_t u_t = ∇_u_t K + O(‖u‖²)", LADDER)

    def difference(policy: TabularPolicy, u: np.ndarray) -> np.ndarray:
        return times(formulas.iterate_fisher(policy, u), u) - jacobian(policy.sequence_kl, u)

    return statement.order(DIFFERENCE, 2, curves(inputs, difference))


def ladder_whole(inputs: Inputs) -> Check:
    formulas = inputs.formulas
    statement = Statement("ladder-whole", "F̄_t u_t = ∇_u_t K + O(‖u‖²)", "App. B.7, eq:full-grad-taylor")

    def difference(policy: TabularPolicy, u: np.ndarray) -> np.ndarray:
        return times(formulas.frozen_fisher(policy), u) - jacobian(policy.sequence_kl, u)

    return statement.order(DIFFERENCE, 2, curves(inputs, difference))
