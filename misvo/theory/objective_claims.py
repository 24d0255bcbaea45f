"""Checks of the estimators (unbiased gradients and Fisher matrices) and of the objective (q★, equivalence).

Unbiasedness is shown by enumeration: the estimator is averaged over every ordered group of K sequences with
the group's exact probability, so there is no Monte Carlo error to hide in.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from .check import Check, Statement, error
from .derivatives import jacobian
from .inputs import Inputs, steering_probes
from .tabular import TabularPolicy, kl_divergence

MOST_GROUPS = 70_000
PENALTIES = (0.3, 1.0, 4.0)
NEARBY = (0.03, 0.3, 2.0)  # how far log q★ is perturbed


def groups(policy: TabularPolicy, law: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Every ordered group of K = 2 sequences, and of 3 where they are few: indices (M, K), weights (M,)."""
    for size in (2, 3):
        if policy.sequences**size <= MOST_GROUPS:
            shape = (policy.sequences,) * size
            members = np.stack(np.unravel_index(np.arange(policy.sequences**size), shape), axis=-1)
            yield members, law[members].prod(-1)


def loo_unbiased(inputs: Inputs) -> Check:
    statement = Statement("loo-unbiased", "E[g^R] = ∇E_π_u[R] with leave-one-out baseline", "Sec. 3.1, eq:update")
    formulas, errors = inputs.formulas, []
    for policy in inputs.policies:
        rewards = 3 + inputs.rng.normal(size=policy.sequences)  # a common offset must not matter
        u = inputs.rng.normal(size=policy.zero.shape) / np.linalg.norm(policy.head, 2)
        truth = jacobian(lambda v, policy=policy, rewards=rewards: policy.sequence_law(v) @ rewards, u)
        scores = formulas.scores(policy, u)
        for members, weights in groups(policy, policy.sequence_law(u)):
            estimates = formulas.reward_gradient(rewards[members], scores[members])  # (M, T, d)
            errors.append(error(np.tensordot(weights, estimates, 1), truth))
    return statement.identity("bias over all groups of rollouts", errors)


def fisher_unbiased(inputs: Inputs) -> Check:
    statement = Statement("fisher-unbiased", "E[F̂_t] = F̄_t", "Sec. 4.3, after eq:surrogate-ladder")
    formulas, errors = inputs.formulas, []
    for policy in inputs.policies:
        truth = formulas.frozen_fisher(policy)
        laws = policy.token_laws(policy.zero)
        for members, weights in groups(policy, policy.sequence_law(policy.zero)):
            for t in range(policy.horizon):
                fishers = formulas.token_fisher(policy.head, laws[t])[policy.prefix_of(members, t)]  # (M, K, d, d)
                errors.append(error(np.tensordot(weights, formulas.fisher_estimate(fishers), 1), truth[t]))
    return statement.identity("bias over all groups of rollouts", errors)


def regularised_value(log_law: np.ndarray, log_reference: np.ndarray, rewards: np.ndarray, penalty: float) -> float:
    """E_q[R] − λ KL(q ‖ π_ref), by definition."""
    return np.exp(log_law) @ rewards - penalty * kl_divergence(log_law, log_reference)


def problems(inputs: Inputs) -> Iterator[tuple[TabularPolicy, np.ndarray, np.ndarray, float]]:
    """(policy, log π_ref, rewards, λ) for every random policy and penalty."""
    for policy in inputs.policies:
        for penalty in PENALTIES:
            rewards = inputs.rng.normal(size=policy.sequences)
            yield policy, policy.sequence_log_law(policy.zero), rewards, penalty


def tilted_optimum(inputs: Inputs) -> Check:
    """q★ against perturbed copies of itself, near and far, and against the reference."""
    statement = Statement(
        "tilted-optimum", "q★ is the unique maximiser of E_q[R] − λKL", "Sec. 2, KL-regularized alignment"
    )
    gaps = []
    for _, log_reference, rewards, penalty in problems(inputs):
        problem = log_reference, rewards, penalty
        best = inputs.formulas.tilted_log_law(*problem)
        best_value = regularised_value(best, *problem)
        rivals = [log_reference]
        for distance in NEARBY:
            for _ in range(4):
                rival = best + distance * inputs.rng.normal(size=best.size)
                rivals.append(rival - np.log(np.exp(rival).sum()))
        gaps += [best_value - regularised_value(rival, *problem) for rival in rivals]
    return statement.exists("least lead of q★ over its rivals", np.min(gaps), 0.0)


def tilted_value(inputs: Inputs) -> Check:
    statement = Statement("tilted-value", "the optimal value is λ log Z", "Sec. 2, KL-regularized alignment")
    formulas = inputs.formulas
    errors = [
        error(
            formulas.optimum_value(log_reference, rewards, penalty),
            regularised_value(
                formulas.tilted_log_law(log_reference, rewards, penalty), log_reference, rewards, penalty
            ),
        )
        for _, log_reference, rewards, penalty in problems(inputs)
    ]
    return statement.identity("error against the value at q★", errors)


def tilted_equivalence(inputs: Inputs) -> Check:
    """J(u) + λ KL(π_u ‖ q★) is the same number for every u, so the two problems have the same solutions."""
    statement = Statement(
        "tilted-equivalence", "max E[R] − λKL(π_u‖π_ref) ⇔ min KL(π_u‖q★)", "Sec. 3, eq:steering-kl-objective"
    )
    errors = []
    for policy, log_reference, rewards, penalty in problems(inputs):
        target = inputs.formulas.tilted_log_law(log_reference, rewards, penalty)
        sums = []
        for u in steering_probes(policy, inputs.rng):
            log_law = policy.sequence_log_law(u)
            value = regularised_value(log_law, log_reference, rewards, penalty)
            sums.append(value + penalty * kl_divergence(log_law, target))
        errors.append(np.ptp(sums) / max(1.0, np.abs(sums).max()))
    return statement.identity("variation of J + λKL(·‖q★) in u", errors)
