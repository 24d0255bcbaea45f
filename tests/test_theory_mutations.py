"""Every check of `misvo.theory` can fail: a mistake in the formula that it tests (a term dropped, a wrong
constant, a wrong power) turns its verdict. Every check has at least one such mistake, so has every formula.

Where a bound is loose, a smaller constant may still be true (√V in Lemma 3 and Theorem 2 can go altogether),
so the mistakes there are ones that make the claim false: too small for the worst case, or a wrong power.
"""

import inspect

import numpy as np
import pytest

from misvo import theory
from misvo.theory.formulas import PAPER, Formulas
from misvo.theory.tabular import log_partition


def diagonal(p):
    """E[e eᵀ] = diag(p): the covariance without its rank-one term."""
    return p[..., None] * np.eye(p.shape[-1])


def second_moment_fisher(self, head, p):
    return head.T @ diagonal(p) @ head


def uniform_prefixes(self, policy, *steerings):
    """Averages F_t over prefixes with equal weights, not over the law that they have."""
    laws = policy.token_laws(steerings[-1] if steerings else policy.zero)
    return np.stack([PAPER.token_fisher(policy.head, law).mean(0) for law in laws])


def uncentred_scores(self, policy, u):
    """W[y_t] without the expected row Wᵀp."""
    return policy.head[policy.tokens()]


def reference_prefixes(self, policy, u):
    """The chain rule with prefixes of the reference policy, which is KL_ref and not the sequence KL."""
    pairs = zip(policy.prefix_laws(policy.zero), policy.token_kls(u), strict=True)
    return sum(law @ kl for law, kl in pairs)


def inclusive_log_ratio(self, policy, u):
    """ℓ_{≥t} in place of ℓ_{>t}."""
    ratio = policy.log_factors(u) - policy.log_factors(policy.zero)
    return ratio[:, ::-1].cumsum(1)[:, ::-1]


def suffix_log_probability(self, policy, u):
    """Σ_{τ>t} log π_u, the reference forgotten."""
    factors = policy.log_factors(u)
    return factors[:, ::-1].cumsum(1)[:, ::-1] - factors


def smallest_singular_value(self, head):
    return np.linalg.svd(head, compute_uv=False)[-1]


def previous_only(self, u):
    """‖u_{t−1}‖ in place of the sum over all earlier positions."""
    sizes = np.linalg.norm(u, axis=-1)
    return np.append(0, sizes[:-1])


def kl_token_with_reference_mean(self, z, shift):
    return log_partition(z) - log_partition(z + shift) + self.log_partition_gradient(z) @ shift


def blocks_all_alike(self, policy):
    """The first block in every place."""
    return np.kron(np.eye(policy.horizon), self.frozen_fisher(policy)[0])


def analytic_at_zero(self, policy, u):
    return np.einsum("tde,te->td", self.prefix_fisher(policy, u), u)


def without_first_step(self, policy, u):
    bound = PAPER.sequential_distance_bound(policy, u)
    return bound - bound[1] * (np.arange(policy.horizon) > 0)


def tilted_by_the_inverse(self, log_reference, rewards, penalty):
    """exp(λR) in place of exp(R/λ)."""
    tilted = log_reference + rewards * penalty
    return tilted - log_partition(tilted)


def sigma(head):
    return np.linalg.norm(head, 2)


