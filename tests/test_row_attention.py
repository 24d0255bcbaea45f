"""A prompt that is kept once: attention over both parts against attention over all keys, and rows of every model."""

import dataclasses
import math

import pytest
import torch
from conftest import ARCHITECTURES, make_policy
from test_continued import by_reading, whole_request
from tolerances import room, rounding
from torch.nn.functional import scaled_dot_product_attention

from misvo.engines import batch
from misvo.engines.torch import TorchEngine
from misvo.errors import MisvoError
from misvo.row_attention import Part, RowKeys
from misvo.row_layer import TOGETHER, Common, visible_width

LONG = tuple(range(5, 25))  # longer than the window of the sliding models


def hidden(mask):
    """0 where a mask allows to look, −∞ elsewhere."""
    return torch.zeros(mask.shape).masked_fill_(~mask, -math.inf)


@pytest.mark.parametrize("heads, groups, size", [(9, 3, 64), (4, 4, 8), (8, 1, 80)])
def test_two_parts_are_what_attention_over_all_keys_is(heads, groups, size):
    """Seven rows: three go on from one prompt, two from another, two have no prompt; each sees some of its own keys."""
    torch.manual_seed(0)
    query, own = torch.randn(7, heads, 1, size), 21
    keys, values = torch.randn(2, 7, groups, own, size)
    mask = torch.rand(7, 1, 1, own) > 0.4
    mask[..., 0] = True
    prompts = {(0, 2, 5): 33, (1, 6): 700}  # tokens: less than a vector more than 32, more than one block of the kernel
    parts = [Part(torch.tensor(rows), *torch.randn(2, 1, groups, length, size)) for rows, length in prompts.items()]
    seen = RowKeys.of(keys, hidden(mask), parts)
    got = scaled_dot_product_attention(query, seen, values, attn_mask=None, enable_gqa=True)
    assert type(got) is torch.Tensor and got.shape == query.shape
    for row in range(7):
        seen = [(part.keys[0], part.values[0]) for part in parts if row in part.rows.tolist()]
        seen.append((keys[row][:, mask[row, 0, 0]], values[row][:, mask[row, 0, 0]]))
        all_keys, all_values = (torch.cat(found, 1).double()[None] for found in zip(*seen, strict=True))
        expected = scaled_dot_product_attention(query[row].double()[None], all_keys, all_values, enable_gqa=True)[0]
        count = all_keys.shape[-2]
        # a score is a sum of `size` products, and moves the outcome by its error times the size of a value
        scores = rounding(torch.float32, size, query.norm(dim=-1).max().item() * 4 / math.sqrt(size))
        allowed = values.abs().max().item() * 2 * (scores + rounding(torch.float32, count, 1.0))
        assert (got[row] - expected).abs().max() <= allowed


def test_all_rows_of_one_prompt_need_no_choice_of_rows():
    torch.manual_seed(1)
    query, (keys, values) = torch.randn(5, 6, 1, 16), torch.randn(2, 5, 2, 8, 16)
    mask, (common_keys, common_values) = torch.zeros(5, 1, 1, 8), torch.randn(2, 1, 2, 40, 16)
    chosen, whole = (
        scaled_dot_product_attention(
            query, RowKeys.of(keys, mask, [Part(rows, common_keys, common_values)]), values, scale=0.3
        )
        for rows in (torch.arange(5), None)
    )
    assert torch.equal(chosen, whole)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_rows_of_every_model_are_those_of_a_model_that_reads_everything(architecture, monkeypatch):
    """The prompt kept once, and a copy in each row; two prompts in one batch, one of them beyond the window."""
    policy = make_policy(architecture)
    short = whole_request(policy)
    long = dataclasses.replace(short, prompt=LONG, rollouts=range(TOGETHER))
    found = {}
    for name, least in (("once", TOGETHER), ("copied", 1000)):
        monkeypatch.setattr(batch, "TOGETHER", least)
        found[name] = TorchEngine(policy, 32).run_many([short, long])
    for request, once, copied in zip((short, long), found["once"], found["copied"], strict=True):
        assert once.tokens.tolist() == copied.tokens.tolist()
        expected = by_reading(request, once.responses(), "hidden")
        allowed = room(expected, policy.model)
        for rollouts in (once, copied):
            assert (rollouts.hidden[rollouts.alive] - expected(policy.model)).norm() <= 2 * allowed


@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_a_row_holds_what_comes_behind_the_prompt(architecture):
    policy = make_policy(architecture)
    prefix = policy.prefill(LONG, 8)
    cache = policy.replicate(prefix, torch.zeros(6, dtype=torch.long), 8, Common(prefix.cache, prefix.length))
    size = prefix.cache.layers[0].keys.shape[-1]
    for layer in cache.layers:
        assert all(buffer.shape[2] == visible_width(8, size) for buffer in layer.buffers)


@pytest.mark.parametrize("heads, groups, size", [(9, 3, 64), (4, 2, 8), (8, 2, 128)])
def test_the_bits_of_a_row_do_not_hang_on_how_many_ask_beside_it(heads, groups, size):
    """Plain queries fail here: products of three and fewer of them round otherwise."""
    torch.manual_seed(0)
    rows, tokens = 33, 20
    width = visible_width(tokens, size)
    query, mask = torch.randn(rows, heads, 1, size), hidden(torch.arange(width) < tokens).expand(rows, 1, 1, width)
    keys, values = torch.randn(2, rows, groups, width, size)
    for length in (3, 40, 135):
        common = torch.randn(2, 1, groups, length, size)

        def ask(count, common=common):
            given = RowKeys.of(keys[:count], mask[:count], [Part(None, *common)])
            return scaled_dot_product_attention(query[:count], given, values[:count], enable_gqa=True)

        everybody = ask(rows)
        if not torch.equal(ask(rows - 1), everybody[:-1]):
            pytest.skip("attention of this machine depends on how many rows there are")
        for count in (1, 2, 3, 5, 8, 16, 17):
            assert torch.equal(ask(count), everybody[:count])


def test_a_model_that_attends_in_another_way_is_refused(monkeypatch):
    policy = make_policy("llama")

    def by_hand(query, keys, values, **_):
        return (query @ keys.repeat_interleave(2, 1).mT).softmax(-1) @ values.repeat_interleave(2, 1)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", by_hand)
    prefix = policy.prefill([1, 2, 3], 2)
    cache = policy.replicate(prefix, torch.zeros(4, dtype=torch.long), 2, Common(prefix.cache, 3))
    with pytest.raises(MisvoError, match='attn_implementation="eager"'):
        policy.body_step(torch.tensor([4] * 4), cache, torch.full((4,), 3))
