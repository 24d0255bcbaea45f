"""A full-attention cache layer for batches whose masks the model makes: rows end at one column, padded on the left.

Written in place, with room to grow, where the layers of transformers copy all keys and values for every token. It
serves on a GPU and for other kinds of attention than sdpa; elsewhere `misvo.row_layer` does better.
"""

import torch
from transformers.cache_utils import DynamicLayer

from misvo.row_layer import plain_layer


class PaddedLayer(DynamicLayer):
    """Keys and values (rows, heads, columns, width); the live ones are rows [0, count) and columns [start, end)."""

    def __init__(self, source: DynamicLayer, rows: torch.Tensor, room: int):
        super().__init__()
        self.dtype, self.device, self.is_initialized = source.dtype, source.device, True
        self.count, self.start, self.end = len(rows), 0, source.keys.shape[-2]
        self.buffers = []
        for states in (source.keys, source.values):
            _, heads, length, width = states.shape
            buffer = states.new_empty(len(rows), heads, length + room, width)
            buffer[:, :, :length] = _rows(states, rows)
            self.buffers.append(buffer)
        self._look()

    def update(self, key_states, value_states, *args, **kwargs):
        tokens = key_states.shape[-2]
        self._reserve(self.count, left=0, right=tokens)
        for buffer, states in zip(self.buffers, (key_states, value_states), strict=True):
            buffer[: self.count, :, self.end : self.end + tokens] = states
        self.end += tokens
        self._look()
        return self.keys, self.values

    def join(self, source: DynamicLayer, rows: torch.Tensor, room: int) -> None:
        """Add copies of the given rows of a source, aligned at the right end."""
        length, width, added = source.keys.shape[-2], self.end - self.start, len(rows)
        deeper = max(0, length - width)
        self._reserve(self.count + added, left=deeper, right=1, room=room)
        old, new = slice(0, self.count), slice(self.count, self.count + added)
        for buffer, states in zip(self.buffers, (source.keys, source.values), strict=True):
            buffer[old, :, self.start - deeper : self.start] = 0  # padding must be finite, even where nobody looks
            buffer[new, :, self.start : self.end - length] = 0
            buffer[new, :, self.end - length : self.end] = _rows(states, rows)
        self.count, self.start = self.count + added, self.start - deeper
        self._look()

    def take(self, rows: torch.Tensor, depth: int) -> DynamicLayer:
        """A source of these rows, without their padding."""
        live = slice(self.end - depth, self.end)
        return plain_layer(self, *(buffer[rows.to(buffer.device), :, live] for buffer in self.buffers))

    def reorder_cache(self, beam_idx) -> None:
        """Keep the given rows, in their new order."""
        for buffer, states in zip(self.buffers, (self.keys, self.values), strict=True):
            buffer[: len(beam_idx), :, self.start : self.end] = states.index_select(0, beam_idx.to(states.device))
        self.count = len(beam_idx)
        self._look()

    def move(self, sources: torch.Tensor, targets: torch.Tensor, count: int) -> None:
        """Put some rows in the place of others, and keep the first `count`."""
        for states in (self.keys, self.values):
            states[targets.to(states.device)] = states[sources.to(states.device)]
        self.count = count
        self._look()

    def trim(self, columns: int) -> None:
        """Forget the first columns."""
        self.start += columns
        self._look()

    def _look(self):
        self.keys, self.values = (buffer[: self.count, :, self.start : self.end] for buffer in self.buffers)

    def _reserve(self, rows, left, right, room=0):
        """Make sure that there are so many rows, and so many free columns on either side of the live ones.

        Where that takes a move, it makes `room` on the right, so that the next one is far.
        """
        held, _, columns, _ = self.buffers[0].shape
        if rows <= held and left <= self.start and self.end + right <= columns:
            return
        width, right = self.end - self.start, max(right, room)
        needed = left + width + right
        roomy = needed + needed // 8 <= columns  # moving to the left end frees enough to be worth the copy
        for index, buffer in enumerate(self.buffers):
            live = buffer[: self.count, :, self.start : self.end]
            if rows <= held and roomy:
                live = live.clone()
            else:
                spare = needed // 8 if rows <= held else 0  # ran out while decoding: do not run out again at once
                size = (max(rows, held), buffer.shape[1], max(columns, needed + spare), buffer.shape[3])
                self.buffers[index] = buffer = buffer.new_empty(size)
            buffer[: self.count, :, left : left + width] = live
        self.start, self.end = left, left + width
        self._look()


def _rows(states, rows):
    return states if len(states) == 1 else states[rows.to(states.device)]
