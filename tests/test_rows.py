"""In-place cache layers against concatenation, keys that bring their mask, and rows that nobody else can change."""

import pytest
import torch
from conftest import make_policy
from tolerances import assert_near, room
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers.cache_utils import DynamicLayer

from misvo import cache as kv
from misvo.padded_layer import PaddedLayer
from misvo.row_attention import RowKeys
from misvo.row_layer import Columns, Places, RowLayer, visible_width

HEADS, WIDTH = 2, 3


def single(length, seed):
    layer, generator = DynamicLayer(), torch.Generator().manual_seed(seed)
    layer.update(*(torch.randn(1, HEADS, length, WIDTH, generator=generator) for _ in range(2)))
    return layer


class Concatenated:
    """What PaddedLayer should hold, by copying everything at every turn."""

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


def row_layer(source, columns, rows, room):
    """A layer of so many rows that have copied the only row of a source."""
    layer = RowLayer(source, 0, columns)
    columns.join(rows)
    layer.join(source, copies(rows), room)
    return layer


def copies(count):
    """So many copies of the only row."""
    return torch.zeros(count, dtype=torch.long)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("room", [0, 5, 40])
def test_any_order_of_operations_gives_what_concatenation_gives(seed, room):
    generator = torch.Generator().manual_seed(seed)

    def draw(below):
        return int(torch.randint(below, (), generator=generator))

    first = single(4 + seed, seed)
    ours, naive = PaddedLayer(first, copies(3), room), Concatenated(first, 3)
    for turn in range(60):
        kind = ("update", "update", "update", "join", "select", "trim")[draw(6)]
        if kind == "update":
            fresh = [torch.randn(ours.count, HEADS, 1, WIDTH, generator=generator) for _ in range(2)]
            keys, values = ours.update(*fresh)
            naive.update(*fresh)
            assert torch.equal(keys, naive.keys) and torch.equal(values, naive.values)
        elif kind == "join" and ours.count < 12:
            other, rows = single(1 + draw(20), 100 + turn), 1 + draw(3)
            ours.join(other, copies(rows), room)
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


@pytest.mark.parametrize("seed", range(8))
def test_aligned_rows_hold_what_each_row_would_hold_alone(seed):
    generator = torch.Generator().manual_seed(seed)

    def draw(below):
        return int(torch.randint(below, (), generator=generator))

    first, columns = single(4 + seed, seed), Columns()
    layer = row_layer(first, columns, 3, 80)
    alone = [[first.keys[0], first.values[0]] for _ in range(3)]  # of each row, (heads, tokens, width)
    for turn in range(60):
        kind = ("update", "update", "join", "select", "move")[draw(5)]
        if kind == "update":
            columns.stand_at(torch.tensor([keys.shape[1] for keys, _ in alone]))
            fresh = [torch.randn(len(alone), HEADS, 1, WIDTH, generator=generator) for _ in range(2)]
            keys, values = layer.update(*fresh)
            alone = [
                [torch.cat([old, new[i]], 1) for old, new in zip(alone[i], fresh, strict=True)]
                for i in range(len(alone))
            ]
            for i, (own_keys, own_values) in enumerate(alone):
                length = own_keys.shape[1]
                assert torch.equal(keys.mask[i, 0, 0] == 0, torch.arange(keys.shape[2]) < length)
                assert torch.equal(keys[i, :, :length], own_keys) and torch.equal(values[i, :, :length], own_values)
            assert keys.isfinite().all() and values.isfinite().all()
        elif kind == "join" and len(alone) < 12:
            other, rows = single(1 + draw(20), 100 + turn), 1 + draw(3)
            columns.join(rows)
            layer.join(other, copies(rows), 80)
            alone += [[other.keys[0], other.values[0]] for _ in range(rows)]
        elif kind == "select" and len(alone) > 1:
            keep = torch.randperm(len(alone), generator=generator)[:-1].sort().values
            columns.reorder(keep)
            layer.reorder_cache(keep)
            alone = [alone[i] for i in keep.tolist()]
        elif kind == "move" and len(alone) > 2:
            hole = draw(len(alone) - 1)
            moved = torch.tensor([len(alone) - 1]), torch.tensor([hole]), len(alone) - 1
            columns.move(*moved)
            layer.move(*moved)
            alone[hole] = alone.pop()


