"""Checks of the preliminary lemmas (`app:lemmas`): the log-partition, C_p, and three Lipschitz bounds.

They need no policy, only vectors: the vocabularies come from the policies, and to random vectors are added
the corners of the simplex and the fair coin, where the bounds are tightest.
"""

from __future__ import annotations

import numpy as np

from .check import DIFFERENCE_TOLERANCE, Check, Statement, error, ratio
from .derivatives import hessian, jacobian
from .inputs import CERTAIN, PROBE_SIZES, Inputs
from .tabular import log_partition, log_softmax

NEAR = 1e-3  # the distance of two laws that are close


def logit_vectors(inputs: Inputs) -> list[np.ndarray]:
    """Random logits at three temperatures for each policy's vocabulary."""
    return [scale * inputs.rng.normal(size=p.vocabulary) for p in inputs.policies for scale in (0.3, 1.0, 3.0)]


def probability_vectors(inputs: Inputs) -> list[np.ndarray]:
    """Softmaxes of random logits, a corner of the simplex, the uniform law and a fair coin."""
    vectors = [np.exp(log_softmax(z)) for z in logit_vectors(inputs)]
    for size in {len(p) for p in vectors}:
        coin = np.zeros(size)
        coin[:2] = 0.5
        vectors += [np.eye(size)[0], np.full(size, 1 / size), coin]
    return vectors


def logit_pairs(inputs: Inputs) -> list[tuple[np.ndarray, np.ndarray]]:
    """(z, δ): random ones, and a fair coin among impossible tokens pushed along (1, −1)."""
    pairs = [
        (z, size * inputs.rng.normal(size=len(z)) / np.sqrt(len(z)))
        for z in logit_vectors(inputs)
        for size in PROBE_SIZES
    ]
    for vocabulary in (2, 4, 8):
        z = np.full(vocabulary, -CERTAIN)
        z[:2] = 0
        push = np.zeros(vocabulary)
        push[:2] = NEAR, -NEAR
        pairs.append((z, push))
    return pairs


def log_partition_gradient(inputs: Inputs) -> Check:
    statement = Statement("log-partition-gradient", "∇A(z) = softmax(z)", "Lemma 1, lem:logpart")
    formula = inputs.formulas.log_partition_gradient
    errors = [error(formula(z), jacobian(log_partition, z)) for z in logit_vectors(inputs)]
    return statement.identity("error against the complex step", errors)


def log_partition_hessian(inputs: Inputs) -> Check:
    statement = Statement("log-partition-hessian", "∇²A(z) = C_softmax(z)", "Lemma 1, eq:softmax-jacobian")
    errors = [
        error(inputs.formulas.covariance(np.exp(log_softmax(z))), hessian(log_partition, z))
        for z in logit_vectors(inputs)
    ]
    return statement.identity("error against second differences", errors, DIFFERENCE_TOLERANCE)


def covariance_psd(inputs: Inputs) -> Check:
    statement = Statement("covariance-psd", "C_p ⪰ 0", "Lemma 2, lem:sigma")
    covariances = [inputs.formulas.covariance(p) for p in probability_vectors(inputs)]
    return statement.identity("−smallest eigenvalue", [-np.linalg.eigvalsh(c)[0] for c in covariances])


def covariance_null(inputs: Inputs) -> Check:
    statement = Statement("covariance-null", "C_p 1 = 0", "Lemma 2, lem:sigma")
    covariances = [inputs.formulas.covariance(p) for p in probability_vectors(inputs)]
    return statement.identity("‖C_p 1‖∞", [np.abs(c.sum(1)).max() for c in covariances])


def covariance_norm(inputs: Inputs) -> Check:
    """Attains 1/2 on the fair coin, so the lemma's 1 is loose by a factor of two."""
    statement = Statement("covariance-norm", "‖C_p‖ ≤ 1", "Lemma 2, lem:sigma")
    formulas = inputs.formulas
    norms = [np.linalg.norm(formulas.covariance(p), 2) for p in probability_vectors(inputs)]
    return statement.bound("‖C_p‖ / bound", [ratio(norm, formulas.covariance_norm_bound()) for norm in norms])


