"""Checks of the claims about whole sequences: the chain rule, Theorem 1, and the Hessian at zero.

The truth is always a sum over all V**T sequences: the KL by definition, its derivatives by the complex step.
"""

from __future__ import annotations

import numpy as np

from .check import DIFFERENCE_TOLERANCE, Check, Statement, error
from .derivatives import hessian, jacobian
from .inputs import Inputs, steering_probes


def chain_rule(inputs: Inputs) -> Check:
    statement = Statement("chain-rule", "KL(π_u‖π_ref) = Σ_t E_π_u[token KL]", "App. B.2, eq:kl-effort")
    errors = [
        error(inputs.formulas.chain_rule(policy, u), policy.sequence_kl(u))
        for policy in inputs.policies
        for u in steering_probes(policy, inputs.rng)
    ]
    return statement.identity("error against the sum over sequences", errors)


def sequence_score(inputs: Inputs) -> Check:
    statement = Statement("sequence-score", "∇_u_t log π_u(y) = Wᵀ(e_{y_t} − π_u^t)", "App. B.7, eq:seq-score")
    errors = [
        error(inputs.formulas.scores(policy, u), jacobian(policy.sequence_log_law, u))
        for policy in inputs.policies
        for u in steering_probes(policy, inputs.rng)
    ]
    return statement.identity("error against the complex step", errors)


def sequence_kl_gradient(inputs: Inputs) -> Check:
    statement = Statement("sequence-kl-gradient", "∇_u_t K = g_t^an + g_t^suffix", "Theorem 1, eq:seqkl-grad")
    errors = [
        error(inputs.formulas.sequence_kl_gradient(policy, u), jacobian(policy.sequence_kl, u))
        for policy in inputs.policies
        for u in steering_probes(policy, inputs.rng)
    ]
    return statement.identity("error against the complex step", errors)


def hessian_scores(inputs: Inputs) -> Check:
    statement = Statement("hessian-scores", "∇²K(0) = E_ref[S Sᵀ]", "App. B.7, eq:hess-is-fisher")
    errors = [
        error(inputs.formulas.score_covariance(policy), hessian(policy.sequence_kl, policy.zero))
        for policy in inputs.policies
    ]
    return statement.identity("error against second differences", errors, DIFFERENCE_TOLERANCE)


def hessian_blocks(inputs: Inputs) -> Check:
    """Off-diagonal blocks count: the formula says zero there, the differences say what they are."""
    statement = Statement("hessian-blocks", "∇²K(0) = blkdiag(F̄_1, …, F̄_T)", "App. B.7, eq:hess-blkdiag")
    errors = [
        error(inputs.formulas.block_hessian(policy), hessian(policy.sequence_kl, policy.zero))
        for policy in inputs.policies
    ]
    return statement.identity("error against second differences", errors, DIFFERENCE_TOLERANCE)


def stationary_origin(inputs: Inputs) -> Check:
    """∇K(0) = 0, by Theorem 1's formula and by the complex step alike."""
    statement = Statement("stationary-origin", "∇K(0) = 0", "App. B.7, Step 2")
    errors = []
    for policy in inputs.policies:
        numeric = jacobian(policy.sequence_kl, policy.zero)
        formula = inputs.formulas.sequence_kl_gradient(policy, policy.zero)
        errors += [np.abs(numeric).max(), np.abs(formula).max()]
    return statement.identity("largest entry of ∇K(0)", errors)