# (check that must fail, formula, the formula with a mistake, what the mistake is)
MUTATIONS = [
    (
        "log-partition-gradient",
        "log_partition_gradient",
        lambda self, z: np.exp(z) / (1 + np.exp(z).sum(-1, keepdims=True)),
        "one too many in the partition sum",
    ),
    ("log-partition-hessian", "covariance", lambda self, p: diagonal(p), "rank-one term dropped"),
    (
        "covariance-psd",
        "covariance",
        lambda self, p: diagonal(p) - 2 * p[..., :, None] * p[..., None, :],
        "rank-one term doubled",
    ),
    ("covariance-null", "covariance", lambda self, p: diagonal(p), "rank-one term dropped"),
    ("covariance-norm", "covariance_norm_bound", lambda self: 0.25, "1/4, the variance of a fair coin"),
    ("covariance-trace", "covariance_trace", lambda self, p: 1 - np.linalg.norm(p), "norm not squared"),
    (
        "softmax-lipschitz-l1",
        "softmax_l1_bound",
        lambda self, s: np.linalg.norm(s) / np.sqrt(len(s)),
        "norm inequality the wrong way round",
    ),
    ("softmax-lipschitz-l1", "softmax_l1_bound", lambda self, s: np.sqrt(len(s)) * s @ s, "norm squared"),
    ("softmax-lipschitz-l2", "softmax_l2_bound", lambda self, s: np.linalg.norm(s) / 4, "1/4"),
    (
        "covariance-lipschitz",
        "covariance_distance_bound",
        lambda self, p, q: np.linalg.norm(p - q),
        "rank-two piece dropped",
    ),
    (
        "matrix-distance",
        "matrix_distance_bound",
        lambda self, norm, mu, nu: norm * np.abs(mu - nu).sum() / 2,
        "total variation in place of ℓ1",
    ),
    ("chain-rule", "chain_rule", reference_prefixes, "reference prefixes"),
    ("token-kl-exact", "token_kl", kl_token_with_reference_mean, "mean shift under the reference"),
    (
        "token-kl-integral",
        "kl_integrand",
        lambda self, p, s, tau: s @ self.covariance(p) @ s,
        "weight τ dropped",
    ),
    ("fisher-information", "token_fisher", second_moment_fisher, "rank-one term dropped"),
    ("fisher-information", "covariance", lambda self, p: diagonal(p), "rank-one term dropped"),
    (
        "token-kl-order",
        "token_quadratic",
        lambda self, head, p, u: 2 * PAPER.token_quadratic(head, p, u),
        "factor 1/2 dropped",
    ),
    ("token-kl-order", "covariance", lambda self, p: diagonal(p), "rank-one term dropped"),
    (
        "token-kl-remainder",
        "token_remainder_bound",
        lambda self, head, u: sigma(head) ** 2 * np.linalg.norm(u) ** 3,
        "one power of σ lost",
    ),
    (
        "token-kl-remainder",
        "token_remainder_bound",
        lambda self, head, u: (sigma(head) * np.linalg.norm(u)) ** 3 / 12,
        "1/12, below the worst case of 0.0907",
    ),
    ("variance-identity", "covariance", lambda self, p: diagonal(p), "second moment, not variance"),
    ("constant-shift", "covariance", lambda self, p: diagonal(p), "rank-one term dropped"),
    (
        "constant-shift",
        "token_kl",
        lambda self, z, s: log_partition(z) - log_partition(z + s),
        "inner product dropped",
    ),
    (
        "kl-global-bound",
        "shift_bound",
        lambda self, head, u: np.linalg.norm(head @ u) ** 2 / 5,
        "1/5, below the worst case of 1/4",
    ),
    (
        "quadratic-global-bound",
        "shift_bound",
        lambda self, head, u: np.linalg.norm(head @ u) ** 2 / 5,
        "1/5, below the worst case of 1/4",
    ),
    ("norm-global-bound", "spectral_norm", smallest_singular_value, "smallest singular value"),
    (
        "norm-global-bound",
        "norm_bound",
        lambda self, head, u: 0.5 * sigma(head) * np.linalg.norm(u) ** 2,
        "σ not squared",
    ),
    (
        "kl-unordered",
        "token_quadratic",
        lambda self, head, p, u: 0.5 * np.linalg.norm(head @ u) ** 2 * np.ones(len(p)),
        "global bound in place of the Fisher quadratic",
    ),
    (
        "bregman-gradient",
        "token_kl_gradient",
        lambda self, head, p, u: PAPER.token_fisher(head, p) @ u / 2,
        "half of it",
    ),
    ("bregman-gradient", "token_fisher", second_moment_fisher, "rank-one term dropped"),
    ("sequence-score", "scores", uncentred_scores, "expected row dropped"),
    (
        "sequence-kl-gradient",
        "sequence_kl_gradient",
        lambda self, policy, u: self.analytic_term(policy, u),
        "suffix term dropped",
    ),
    ("sequence-kl-gradient", "analytic_term", analytic_at_zero, "F_t(0) in place of F_t(u)"),
    ("sequence-kl-gradient", "suffix_log_ratio", inclusive_log_ratio, "current token counted in the suffix"),
    ("sequence-kl-gradient", "scores", uncentred_scores, "expected row dropped"),
    (
        "fisher-bound",
        "fisher_constant",
        lambda self, head: 3 * sigma(head) ** 2,
        "one power of σ lost",
    ),
    (
        "fisher-bound",
        "fisher_constant",
        lambda self, head: sigma(head) ** 3 / 4,
        "1/4, below the worst case of 0.272",
    ),
    (
        "drift-bound",
        "drift_constant",
        lambda self, head: np.sqrt(len(head)) * sigma(head) ** 2,
        "one power of σ lost",
    ),
    ("drift-bound", "steering_before", previous_only, "only the position before"),
    ("drift-bound", "prefix_fisher", uniform_prefixes, "prefixes weighted alike"),
    (
        "sequential-distance",
        "sequential_distance_bound",
        lambda self, policy, u: PAPER.sequential_distance_bound(policy, u) / 2,
        "total variation in place of ℓ1",
    ),
    ("sequential-distance", "sequential_distance_bound", without_first_step, "first step dropped"),
    ("trajectory-bound", "trajectory_constant", lambda self, head: np.sqrt(len(head)), "σ dropped"),
    ("trajectory-bound", "steering_before", previous_only, "only the position before"),
    (
        "fisher-gradient-bound",
        "fisher_gradient_bound",
        lambda self, head, u: self.fisher_constant(head) * (u**2).sum(-1) ** 1.5,
        "cubic in place of quadratic",
    ),
    (
        "fisher-gradient-bound",
        "fisher_constant",
        lambda self, head: 3 * sigma(head) ** 2,
        "one power of σ lost",
    ),
    (
        "drift-gradient-bound",
        "drift_gradient_bound",
        lambda self, head, u: self.drift_constant(head) * np.linalg.norm(u, axis=-1) ** 2,
        "own steering in place of that before",
    ),
    ("stationary-origin", "suffix_log_ratio", suffix_log_probability, "reference dropped from the ratio"),
    ("hessian-scores", "scores", uncentred_scores, "expected row dropped"),
    (
        "hessian-scores",
        "score_covariance",
        lambda self, policy: PAPER.score_covariance(policy) / 2,
        "half of it",
    ),
    ("hessian-blocks", "averaged_fisher", uniform_prefixes, "prefixes weighted alike"),
    ("hessian-blocks", "block_hessian", blocks_all_alike, "one block for all positions"),
    ("suffix-order", "suffix_log_ratio", inclusive_log_ratio, "current token counted in the suffix"),
    (
        "suffix-order",
        "suffix_term",
        lambda self, policy, u: PAPER.suffix_term(policy, u) + 0.01 * PAPER.analytic_term(policy, u),
        "one per cent of the analytic term added",
    ),
    ("ladder-drift", "frozen_fisher", uniform_prefixes, "prefixes weighted alike"),
    (
        "ladder-fisher",
        "iterate_fisher",
        lambda self, policy, u: 1.01 * PAPER.iterate_fisher(policy, u),
        "one per cent too large",
    ),
    (
        "ladder-suffix",
        "iterate_fisher",
        lambda self, policy, u: 1.01 * PAPER.iterate_fisher(policy, u),
        "one per cent too large",
    ),
    (
        "ladder-whole",
        "frozen_fisher",
        lambda self, policy: np.broadcast_to(np.eye(policy.width), (policy.horizon, policy.width, policy.width)),
        "identity, the isotropic cost",
    ),
    ("ladder-whole", "covariance", lambda self, p: diagonal(p), "rank-one term dropped"),
    (
        "loo-unbiased",
        "advantages",
        lambda self, rewards: rewards - rewards.mean(-1, keepdims=True),
        "own reward in the baseline",
    ),
    (
        "loo-unbiased",
        "reward_gradient",
        lambda self, rewards, scores: np.einsum("...k,...ktd->...td", self.advantages(rewards), scores),
        "1/K dropped",
    ),
    ("loo-unbiased", "scores", uncentred_scores, "expected row dropped"),
    (
        "fisher-unbiased",
        "fisher_estimate",
        lambda self, fishers: fishers.sum(-3) / (fishers.shape[-3] - 1),
        "divided by K − 1",
    ),
    ("tilted-optimum", "tilted_log_law", tilted_by_the_inverse, "exp(λR)"),
    (
        "tilted-value",
        "optimum_value",
        lambda self, log_reference, rewards, penalty: log_partition(log_reference + rewards / penalty),
        "λ dropped",
    ),
    ("tilted-equivalence", "tilted_log_law", tilted_by_the_inverse, "exp(λR)"),
]


@pytest.mark.parametrize(
    ("check", "formula", "mistake"),
    [pytest.param(*row[:3], id=f"{row[0]}: {row[1]}, {row[3]}") for row in MUTATIONS],
)
def test_a_mistake_in_the_formula_fails_its_check(check, formula, mistake):
    mutant = type("Mutant", (Formulas,), {formula: mistake})()
    (right,) = theory.run(policies=5, seed=1, only=[check])
    (wrong,) = theory.run(policies=5, seed=1, only=[check], formulas=mutant)
    assert right.passed
    assert not wrong.passed, f"measured {wrong.measured:.3g}, limit {wrong.relation} {wrong.limit:.3g}"
    assert not np.isnan(wrong.measured)  # it fails for the figure it measures, not because it broke


def test_every_check_and_every_formula_has_a_mutation():
    formulas = {name for name, _ in inspect.getmembers(Formulas, inspect.isfunction)}
    assert {row[0] for row in MUTATIONS} == set(theory.CHECKS)
    assert {row[1] for row in MUTATIONS} == formulas