def covariance_trace(inputs: Inputs) -> Check:
    """Against the covariance of one-hot vectors, written out as an expectation."""
    statement = Statement("covariance-trace", "tr C_p = 1 − ‖p‖²", "Lemma 2, lem:sigma")
    errors = []
    for p in probability_vectors(inputs):
        centred = np.eye(len(p)) - p  # row i is e_i − E[e]
        errors.append(error(inputs.formulas.covariance_trace(p), p @ (centred**2).sum(1)))
    return statement.identity("error against E‖e − E e‖²", errors)


def softmax_move(z: np.ndarray, shift: np.ndarray) -> np.ndarray:
    return np.exp(log_softmax(z + shift)) - np.exp(log_softmax(z))


def softmax_lipschitz_l1(inputs: Inputs) -> Check:
    """The fair coin moves by ‖δ‖/√2 whatever V is, so √V is loose and grows looser with V."""
    statement = Statement("softmax-lipschitz-l1", "‖Δ softmax‖₁ ≤ √V ‖Δz‖", "Lemma 3, lem:softmax-lip")
    bound = inputs.formulas.softmax_l1_bound
    ratios = [ratio(np.abs(softmax_move(z, s)).sum(), bound(s)) for z, s in logit_pairs(inputs)]
    return statement.bound("ℓ1 distance / bound", ratios)


def softmax_lipschitz_l2(inputs: Inputs) -> Check:
    statement = Statement("softmax-lipschitz-l2", "‖Δ softmax‖₂ ≤ ‖Δz‖", "Lemma 3, lem:softmax-lip")
    bound = inputs.formulas.softmax_l2_bound
    ratios = [ratio(np.linalg.norm(softmax_move(z, s)), bound(s)) for z, s in logit_pairs(inputs)]
    return statement.bound("ℓ2 distance / bound", ratios)


def covariance_lipschitz(inputs: Inputs) -> Check:
    """Near a corner of the simplex the distance reaches √2 ‖p − q‖."""
    statement = Statement("covariance-lipschitz", "‖C_p − C_q‖ ≤ 3 ‖p − q‖", "Lemma 4, lem:cov-lip")
    formulas, vectors = inputs.formulas, probability_vectors(inputs)
    pairs = [(p, q) for p in vectors for q in vectors if len(p) == len(q) and not np.array_equal(p, q)]
    pairs.append((np.array([1.0, 0.0]), np.array([1 - NEAR, NEAR])))
    ratios = [
        ratio(
            np.linalg.norm(formulas.covariance(p) - formulas.covariance(q), 2),
            formulas.covariance_distance_bound(p, q),
        )
        for p, q in pairs
    ]
    return statement.bound("‖C_p − C_q‖ / bound", ratios)


def matrix_distance(inputs: Inputs) -> Check:
    """Random matrices, and M(y) = ±B aᵀb with the sign of μ − ν, which meets the bound with equality."""
    statement = Statement("matrix-distance", "‖E_μ M − E_ν M‖ ≤ B ‖μ − ν‖₁", "Lemma 5, lem:tv-matrix")
    rng, ratios = inputs.rng, []
    for policy in inputs.policies:
        mu, nu = rng.dirichlet(np.ones(policy.sequences), size=2)
        left, right = rng.normal(size=policy.width), rng.normal(size=policy.vocabulary)
        aligned = np.sign(mu - nu)[:, None, None] * np.outer(left, right)
        for matrices in (aligned, rng.normal(size=aligned.shape)):  # (N, d, V)
            distance = np.linalg.norm(np.tensordot(mu - nu, matrices, 1), 2)
            largest = np.linalg.norm(matrices, 2, axis=(1, 2)).max()
            ratios.append(ratio(distance, inputs.formulas.matrix_distance_bound(largest, mu, nu)))
    return statement.bound("distance of the means / bound", ratios)
