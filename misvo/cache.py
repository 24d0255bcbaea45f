"""Key-value caches of transformers as batches of rows: replicate, join, select, trim, take.

A prompt is always read alone and its cache is padded afterwards, so what it holds cannot depend on its batch mates.
Works on full and sliding attention and on convolution or recurrent states (LFM2 and other hybrids); `reorder_cache` is
used throughout because it is the one batch operation that all of these layers have.

Rows of different lengths share a batch in one of two ways. Where attention takes its mask from the keys (`aligns`),
rows begin at one column (`misvo.row_layer`), `columns` says where each of them stands, and rows may have a prompt in
common that is kept once. Elsewhere they end at one column, padded on the left, and the model makes its masks. A cache
of nothing but attention also need not close ranks when rows leave: the last rows take the empty places, and `slots`
says where each row of the batch is.

What rows go on from, a source, is a plain cache of transformers in which all rows have read as many tokens: that of a
prompt, of one row, or rows that were taken out of a batch, which any number of rows may go on from. Where its rows have
a prompt in common, it holds what comes behind it.
"""

import copy

import torch
from torch.nn.functional import pad
from transformers.cache_utils import (
    Cache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionLayer,
)

from misvo.errors import MisvoError
from misvo.padded_layer import PaddedLayer
from misvo.row_layer import Columns, Common, RowLayer

# Exact types: a subclass may keep more state than these functions know of.
ATTENTION = (DynamicLayer, DynamicSlidingWindowLayer)
MERGEABLE = (
    DynamicSlidingWindowLayer,
    LinearAttentionLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
)


def aligns(cache: Cache, attention: str | None) -> bool:
    """Whether rows can begin at one column: attention by sdpa on a CPU, or states that have no columns.

    On a GPU the fused kernels know either a mask or grouped heads, so there the model gets its mask as usual.
    """
    if attention != "sdpa" or not {type(layer) for layer in cache.layers} <= {*ATTENTION, LinearAttentionLayer}:
        return False
    return all(layer.device.type == "cpu" for layer in cache.layers if type(layer) in ATTENTION)


def replicate(
    source: Cache, rows: torch.Tensor, room: int = 0, aligned: bool = False, common: Common | None = None, read: int = 0
) -> Cache:
    """A new cache of rows that go on from the given ones of `source`, which stays as it is; see `join`."""
    fresh = copy.copy(source)
    fresh.columns = Columns() if aligned else None
    if aligned:
        kinds = source.layers if common is None else common.cache.layers  # those of a prompt know their window
        fresh.layers = [
            RowLayer(kinds[index], index, fresh.columns) if type(layer) in ATTENTION else _copied(layer, rows)
            for index, layer in enumerate(source.layers)
        ]
        _join_aligned(fresh, source, rows, room, common, read)
    else:
        fresh.layers = [
            PaddedLayer(layer, rows, room) if type(layer) is DynamicLayer else _copied(layer, rows)
            for layer in source.layers
        ]
    plain = all(isinstance(layer, RowLayer | PaddedLayer) for layer in fresh.layers)
    fresh.slots = torch.arange(len(rows)) if plain else None
    return fresh


def _copied(layer, rows):
    layer = copy.deepcopy(layer)
    layer.reorder_cache(rows)
    return layer


def join(
    cache: Cache, source: Cache, rows: torch.Tensor, room: int = 0, common: Common | None = None, read: int = 0
) -> None:
    """Add rows to a batch, in place, that go on from the given ones of `source`, with room for so many tokens.

    Rows that begin at one column may have something in common: then `source` is its cache, or holds what comes behind
    it. `read` says how many tokens they have read.
    """
    if cache.slots is not None:
        cache.slots = torch.cat([cache.slots, len(cache.slots) + torch.arange(len(rows))])
    if cache.columns is not None:
        _join_aligned(cache, source, rows, room, common, read)
    for index, layer in enumerate(cache.layers):
        if isinstance(layer, RowLayer):
            continue
        if isinstance(layer, PaddedLayer):
            layer.join(source.layers[index], rows, room)
            continue
        if type(layer) not in MERGEABLE:
            raise MisvoError(
                f"this model's cache layer {type(layer).__name__} cannot hold several prompts at once: "
                "steer one prompt at a time with rollouts no larger than max_rows."
            )
        layers = [layer, _copied(source.layers[index], rows)]
        if isinstance(layer, DynamicLayer):
            _merge_attention(layers)
        if isinstance(layer, LinearAttentionLayer):
            _merge_states(layers)


def _join_aligned(cache, source, rows, room, common, read):
    cache.columns.join(len(rows), common, read)
    for layer in cache.layers:
        if isinstance(layer, RowLayer):
            layer.join(source.layers[layer.index], rows, room, copied=common is None or common.cache is not source)


