"""Mean laws in bf16: half the memory, and an error within the bound that misvo.fisher.Fisher derives."""

import pytest
import torch
from conftest import letter_reward, make_policy
from tolerances import assert_within, rounding, unit

import misvo
from misvo.fisher import Fisher
from misvo.head import Head

V, D, K, T = 4000, 24, 6, 5


def estimate(dtype, roundings, seed=0):
    """A Fisher estimate whose last rows had ended, its mean law kept in `dtype` and added up in several parts.

    All else is fp64, so that nothing is seen but what became of the law.
    """
    generator = torch.Generator().manual_seed(seed)
    head = Head(torch.randn(V, D, generator=generator, dtype=torch.float64) + 3.0)  # far from centred
    probs = torch.softmax(3 * torch.randn(K, T, V, generator=generator, dtype=torch.float64), -1)
    probs[-2:, 3:] = 0
    mean = torch.zeros(T, V, dtype=dtype)
    for part in probs.chunk(roundings):
        mean += part.sum(0) / K
    return Fisher(head, mean, torch.stack([head.project(p) for p in probs])), probs


def quadratic_rounding(head, mean, u, v):
    """Of vᵀF̂u in fp64, twice: sums over V, d and K of terms without their signs, |w·u| |w·v| under the mean law."""
    W = head.weight.abs()
    size = (mean * (u.abs() @ W.T) * (v.abs() @ W.T)).sum(-1)
    return 2 * rounding(torch.float64, V + 2 * D + K, 4 * size)  # all variance, that between rollouts, and two centres


@pytest.mark.parametrize("roundings", [1, 3])
@pytest.mark.parametrize("seed", range(5))
def test_quadratic_forms_stay_within_the_derived_bound(roundings, seed):
    exact, probs = estimate(torch.float64, 1, seed)
    rounded, _ = estimate(torch.bfloat16, roundings, seed)
    assert rounded.mean_probs.nbytes == exact.mean_probs.nbytes // 4
    W, mean = exact.head.weight, probs.mean(0)
    share = mean.sum(-1, keepdim=True)
    centre = mean @ W / share
    for trial in range(20):
        u = torch.randn(T, D, generator=torch.Generator().manual_seed(trial), dtype=torch.float64)
        along = (u @ W.T) - (centre * u).sum(-1, keepdim=True)
        variance = (mean * along.square()).sum(-1)  # uᵀGu
        error = ((rounded.product(u) - exact.product(u)) * u).sum(-1).abs()
        bound = ((1 + 2**-8) ** roundings - 1) * variance
        assert_within(error, torch.zeros(T), bound + quadratic_rounding(exact.head, mean, u, u))
    assert error.max() > 0  # something was rounded


def test_the_matrix_stays_symmetric():
    fisher, probs = estimate(torch.bfloat16, 1)
    u, v = torch.randn(2, T, D, dtype=torch.float64)
    left, right = (fisher.product(u) * v).sum(-1), (fisher.product(v) * u).sum(-1)
    assert_within(left, right, quadratic_rounding(fisher.head, probs.mean(0), u, v))


def test_steering_with_bf16_laws_hardly_differs():
    options = {"rollouts": 6, "steps": 4, "max_new_tokens": 8, "learning_rate": 0.3, "penalty": 0.5}
    policy = make_policy("llama")
    plain, lean = (
        misvo.steer(policy, "a b c", letter_reward, **options, law_dtype=dtype, preset="paper")
        for dtype in ("float32", "bfloat16")
    )
    difference = (plain.steering.vectors - lean.steering.vectors).norm()
    # A step subtracts ηλ F̂u. Its error is at most ε ‖G‖ ‖u‖, and ‖G‖, a variance, at most the square of half the widest
    # distance of two rows of W. Six parts were added up, each within u of bf16, so √6 u is what ε probably is.
    widest = torch.cdist(policy.head.weight, policy.head.weight).max() ** 2 / 4
    lengths = sum(row["norm"] for row in plain.trace)
    assert 0 < difference < 0.3 * 0.5 * 6**0.5 * unit(torch.bfloat16) * widest * lengths


def test_an_unknown_precision_is_refused():
    with pytest.raises(misvo.MisvoError, match="law_dtype"):
        misvo.Settings(law_dtype="int4")
