"""Mean laws in bf16: half the memory, and an error within the bound that misvo.head.Fisher derives."""

import pytest
import torch
from conftest import letter_reward, make_policy

import misvo
from misvo.head import Fisher, Head

V, D, K, T = 4000, 24, 6, 5


def estimate(dtype, roundings, seed=0):
    """A Fisher estimate whose last rows had ended, its mean law kept in `dtype` and added up in several parts."""
    generator = torch.Generator().manual_seed(seed)
    head = Head(torch.randn(V, D, generator=generator) + 3.0)  # far from centred
    probs = torch.softmax(3 * torch.randn(K, T, V, generator=generator), -1)
    probs[-2:, 3:] = 0
    mean = torch.zeros(T, V, dtype=dtype)
    for part in probs.chunk(roundings):
        mean += part.sum(0) / K
    return Fisher(head, mean, torch.stack([head.project(p) for p in probs])), probs


@pytest.mark.parametrize("roundings", [1, 3])
@pytest.mark.parametrize("seed", range(5))
def test_quadratic_forms_stay_within_the_derived_bound(roundings, seed):
    exact, probs = estimate(torch.float32, 1, seed)
    rounded, _ = estimate(torch.bfloat16, roundings, seed)
    assert rounded.mean_probs.nbytes == exact.mean_probs.nbytes // 2
    W, mean = exact.head.weight.double(), probs.double().mean(0)
    share = mean.sum(-1, keepdim=True)
    centre = mean @ W / share
    for trial in range(20):
        u = torch.randn(T, D, generator=torch.Generator().manual_seed(trial))
        along = (u.double() @ W.T) - (centre * u).sum(-1, keepdim=True)
        variance = (mean * along.square()).sum(-1)  # uᵀGu
        error = ((rounded.product(u) - exact.product(u)) * u).sum(-1).abs()
        bound = ((1 + 2**-8) ** roundings - 1) * variance
        assert (error <= bound + 1e-5 * variance).all()
    assert error.max() > 0  # something was rounded


def test_the_matrix_stays_symmetric():
    fisher, _ = estimate(torch.bfloat16, 1)
    u, v = torch.randn(T, D), torch.randn(T, D)
    left, right = (fisher.product(u) * v).sum(-1), (fisher.product(v) * u).sum(-1)
    torch.testing.assert_close(left, right, rtol=1e-3, atol=1e-3 * left.abs().max().item())


def test_steering_with_bf16_laws_hardly_differs():
    options = {"rollouts": 6, "steps": 4, "max_new_tokens": 8, "learning_rate": 0.3, "penalty": 0.5}
    plain, lean = (
        misvo.steer(make_policy("llama"), "a b c", letter_reward, **options, law_dtype=dtype)
        for dtype in ("float32", "bfloat16")
    )
    difference = (plain.steering.vectors - lean.steering.vectors).norm() / plain.steering.norm
    assert 0 < difference < 0.01


def test_an_unknown_precision_is_refused():
    with pytest.raises(misvo.MisvoError, match="law_dtype"):
        misvo.Settings(law_dtype="int4")