def test_a_token_is_written_in_place():
    columns, length = Columns(), 4
    for layer in (
        PaddedLayer(single(length, 0), copies(3), room=6),
        row_layer(single(length, 0), columns, 3, 6),
    ):
        place = layer.buffers[0].data_ptr()
        for token in range(6):
            columns.stand_at(torch.full((3,), length + token))
            layer.update(*(torch.zeros(3, HEADS, 1, WIDTH) for _ in range(2)))
        assert layer.buffers[0].data_ptr() == place


@pytest.mark.parametrize("head_size", [8, 64, 72, 80, 128])
def test_widths_keep_scratch_memory_on_cache_lines_and_the_last_vector_unseen(head_size):
    for tokens in range(1, 200):
        width = visible_width(tokens, head_size)
        assert (width + 2 + head_size) % 16 == 0 and width // 16 * 16 >= tokens


@pytest.mark.parametrize("heads, groups, head_size", [(9, 3, 64), (4, 4, 32), (8, 2, 128)])
def test_attention_of_a_row_has_the_same_bits_in_any_company(heads, groups, head_size):
    """Alone, among more rows, and beside a longer one: what changes is what the row does not see.

    Widths that are not chosen fail here: plain sdpa gives other bits to the rows of the second thread.
    """
    torch.manual_seed(0)
    rows, longest = 33, 300
    query = torch.randn(rows, heads, 1, head_size)
    keys, values = torch.randn(2, rows, groups, visible_width(longest, head_size), head_size)

    def attend(count, tokens, width):
        mask = Places(torch.full((count,), tokens - 1), None).mask(width)
        seen = RowKeys.of(keys[:count, :, :width], mask)
        return scaled_dot_product_attention(query[:count], seen, values[:count, :, :width], enable_gqa=True)

    plain = -2 - head_size + 160  # scratch memory of 160 floats a thread
    if not torch.equal(attend(rows, 64, plain)[:1], attend(1, 64, plain)):
        pytest.skip("attention of this machine depends on how many rows there are")
    for tokens in (3, 17, 100, 135, 230):
        alone = attend(1, tokens, visible_width(tokens, head_size))
        for count in (2, 3, 16, rows):
            for longer in (tokens, tokens + 1, tokens + 40, longest):
                assert torch.equal(attend(count, tokens, visible_width(longer, head_size))[:1], alone)


def test_keys_bring_their_mask_to_attention_and_to_nothing_else():
    query, keys, values = torch.randn(4, 6, 1, 8), torch.randn(4, 2, 5, 8), torch.randn(4, 2, 5, 8)
    mask = torch.rand(4, 1, 1, 5) > 0.3
    mask[..., -1] = True
    masked = RowKeys.of(keys, torch.zeros(mask.shape).masked_fill_(~mask, -torch.inf))
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
    prompts = [[5, 6, 7], [9, 10, 11, 12, 13, 14]]
    prefixes = [policy.prefill(tokens, 4) for tokens in prompts]
    cache = policy.replicate(prefixes[0], copies(2), 4)
    assert cache.columns is not None  # aligned
    kv.join(cache, prefixes[1].cache, copies(1), 4)
    depths, token = torch.tensor([3, 3, 6]), torch.tensor([4, 4, 4])
    with torch.no_grad():
        together = policy.body_step(token, cache, depths)
    assert_near(together, *alone(policy, [[*prompts[row], 4] for row in (0, 0, 1)]))


def test_when_rows_leave_no_more_rows_are_moved_than_have_left():
    policy = make_policy("llama")
    prompts = [[5, 6, 7], [9, 10, 11, 12, 13, 14]]
    prefixes = [policy.prefill(tokens, 8) for tokens in prompts]
    cache = policy.replicate(prefixes[0], copies(5), 8)
    kv.join(cache, prefixes[1].cache, copies(3), 8)
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
    stayed = (cache.layers[0].keys[:, :, : first.shape[2]] == first[:5]).flatten(1).all(1)
    assert stayed.sum() == 3  # rows 1, 2 and 4; the last two took the places of 0 and 3
    read([20, 21, 22, 23, 24])
    kv.join(cache, prefixes[0].cache, copies(2), 8)  # and the ranks fill up behind them
    texts += [list(prompts[0]) for _ in range(2)]
    read([30, 31, 32, 33, 34, 35, 36])
    kv.select(cache, torch.tensor([0, 3, 5]))
    texts = [texts[row] for row in (0, 3, 5)]
    read([40, 41, 42])
