"""Random streams, races and nuclei against naive counterparts, and what a little rounding does to a token."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from literal import truncate
from memory import allocated_bytes
from scipy import stats

from misvo.race import FLOOR, HEAT, OTHERS, Entries, exponentials, race, race_with_all_times
from misvo.sampling import RandomStream, Sampler
from misvo.truncation import Truncation

EPS = 2.0**-24  # of fp32


def law(size, spread, seed=3):
    """A made-up law (size,): flat where `spread` is small, peaked where it is large."""
    return torch.softmax(spread * torch.randn(size, generator=torch.Generator().manual_seed(seed)), -1)


def draws(p, count, sampler, at_once=500):
    """Tokens of so many races of one law."""
    keys = RandomStream(1, [1]).keys(0, range(1), count)[0]
    return torch.cat([sampler.draw(p.expand(len(part), -1).contiguous(), part)[0] for part in keys.split(at_once)])


def fits(tokens, expected):
    """χ² of counts against a law, tokens that are expected less than 10 times taken together (p-value)."""
    counts = np.bincount(tokens.numpy(), minlength=len(expected))
    assert counts[expected == 0].sum() == 0
    order = np.argsort(-expected)
    groups = np.minimum(np.cumsum(expected[order]) * len(tokens) // 10, len(tokens) // 10 - 1).astype(int)
    observed, wanted = (np.bincount(groups, weights=x[order]) for x in (counts, expected * len(tokens)))
    keep = wanted > 0
    return stats.chisquare(observed[keep], wanted[keep] * len(tokens) / wanted[keep].sum()).pvalue


def test_keys_depend_on_their_address_alone():
    stream = RandomStream(7, [1, 2, 3])
    whole = stream.keys(2, range(6), 20)
    assert torch.equal(whole[3:5, :9], stream.keys(2, range(3, 5), 9))
    others = [
        RandomStream(8, [1, 2, 3]).keys(2, range(6), 20),
        RandomStream(7, [1, 2, 4]).keys(2, range(6), 20),
        RandomStream(7, [12, 3]).keys(2, range(6), 20),
        stream.keys(3, range(6), 20),
        stream.keys(2, range(1, 7), 20),
    ]
    assert all((whole != other).all() for other in others)


def splitmix64(seed, count):
    """The generator as published, in whole numbers of Python."""
    state, out, mask = seed, [], 2**64 - 1
    for _ in range(count):
        state = (state + 0x9E3779B97F4A7C15) & mask
        z = state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        out.append(z ^ (z >> 31))
    return out


def test_times_are_those_of_the_published_generator():
    known = [6457827717110365317, 3203168211198807973, 9817491932198370423]  # published for the seed 1234567
    assert splitmix64(1234567, 3) == known
    for seed in (1234567, 2**63 + 5, 2**64 - 1):
        key = torch.tensor(seed - 2**64 if seed >= 2**63 else seed)
        expected = [-math.log(((z >> 11) + 0.5) * 2.0**-53) for z in splitmix64(seed, 40)]
        assert exponentials(key, torch.arange(40)).tolist() == pytest.approx(expected, rel=4 * 2.0**-53)


def test_times_are_exponential_and_independent():
    keys = RandomStream(0, [5]).keys(0, range(20), 100).reshape(-1)
    times = exponentials(keys[:, None], torch.arange(OTHERS, 50)).numpy()  # (races, tokens)
    assert stats.kstest(times.ravel(), "expon").pvalue > 1e-3
    for shifted in (times[1:, :], times[:, 1:]):  # from race to race, from token to token
        here = times[: len(shifted), : shifted.shape[1]]
        assert abs(np.corrcoef(here.ravel(), shifted.ravel())[0, 1]) < 4 / math.sqrt(shifted.size)  # 4 standard errors


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.0])
@pytest.mark.parametrize("spread", [0.1, 2.0, 6.0])
@pytest.mark.parametrize("top_p", [1.0, 0.8])
def test_tokens_follow_the_law(temperature, spread, top_p):
    p = torch.softmax(law(300, spread).log() / temperature, -1)
    tokens = draws(p, 20_000, Sampler(temperature, top_p))
    expected = (p if top_p == 1 else truncate(p, top_p)).double().numpy()
    assert fits(tokens, expected) > 1e-3


@pytest.mark.parametrize("top_p", [1.0, 0.9])
@pytest.mark.parametrize("spread", [pytest.param(0.5, marks=pytest.mark.slow), 3.0])
def test_tokens_follow_laws_over_200_000_tokens(spread, top_p):
    """Flat, all tokens but a few run as one; peaked, they win one race in a few."""
    p = law(200_000, spread)
    likely = p[p > FLOOR].sum().item()
    assert (likely < 0.2) if spread == 0.5 else (0.6 < likely < 0.95)
    count = 3000 if top_p == 1 else 500  # wide nuclei are sorted one by one
    tokens = draws(p, count, Sampler(1.0, top_p), at_once=50)
    expected = (p if top_p == 1 else truncate(p.double(), top_p)).double().numpy()
    assert fits(tokens, expected) > 1e-3
    if top_p == 1:
        alone = int((p[tokens] > FLOOR).sum())
        assert stats.binomtest(alone, count, likely).pvalue > 1e-3


def test_a_race_among_the_others_is_run_with_all_of_them():
    """One token at a half, the rest far below the floor: were the others forgotten, the first would always win."""
    p = torch.full((100_001,), 0.5 / 100_000)
    p[7] = 0.5
    tokens = draws(p, 2000, Sampler(), at_once=50)
    assert stats.binomtest(int((tokens == 7).sum()), 2000, 0.5).pvalue > 1e-3
    rest = tokens[tokens != 7].double().numpy() / 100_001
    assert stats.kstest(rest, "uniform").pvalue > 1e-3


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 700), st.integers(0, 10**6), st.floats(0.0, 8.0))
def test_the_quick_race_is_the_whole_race(size, seed, spread):
    """On a CPU times are made for few tokens, on a GPU for all: the winner is the same, and it has a probability."""
    generator = torch.Generator().manual_seed(seed)
    p = torch.softmax(spread * torch.randn(5, size, generator=generator), -1)
    p[torch.rand(5, size, generator=generator) < 0.4] = 0.0
    p[:, seed % size] += 1e-3  # never all zero
    keys = RandomStream(seed, [size]).keys(0, range(5), 1)[:, 0]
    winners = race(p, keys)
    assert torch.equal(winners, race_with_all_times(p, keys, FLOOR))
    assert (p.gather(1, winners[:, None]) > 0).all()
    kept = Truncation(top_p=0.7).entries(p / p.sum(-1, keepdim=True))
    assert torch.equal(kept.race(keys)[0], race_with_all_times(kept.dense(), keys))


def test_a_race_among_the_others_has_one_winner_however_long_it_is():
    """Most of these laws is below the floor, in more tokens than are worked on at once; some tokens have none of it."""
    generator = torch.Generator().manual_seed(0)
    p = torch.softmax(0.3 * torch.randn(12, 7 * HEAT // 2, generator=generator), -1)
    p[torch.rand(p.shape, generator=generator) < 0.2] = 0.0
    p[:, 5] = 0.2
    keys = RandomStream(0, [1]).keys(0, range(12), 1)[:, 0]
    winners = race(p, keys)
    assert torch.equal(winners, race_with_all_times(p, keys, FLOOR))
    assert (winners // HEAT).unique().numel() > 2
    assert allocated_bytes(lambda: race(p[:1], keys[:1])) < 64 * HEAT + 8 * p.shape[1]  # not 64 bytes of every token


@pytest.mark.parametrize("spread", [0.5, 3.0])
def test_rounding_moves_a_token_as_rarely_as_it_moves_the_law(spread):
    """Shared times, logits that differ by δ: the chance of another token is ½ ΣΣ p_v p_w |δ_v − δ_w| to first order.

    With one token for each uniform number, it would be the sum of how far all borders move.
    """
    p, generator = law(500, spread), torch.Generator().manual_seed(5)
    delta = 1e-3 * torch.randn(500, generator=generator)
    q = torch.softmax(p.log() + delta, -1)
    predicted = 0.5 * (p[:, None] * p * (delta[:, None] - delta).abs()).sum().item()
    keys = RandomStream(2, [2]).keys(0, range(1), 60_000)[0]
    flips = sum(
        int((race(p.expand(len(k), -1).contiguous(), k) != race(q.expand(len(k), -1).contiguous(), k)).sum())
        for k in keys.split(2000)
    )
    expected = 60_000 * predicted
    assert abs(flips - expected) < 4 * math.sqrt(expected)  # 4 standard errors of a Poisson count


def test_a_row_draws_the_same_in_any_company():
    p = torch.stack([law(5000, spread, seed) for seed, spread in enumerate((0.2, 1.0, 3.0, 6.0, 2.0, 0.01))])
    keys = RandomStream(3, [3]).keys(0, range(6), 1)[:, 0]
    for sampler in (Sampler(), Sampler(1.0, 0.9)):
        together, kept = sampler.draw(p, keys)
        for row in range(6):
            token, own = sampler.draw(p[row : row + 1], keys[row : row + 1])
            assert token == together[row]
            if kept is not None:
                assert torch.equal(own.dense()[0], kept.dense()[row])


@settings(max_examples=100, deadline=None)
@given(st.integers(2, 3000), st.integers(0, 10**6), st.floats(0.01, 0.999), st.floats(0.01, 6.0))
def test_nucleus_is_the_sorted_one(size, seed, top_p, spread):
    p = torch.softmax(spread * torch.randn(2, size, generator=torch.Generator().manual_seed(seed)), -1)
    cut = Truncation(top_p=top_p)
    for row, mine, entries in zip(p, cut.law(p), cut.entries(p).dense(), strict=True):
        expected = truncate(row.double(), top_p)
        # Where the mass meets top_p to the last digit, one token more or less is rounding.
        if int((expected > 0).sum()) == int((mine > 0).sum()):
            # A sum of `size` positive numbers is off by at most size · ε of itself, a quotient by one ε more.
            torch.testing.assert_close(mine.double(), expected, rtol=(size + 1) * EPS, atol=0)
        else:
            assert abs(int((expected > 0).sum()) - int((mine > 0).sum())) == 1
        torch.testing.assert_close(entries, mine, rtol=(size + 2) * EPS, atol=0)


def test_a_wide_nucleus_is_the_sorted_one():
    """Beyond the stages of topk rows are sorted one by one; a flat row beside a peaked one."""
    p = torch.stack([law(30_000, 0.1), law(30_000, 8.0)])
    for mine, row in zip(Truncation(top_p=0.95).law(p), p, strict=True):
        expected = truncate(row.double(), 0.95)
        assert abs(int((expected > 0).sum()) - int((mine > 0).sum())) <= 1
        assert (mine.double() - expected).abs().sum() < 2 / (expected > 0).sum() + 30_000 * EPS  # one token at most


def test_flat_laws_among_peaked_ones_keep_what_each_keeps_alone():
    """Only a law whose likely tokens hold too little is looked at as a whole; rows stay in order, tokens in theirs."""
    spreads = torch.tensor([4.0, 0.1, 4.0, 0.1, 0.1, 4.0])[:, None]
    p = torch.softmax(torch.randn(6, 100_000, generator=torch.Generator().manual_seed(2)) * spreads, -1)
    for cut in (Truncation(top_p=0.9), Truncation(top_p=0.9, min_p=1e-3)):
        together, alone = cut.entries(p), [cut.entries(p[row : row + 1]) for row in range(6)]
        assert torch.equal(together.rows, together.rows.sort().values)
        assert torch.equal(together.tokens, torch.cat([one.tokens for one in alone]))
        assert torch.equal(together.mass, torch.cat([one.mass for one in alone]))
        assert p[1].max() < FLOOR and together.rows.bincount()[1] > 80_000  # nothing of it is likely


def test_entries_are_the_matrix_without_its_zeros():
    dense = law(60, 2.0).view(4, 15)
    entries = Entries.where(dense.numpy() > 0.01, dense)
    expected = torch.where(dense > 0.01, dense, 0.0)
    assert torch.equal(entries.dense(), expected)
    torch.testing.assert_close(entries.row_sums(), expected.double().sum(-1), rtol=15 * 2.0**-53, atol=0)


def test_some_rows_of_entries_are_those_of_some_rows():
    """Rows without entries lie before, between and behind those with some."""
    dense = torch.rand(7, 9, generator=torch.Generator().manual_seed(0)) * torch.tensor([0, 1, 0, 1, 1, 0, 0])[:, None]
    dense[1, :4] = 0
    entries = Entries.where((dense > 0).numpy(), dense)
    for block in (slice(0, 7), slice(0, 1), slice(1, 3), slice(2, 5), slice(4, 7), slice(5, 7)):
        assert torch.equal(entries.rows_of(block).dense(), dense[block])
