"""Random streams, inverse CDF and nucleus against naive counterparts."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from literal import truncate
from scipy import stats

from misvo.sampling import RandomStream, Sampler, inverse_cdf, nucleus


def test_uniforms_depend_on_their_address_alone():
    stream = RandomStream(7, [1, 2, 3])
    whole = stream.uniforms(2, range(6), 20)
    assert torch.equal(whole[3:5, :9], stream.uniforms(2, range(3, 5), 9))
    others = [
        RandomStream(8, [1, 2, 3]).uniforms(2, range(6), 20),
        RandomStream(7, [1, 2, 4]).uniforms(2, range(6), 20),
        RandomStream(7, [12, 3]).uniforms(2, range(6), 20),
        stream.uniforms(3, range(6), 20),
        stream.uniforms(2, range(1, 7), 20),
    ]
    assert all((whole != other).all() for other in others)
    assert whole.min() >= 0 and whole.max() < 1


def test_uniforms_are_uniform_and_independent():
    numbers = RandomStream(0, [5]).uniforms(0, range(200), 100).numpy()
    assert stats.kstest(numbers.ravel(), "uniform").pvalue > 1e-3
    assert abs(np.corrcoef(numbers[:-1].ravel(), numbers[1:].ravel())[0, 1]) < 0.03


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 700), st.integers(0, 10**6), st.floats(0, 1, exclude_max=True))
def test_inverse_cdf_is_the_naive_one(size, seed, uniform):
    generator = torch.Generator().manual_seed(seed)
    weights = torch.rand(3, size, generator=generator)
    weights[torch.rand(3, size, generator=generator) < 0.4] = 0.0
    weights[:, int(seed) % size] = 0.5  # never all zero
    chosen = inverse_cdf(weights, torch.full((3,), uniform, dtype=torch.float64))
    for row, index in zip(weights.double(), chosen, strict=True):
        ends = row.cumsum(0)
        target = uniform * ends[-1]
        assert row[index] > 0
        assert ends[index] > target - 1e-5 and ends[index] - row[index] <= target + 1e-5  # up to rounding of sums


def test_inverse_cdf_never_draws_what_has_no_weight():
    weights = torch.zeros(1, 1000)
    weights[0, [17, 400]] = 1.0
    for uniform in (0.0, 0.5 - 1e-12, 0.5, 1 - 2**-53):
        index = inverse_cdf(weights, torch.tensor([uniform], dtype=torch.float64)).item()
        assert index == (17 if uniform < 0.5 else 400)


@pytest.mark.parametrize("top_p", [1.0, 0.8])
def test_tokens_follow_the_law(top_p):
    p = torch.softmax(2 * torch.randn(1, 30, generator=torch.Generator().manual_seed(3)), -1)
    uniforms = RandomStream(1, [1]).uniforms(0, range(1), 20000)[0]
    tokens, _ = Sampler(top_p=top_p).draw(p.expand(20000, -1), uniforms)
    law = (p[0] if top_p == 1 else truncate(p[0], top_p)).double().numpy()
    counts = np.bincount(tokens.numpy(), minlength=30)
    assert counts[law == 0].sum() == 0
    keep = law > 0
    assert stats.chisquare(counts[keep], 20000 * law[keep] / law[keep].sum()).pvalue > 1e-3


@settings(max_examples=100, deadline=None)
@given(st.integers(2, 3000), st.integers(0, 10**6), st.floats(0.01, 0.999), st.floats(0.01, 6.0))
def test_nucleus_is_the_sorted_one(size, seed, top_p, spread):
    p = torch.softmax(spread * torch.randn(2, size, generator=torch.Generator().manual_seed(seed)), -1)
    for row, mine in zip(p, nucleus(p, top_p), strict=True):
        expected = truncate(row.double(), top_p)
        # Where the mass meets top_p to the last digit, one token more or less is rounding.
        if int((expected > 0).sum()) == int((mine > 0).sum()):
            torch.testing.assert_close(mine.double(), expected, rtol=1e-4, atol=1e-7)
        else:
            assert abs(int((expected > 0).sum()) - int((mine > 0).sum())) == 1


@pytest.mark.parametrize("size", [8, 5000])
def test_ties_stand_or_fall_together(size):
    p = torch.full((1, size), 0.5 / (size - 1))
    p[0, 3] = 0.5
    assert (nucleus(p, 0.5) > 0).sum() == 1  # the likely token alone holds half
    assert (nucleus(p, 0.6) > 0).sum() == size  # one of the equals is needed, so all of them stay