def select(cache: Cache, keep: torch.Tensor) -> None:
    """Keep only the rows `keep`, in place: of attention, at most as many rows are moved as have left."""
    if cache.slots is None:
        if cache.columns is not None:
            cache.columns.reorder(keep)
        cache.reorder_cache(keep)
        return
    slots, count = cache.slots[keep], len(keep)
    movers = slots >= count
    taken = torch.zeros(count, dtype=torch.bool)
    taken[slots[~movers]] = True
    holes = torch.nonzero(~taken).squeeze(-1)
    if cache.columns is not None:
        cache.columns.move(slots[movers], holes, count)
    for layer in cache.layers:
        layer.move(slots[movers], holes, count)
    cache.slots = slots.masked_scatter(movers, holes)


def check_attention(cache: Cache) -> None:
    """Refuse a model whose attention took the keys of a batch for plain ones: it saw neither mask nor prompt."""
    for layer in cache.layers if cache.columns is not None else []:
        if isinstance(layer, RowLayer) and layer.given is not None and not layer.given.attended:
            raise MisvoError(
                'this model says sdpa but attends in another way: load it with attn_implementation="eager".'
            )


def common_of(cache: Cache, row: int) -> Common | None:
    """What a row of a batch has in common with others."""
    if cache.columns is None:
        return None
    return cache.columns.common(row if cache.slots is None else int(cache.slots[row]))


def take(cache: Cache, rows: torch.Tensor, depth: int) -> Cache:
    """A source of the given rows of a batch, which have read `depth` tokens each and have the same in common; the batch
    stays as it is."""
    if cache.slots is not None:
        rows = cache.slots[rows]
    source = copy.copy(cache)
    source.columns = source.slots = None
    source.layers = [_taken(layer, rows, depth) for layer in cache.layers]
    return source


def _taken(layer, rows, depth):
    if isinstance(layer, RowLayer | PaddedLayer):
        return layer.take(rows, depth)
    layer = copy.deepcopy(layer)
    layer.reorder_cache(rows)
    if isinstance(layer, DynamicSlidingWindowLayer):
        stored = min(depth, layer.sliding_window - 1)
        layer.cumulative_length = depth
    else:
        stored = depth
    if isinstance(layer, DynamicLayer):  # without the padding that longer mates made
        start = layer.keys.shape[-2] - stored
        layer.keys, layer.values = layer.keys[..., start:, :], layer.values[..., start:, :]
    return layer


def trim(cache: Cache, columns: int) -> None:
    """Drop the first `columns` columns, in place: padding that no row needs any more. Aligned rows have none."""
    for layer in cache.layers if cache.columns is None else []:
        if isinstance(layer, PaddedLayer):
            layer.trim(columns)
            continue
        if isinstance(layer, DynamicSlidingWindowLayer):
            layer.cumulative_length -= columns
            stored = min(layer.cumulative_length, layer.sliding_window - 1)
            start = layer.keys.shape[-2] - stored
        elif isinstance(layer, DynamicLayer):
            start = columns
        else:
            continue
        layer.keys, layer.values = layer.keys[..., start:, :], layer.values[..., start:, :]


def bytes_per_row(cache: Cache) -> dict:
    """Memory of one row of a single-row cache, by the names of `misvo.footprint.Shape`.

    Only layers of full attention become ones that are written in place, see `replicate`. Others are copied for every
    token, though never two of them at a time.
    """
    grows, inside, fixed, copied, window = 0.0, 0.0, 0.0, [0.0], None
    for layer in cache.layers:
        if isinstance(layer, DynamicLayer) and layer.keys is not None:
            held = layer.keys.numel() * layer.keys.itemsize + layer.values.numel() * layer.values.itemsize
            per_token = held / max(1, layer.keys.shape[-2])
            if isinstance(layer, DynamicSlidingWindowLayer):
                inside, window = inside + per_token, layer.sliding_window
            else:
                grows += per_token
            if type(layer) is not DynamicLayer:
                copied.append(per_token)
        for states in (getattr(layer, "conv_states", {}), getattr(layer, "recurrent_states", {})):
            fixed += sum(state.numel() * state.itemsize for state in states.values() if state is not None)
    return {
        "cache_per_token": grows,
        "cache_fixed": fixed,
        "window": window,
        "cache_in_window": inside,
        "cache_copied": max(copied),
    }


def _merge_attention(layers):
    target, length = layers[0], max(layer.keys.shape[-2] for layer in layers)
    for name in ("keys", "values"):
        tensors = [getattr(layer, name) for layer in layers]
        padded = [pad(tensor, (0, 0, length - tensor.shape[-2], 0)) for tensor in tensors]
        setattr(target, name, torch.cat(padded))
    if isinstance(target, DynamicSlidingWindowLayer):
        target.cumulative_length = max(layer.cumulative_length for layer in layers)


def _merge_states(layers):
    target = layers[0]
    for name in ("conv_states", "recurrent_states"):
        states = getattr(target, name)
        for index, state in states.items():
            if state is not None:
                states[index] = torch.cat([getattr(layer, name)[index] for layer in layers])
