"""The in-place cache layer against concatenation, and keys that bring their mask against masked attention."""

import pytest
import torch
from conftest import make_policy
from tolerances import assert_near, room
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers.cache_utils import DynamicLayer

from misvo import cache as kv
from misvo.rows import MaskedKeys, RowLayer

HEADS, WIDTH = 2, 3


def single(length, seed):
    layer, generator = DynamicLayer(), torch.Generator().manual_seed(seed)
    layer.update(*(torch.randn(1, HEADS, length, WIDTH, generator=generator) for _ in range(2)))
    return layer


class Concatenated:
    """What RowLayer should hold, by copying everything at every turn."""

    def __init__(self, layer, rows):
        self.keys, self.values = (x.repeat(rows, 1, 1, 1) for x in (layer.keys, layer.values))

    def change(self, make):
        self.keys, self.values = make(self.keys), make(self.values)

    def update(self, keys, values):
        self.keys, self.values = torch.cat([self.keys, keys], -2), torch.cat([self.values, values], -2)

    def join(self, layer, rows):
        length = max(self.keys.shape[-2], layer.keys.shape[-2])
        for name in ("keys", "values"):
            parts = [getattr(self, name), getattr(layer, name).repeat(rows, 1, 1, 1)]
            setattr(self, name, torch.cat([pad(x, (0, 0, length - x.shape[-2], 0)) for x in parts]))


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("room", [0, 5, 40])
def test_any_order_of_operations_gives_what_concatenation_gives(seed, room):
    generator = torch.Generator().manual_seed(seed)

    def draw(below):
        return int(torch.randint(below, (), generator=generator))

    first = single(4 + seed, seed)
    ours, naive = RowLayer(first, 3, room), Concatenated(first, 3)
    for turn in range(60):
        kind = ("update", "update", "update", "join", "select", "trim")[draw(6)]
        if kind == "update":
            fresh = [torch.randn(ours.count, HEADS, 1, WIDTH, generator=generator) for _ in range(2)]
            keys, values = ours.update(*fresh)
            naive.update(*fresh)
            assert torch.equal(keys, naive.keys) and torch.equal(values, naive.values)
        elif kind == "join" and ours.count < 12:
            other, rows = single(1 + draw(20), 100 + turn), 1 + draw(3)
            ours.join(other, rows, room)
            naive.join(other, rows)
        elif kind == "select" and ours.count > 1:
            keep = torch.randperm(ours.count, generator=generator)[: ours.count - 1].sort().values
            ours.reorder_cache(keep)
            naive.change(lambda x: x[keep])  # noqa: B023
        elif kind == "trim" and ours.end - ours.start > 3:
            ours.trim(2)
            naive.change(lambda x: x[:, :, 2:])
        assert torch.equal(ours.keys, naive.keys) and torch.equal(ours.values, naive.values)
        assert ours.get_seq_length() == naive.keys.shape[-2]


def test_a_token_is_written_in_place():
    layer = RowLayer(single(4, 0), 3, room=6)
    place = layer.buffers[0].data_ptr()
    for _ in range(6):
        layer.update(*(torch.zeros(3, HEADS, 1, WIDTH) for _ in range(2)))
    assert layer.buffers[0].data_ptr() == place


def test_keys_bring_their_mask_to_attention_and_to_nothing_else():
    query, keys, values = torch.randn(4, 6, 1, 8), torch.randn(4, 2, 5, 8), torch.randn(4, 2, 5, 8)
    mask = torch.rand(4, 1, 1, 5) > 0.3
    mask[..., -1] = True
    masked = MaskedKeys.of(keys, mask)
    expected = scaled_dot_product_attention(query, keys, values, attn_mask=mask, enable_gqa=True)
    got = scaled_dot_product_attention(query, masked, values, attn_mask=None, is_causal=False, enable_gqa=True)
    assert type(got) is torch.Tensor and torch.equal(got, expected)
    assert type(masked + 1) is torch.Tensor and torch.equal(masked + 1, keys + 1)
    with pytest.raises(TypeError, match="second mask"):
        scaled_dot_product_attention(query, masked, values, attn_mask=mask, enable_gqa=True)


def alone(policy, texts):
    """The states behind the last tokens of some texts, each read by itself, as a function of the model."""

    @torch.no_grad()
    def compute(model):
        body = model.get_decoder()
        return torch.stack([body(input_ids=torch.tensor([text])).last_hidden_state[0, -1] for text in texts])

    expected, allowed = compute(policy.model), room(compute, policy.model)
    assert allowed < 1e-4 * expected.norm()  # rounding must not hide a wrong mask
    return expected, allowed


def test_padded_rows_see_what_they_would_see_alone():
    policy = make_policy("llama")
    prefixes = [policy.prefill(tokens, 4) for tokens in ([5, 6, 7], [9, 10, 11, 12, 13, 14])]
    cache = kv.replicate(prefixes[0].cache, 2, 4)
    kv.join(cache, prefixes[1].cache, 1, 4)
    depths, token = torch.tensor([3, 3, 6]), torch.tensor([4, 4, 4])
    with torch.no_grad():
        together = policy.body_step(token, cache, depths)
    assert_near(together, *alone(policy, [[*prefixes[row].tokens, 4] for row in (0, 0, 1)]))


def test_when_rows_leave_no_more_rows_are_moved_than_have_left():
    policy = make_policy("llama")
    prompts = [[5, 6, 7], [9, 10, 11, 12, 13, 14]]
    prefixes = [policy.prefill(tokens, 8) for tokens in prompts]
    cache = kv.replicate(prefixes[0].cache, 5, 8)
    kv.join(cache, prefixes[1].cache, 3, 8)
    texts = [list(prompts[0]) for _ in range(5)] + [list(prompts[1]) for _ in range(3)]
    first = cache.layers[0].keys.clone()

    def read(tokens):
        depths = torch.tensor([len(text) for text in texts])
        with torch.no_grad():
            hidden = policy.body_step(torch.tensor(tokens), cache, depths)
        for text, token in zip(texts, tokens, strict=True):
            text.append(token)
        assert_near(hidden, *alone(policy, texts))

    kv.select(cache, torch.tensor([1, 2, 4, 6, 7]))
    texts = [texts[row] for row in (1, 2, 4, 6, 7)]
    stayed = (cache.layers[0].keys == first[:5]).flatten(1).all(1)
    assert stayed.sum() == 3  # rows 1, 2 and 4; the last two took the places of 0 and 3
    read([20, 21, 22, 23, 24])
    kv.join(cache, prefixes[0].cache, 2, 8)  # and the ranks fill up behind them
    texts += [list(prompts[0]) for _ in range(2)]
    read([30, 31, 32, 33, 34, 35, 36])
    kv.select(cache, torch.tensor([0, 3, 5]))
    texts = [texts[row] for row in (0, 3, 5)]
    read([40, 41, 42])
