"""A full-attention cache layer in which every row begins at column 0 and nothing depends on its batch mates.

The layers of transformers concatenate: each token copies all keys and values of all rows, a third of the time of 64
rows here. And where rows of different lengths need a mask, transformers repeats the keys of grouped heads to full
width, nine times as slow on a CPU as leaving them grouped. `RowLayer` mends both without a change to the model: each
token is written in place, at the column where its row stands, and attention gets keys that bring their mask along.

Sums over keys then have the same order whatever else is in the batch: what a row cannot see lies behind what it sees,
and adds exact zeros. Attention on a CPU needs two more things for the same bits (PyTorch's kernel, fp32). Its threads
have scratch memory of width + 2 + head size floats each, and products round differently where that is no multiple of a
cache line; and a last incomplete vector of columns is exponentiated by another routine, so nobody may see anything in
it. `visible_width` chooses widths accordingly. Beyond 512 columns the kernel goes in blocks, and the last bits may
depend on the mates again.
"""

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers.cache_utils import DynamicLayer

LINE = 16  # floats in a cache line, and in the widest vector


def visible_width(tokens: int, head_size: int) -> int:
    """Columns that attention looks at where the longest row has so many tokens."""
    return -(-tokens // LINE) * LINE + (-2 - head_size) % LINE


class Columns:
    """Where the rows of a batch stand, for all layers of its cache: the column of each row's next token."""

    def __init__(self):
        self.depths, self.rows, self._masks = None, None, {}

    def stand_at(self, depths: torch.Tensor) -> None:
        """Row b has read depths[b] tokens."""
        self.depths, self.rows, self._masks = depths, torch.arange(len(depths)), {}
        self.deepest = int(depths.max())
        self.level = bool((depths == self.deepest).all())

    def mask(self, width: int) -> torch.Tensor:
        """What each row may look at once its next token is written, (rows, 1, 1, width)."""
        if width not in self._masks:
            self._masks[width] = (torch.arange(width) <= self.depths[:, None])[:, None, None]
        return self._masks[width]


class RowLayer(DynamicLayer):
    """Keys and values (rows, heads, columns, width); the live rows are [0, count)."""

    def __init__(self, source: DynamicLayer, rows: torch.Tensor, room: int, columns: Columns):
        super().__init__()
        self.dtype, self.device, self.is_initialized = source.dtype, source.device, True
        self.columns, self.count = columns, 0
        self.buffers = [states.new_zeros(0, *states.shape[1:]) for states in (source.keys, source.values)]
        self.join(source, rows, room)

    def update(self, key_states, value_states, *args, **kwargs):
        place = self.columns
        for buffer, states in zip(self.buffers, (key_states, value_states), strict=True):
            if place.level:
                buffer[: self.count, :, place.deepest] = states[:, :, 0]
            else:
                buffer[place.rows, :, place.depths] = states[:, :, 0]
        width = visible_width(place.deepest + 1, key_states.shape[-1])
        self._look(width)
        return MaskedKeys.of(self.keys, place.mask(width)), self.values

    def join(self, source: DynamicLayer, rows: torch.Tensor, room: int) -> None:
        """Add copies of the given rows of a source, with room for so many tokens behind them."""
        (length, head_size), added = source.keys.shape[-2:], len(rows)
        self._reserve(self.count + added, visible_width(length + room, head_size))
        for buffer, states in zip(self.buffers, (source.keys, source.values), strict=True):
            buffer[self.count : self.count + added, :, :length] = states if len(states) == 1 else states[rows]
        self.count += added
        self._look(max(length, self.keys.shape[-2] if self.count > added else 0))

    def take(self, rows: torch.Tensor, depth: int) -> DynamicLayer:
        """A source of these rows."""
        return plain_layer(self, *(buffer[rows, :, :depth] for buffer in self.buffers))

    def reorder_cache(self, beam_idx) -> None:
        """Keep the given rows, in their new order."""
        for buffer, states in zip(self.buffers, (self.keys, self.values), strict=True):
            buffer[: len(beam_idx), :, : states.shape[-2]] = states.index_select(0, beam_idx)
        self.count = len(beam_idx)
        self._look(self.keys.shape[-2])

    def move(self, sources: torch.Tensor, targets: torch.Tensor, count: int) -> None:
        """Put some rows in the place of others, and keep the first `count`."""
        for states in (self.keys, self.values):
            states[targets] = states[sources]
        self.count = count
        self._look(self.keys.shape[-2])

    def _look(self, width):
        self.keys, self.values = (buffer[: self.count, :, :width] for buffer in self.buffers)

    def _reserve(self, rows, columns):
        """Make sure that there are so many rows and columns. What nobody wrote is zero: it must be finite."""
        held, heads, width, _ = self.buffers[0].shape
        if rows <= held and columns <= width:
            return
        for index, buffer in enumerate(self.buffers):
            self.buffers[index] = buffer.new_zeros(max(rows, held), heads, max(columns, width), buffer.shape[-1])
            self.buffers[index][: self.count, :, :width] = buffer[: self.count]


def plain_layer(like: DynamicLayer, keys: torch.Tensor, values: torch.Tensor) -> DynamicLayer:
    """A layer of transformers' own with these keys and values."""
    layer = DynamicLayer()
    layer.dtype, layer.device, layer.is_initialized = like.dtype, like.device, True
    layer.keys, layer.values = keys, values
    return layer


class MaskedKeys(torch.Tensor):
    """Keys that bring their mask to `scaled_dot_product_attention`, and are plain keys to anything else.

    Attention layers that see no mask leave grouped heads grouped; the mask is added here, behind their back.
    """

    @classmethod
    def of(cls, keys, mask):
        masked = keys.as_subclass(cls)
        masked.mask = mask
        return masked

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if func is not scaled_dot_product_attention:
                return func(*args, **kwargs)
            query, keys, values, *rest = args
            if rest or kwargs.get("attn_mask") is not None:
                raise TypeError("keys that bring their mask met a second mask")
            return func(query, keys.as_subclass(torch.Tensor), values, **{**kwargs, "attn_mask": keys.mask})
