"""The claims of the paper, each put to a numerical test that can fail, on policies small enough to enumerate.

    from misvo import theory
    checks = theory.run(policies=20, seed=0)
    all(check.passed for check in checks)
    rich.print(theory.table(checks)); theory.to_json(checks); theory.plot_orders(checks, "orders.png")

`tabular` is the policy, `formulas` the paper's right-hand sides, `derivatives` the independent calculation;
`lemmas` and the `*_claims` files hold one function per claim, listed by `CHECKS` in the order of the proofs.
Left out: what is about language models in particular (EOS, samplers, precision), and the paper's empirical
claims. Needs numpy alone.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable

import numpy as np

from misvo.errors import MisvoError

from . import ladder_claims, lemmas, objective_claims, sequence_claims, surrogate_claims, token_claims
from .check import Check, Curve
from .formulas import PAPER, Formulas
from .inputs import Inputs, extreme_policies, random_policies
from .report import plot_orders, table, to_json
from .tabular import TabularPolicy

__all__ = ["CHECKS", "Check", "Curve", "Formulas", "TabularPolicy", "plot_orders", "run", "table", "to_json"]

CHECKS: dict[str, Callable[[Inputs], Check]] = {
    "log-partition-gradient": lemmas.log_partition_gradient,
    "log-partition-hessian": lemmas.log_partition_hessian,
    "covariance-psd": lemmas.covariance_psd,
    "covariance-null": lemmas.covariance_null,
    "covariance-norm": lemmas.covariance_norm,
    "covariance-trace": lemmas.covariance_trace,
    "softmax-lipschitz-l1": lemmas.softmax_lipschitz_l1,
    "softmax-lipschitz-l2": lemmas.softmax_lipschitz_l2,
    "covariance-lipschitz": lemmas.covariance_lipschitz,
    "matrix-distance": lemmas.matrix_distance,
    "chain-rule": sequence_claims.chain_rule,
    "token-kl-exact": token_claims.token_kl_exact,
    "token-kl-integral": token_claims.token_kl_integral,
    "fisher-information": token_claims.fisher_information,
    "token-kl-order": token_claims.token_kl_order,
    "token-kl-remainder": token_claims.token_kl_remainder,
    "variance-identity": token_claims.variance_identity,
    "constant-shift": token_claims.constant_shift,
    "kl-global-bound": token_claims.kl_global_bound,
    "quadratic-global-bound": token_claims.quadratic_global_bound,
    "norm-global-bound": token_claims.norm_global_bound,
    "kl-unordered": token_claims.kl_unordered,
    "bregman-gradient": token_claims.bregman_gradient,
    "sequence-score": sequence_claims.sequence_score,
    "sequence-kl-gradient": sequence_claims.sequence_kl_gradient,
    "fisher-bound": surrogate_claims.fisher_bound,
    "drift-bound": surrogate_claims.drift_bound,
    "sequential-distance": surrogate_claims.sequential_distance,
    "trajectory-bound": surrogate_claims.trajectory_bound,
    "fisher-gradient-bound": surrogate_claims.fisher_gradient_bound,
    "drift-gradient-bound": surrogate_claims.drift_gradient_bound,
    "stationary-origin": sequence_claims.stationary_origin,
    "hessian-scores": sequence_claims.hessian_scores,
    "hessian-blocks": sequence_claims.hessian_blocks,
    "suffix-order": ladder_claims.suffix_order,
    "ladder-drift": ladder_claims.ladder_drift,
    "ladder-fisher": ladder_claims.ladder_fisher,
    "ladder-suffix": ladder_claims.ladder_suffix,
    "ladder-whole": ladder_claims.ladder_whole,
    "loo-unbiased": objective_claims.loo_unbiased,
    "fisher-unbiased": objective_claims.fisher_unbiased,
    "tilted-optimum": objective_claims.tilted_optimum,
    "tilted-value": objective_claims.tilted_value,
    "tilted-equivalence": objective_claims.tilted_equivalence,
}


def run(
    policies: int = 20,
    seed: int = 0,
    *,
    only: Iterable[str] | None = None,
    formulas: Formulas = PAPER,
    progress: Callable[[Check], None] | None = None,
) -> list[Check]:
    """Run every check (or those named in `only`) over `policies` random policies and the worst cases.

    Each check has its own random stream, so its result does not depend on which others run. `progress` is
    called with each finished check.
    """
    names = list(CHECKS) if only is None else list(only)
    unknown = [name for name in names if name not in CHECKS]
    if unknown:
        raise MisvoError(f"There is no check named {unknown[0]!r}; the checks are {', '.join(CHECKS)}.")
    if policies < 1:
        raise MisvoError(f"The checks need at least one policy, not {policies}.")
    if seed < 0:
        raise MisvoError(f"The seed must not be negative, but it is {seed}.")
    sample = random_policies(policies, np.random.default_rng(seed))
    extremes = extreme_policies()
    checks = []
    for name in names:
        rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
        checks.append(CHECKS[name](Inputs(sample, extremes, formulas, rng)))
        if progress is not None:
            progress(checks[-1])
    return checks
