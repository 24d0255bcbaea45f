"""A cache layer in which every row begins at column 0 and nothing depends on its batch mates.

The layers of transformers concatenate: each token copies all keys and values of all rows, a third of the time of 64
rows here. And where rows of different lengths need a mask, transformers repeats the keys of grouped heads to full
width, nine times as slow on a CPU as leaving them grouped. `RowLayer` mends both without a change to the model: each
token is written in place, at the column where its row stands, and attention gets keys that bring their mask along. Rows
that go on from one prompt hold only what comes behind it, and look at the prompt itself together
(`misvo.row_attention`).

Sums over keys then have the same order whatever else is in the batch: what a row cannot see lies behind what it sees,
and adds exact zeros. Attention on a CPU needs two more things for the same bits (PyTorch's kernel, fp32). Its threads
have scratch memory of width + 2 + head size floats each, and products round differently where that is no multiple of a
cache line; and a last incomplete vector of columns is exponentiated by another routine, so nobody may see anything in
it. `visible_width` chooses widths accordingly. Beyond 512 columns the kernel goes in blocks, and the last bits may
depend on the mates again.
"""

import math
from dataclasses import dataclass

import torch
from transformers.cache_utils import Cache, DynamicLayer, DynamicSlidingWindowLayer

from misvo.row_attention import Part, Picked, RowKeys

LINE = 16  # floats in a cache line, and in the widest vector
TOGETHER = 4  # rows of a request from which on they keep their prompt once; fewer have copies of it


def visible_width(tokens: int, head_size: int) -> int:
    """Columns that attention looks at where the longest row has so many tokens."""
    return -(-tokens // LINE) * LINE + (-2 - head_size) % LINE


@dataclass(frozen=True)
class Common:
    """What rows go on from and do not copy: a prompt that was read."""

    cache: Cache  # of one row
    length: int  # tokens


@dataclass(frozen=True)
class _Row:
    """Where a row of a batch began."""

    common: Common | None
    read: int  # tokens that it had read when it joined

    def start(self, window: int | None) -> int:
        """The position of its first column: layers with a window hold no more of what was read than they can see."""
        if self.common is not None:
            return self.common.length
        return 0 if window is None else max(0, self.read + 1 - window)


class Places:
    """Where the rows stand in layers of one kind: the column of each row's next token, and what it may look at."""

    def __init__(self, own: torch.Tensor, window: int | None):
        self.own, self.window, self._masks = own, window, {}
        self.rows, self.deepest = torch.arange(len(own)), int(own.max())
        self.level = bool((own == self.deepest).all())

    def mask(self, width: int) -> torch.Tensor:
        """What each row may look at of its own once its next token is written: 0 or −∞, (rows, 1, 1, width)."""
        if width not in self._masks:
            behind = self.own[:, None] - torch.arange(width)  # by how many tokens a column lies behind
            seen = behind >= 0 if self.window is None else (behind >= 0) & (behind < self.window)
            self._masks[width] = torch.zeros(seen.shape).masked_fill_(~seen, -math.inf)[:, None, None]
        return self._masks[width]


class Columns:
    """The rows of a batch, for all layers of its cache: where each began, and how many tokens it has read."""

    def __init__(self):
        self._rows: list[_Row] = []
        self._groups: list[tuple[Common, Picked]] | None = None
        self._places: dict[int | None, Places] = {}

    def join(self, rows: int, common: Common | None = None, read: int = 0) -> None:
        self._change([*self._rows, *[_Row(common, read)] * rows])

    def move(self, sources: torch.Tensor, targets: torch.Tensor, count: int) -> None:
        """Put some rows in the place of others, and keep the first `count`."""
        rows = list(self._rows)
        for source, target in zip(sources.tolist(), targets.tolist(), strict=True):
            rows[target] = self._rows[source]
        self._change(rows[:count])

    def reorder(self, order: torch.Tensor) -> None:
        self._change([self._rows[row] for row in order.tolist()])

    def stand_at(self, depths: torch.Tensor) -> None:
        """Row b has read depths[b] tokens."""
        self._depths, self._places = depths, {}

    def places(self, window: int | None) -> Places:
        if window not in self._places:
            starts = torch.tensor([row.start(window) for row in self._rows])
            self._places[window] = Places(self._depths - starts, window)
        return self._places[window]

    def common(self, row: int) -> Common | None:
        return self._rows[row].common

    def own(self, row: int, depth: int, window: int | None) -> int:
        """Columns that a row has filled of its own when it has read `depth` tokens."""
        return depth - self._rows[row].start(window)

    @property
    def groups(self) -> list[tuple[Common, Picked]]:
        """What is common to rows, and to which; None for all of them."""
        if self._groups is None:
            members: dict[int, tuple[Common, list[int]]] = {}
            for index, row in enumerate(self._rows):
                if row.common is not None:
                    members.setdefault(id(row.common.cache), (row.common, []))[1].append(index)
            self._groups = [(common, self._picked(rows)) for common, rows in members.values()]
        return self._groups

    def _picked(self, rows: list[int]) -> Picked:
        """Rows by the quickest index: those side by side need no copy."""
        if len(rows) == len(self._rows):
            return None
        return slice(rows[0], rows[-1] + 1) if rows[-1] - rows[0] == len(rows) - 1 else torch.tensor(rows)

    def _change(self, rows):
        self._rows, self._groups, self._places = rows, None, {}


class RowLayer(DynamicLayer):
    """Keys and values (rows, heads, columns, width); the live rows are [0, count)."""

    def __init__(self, source: DynamicLayer, index: int, columns: Columns):
        """Without rows yet; the layer of this index in sources that join."""
        super().__init__()
        self.dtype, self.device, self.is_initialized = source.dtype, source.device, True
        self.window = source.sliding_window if isinstance(source, DynamicSlidingWindowLayer) else None
        self.columns, self.index, self.count = columns, index, 0
        both = (source.keys, source.values)
        self.buffers = [states.new_zeros(0, states.shape[1], 0, states.shape[-1]) for states in both]
        self.given: RowKeys | None = None  # to attention, at the last token
        self._look(0)

    def update(self, key_states, value_states, *args, **kwargs):
        mask, parts = self.write(key_states[:, :, 0], value_states[:, :, 0])
        self.given = RowKeys.of(self.keys, mask, parts)
        return self.given, self.values

    def write(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, list[Part]]:
        """Write a token of each row, (rows, heads, size); gives the mask of what it may look at of its own, which is
        `keys` and `values` of this layer, and the parts that rows look at together."""
        place = self.columns.places(self.window)
        width = visible_width(place.deepest + 1, keys.shape[-1])
        if width != self.keys.shape[-2]:
            self._look(width)
        for held, states in ((self.keys, keys), (self.values, values)):
            if place.level:
                held.select(2, place.deepest).copy_(states)
            else:
                held[place.rows, :, place.own] = states
        return place.mask(width), self._parts(place)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """As of a cache without past: keys bring their mask, so the model need not make one."""
        return query_length, 0

    def join(self, source: DynamicLayer, rows: torch.Tensor, room: int, copied: bool = True) -> None:
        """Add rows that go on from the given ones of a source, with room for so many tokens; copied or in common."""
        length, added = source.keys.shape[-2] if copied else 0, len(rows)
        self._reserve(self.count + added, visible_width(length + room, source.keys.shape[-1]))
        for buffer, states in zip(self.buffers, (source.keys, source.values), strict=True):
            if copied:
                buffer[self.count : self.count + added, :, :length] = states if len(states) == 1 else states[rows]
        self.count += added
        self._look(max(length, self.keys.shape[-2]))

    def take(self, rows: torch.Tensor, depth: int) -> DynamicLayer:
        """A source of these rows, which have read as many tokens and have the same in common."""
        own = self.columns.own(int(rows[0]), depth, self.window)
        if self.window is None or self.columns.common(int(rows[0])) is not None:
            return plain_layer(self, *(buffer[rows, :, :own] for buffer in self.buffers))
        first = max(0, own + 1 - self.window)
        layer = DynamicSlidingWindowLayer(self.window)
        layer.cumulative_length = depth
        return _filled(layer, self, *(buffer[rows, :, first:own] for buffer in self.buffers))

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

    def _parts(self, place) -> list[Part]:
        """What rows look at together."""
        found = []
        for common, rows in self.columns.groups:
            layer = common.cache.layers[self.index]
            if self.window is None:
                found.append(Part(rows, layer.keys, layer.values))
                continue
            members = place.rows if rows is None else place.rows[rows]
            own, held = place.own[members], layer.keys.shape[-2]
            for depth in own.unique().tolist():  # rows at one position have the same window
                first = max(0, held + depth + 1 - self.window)
                if first < held:
                    alike = rows if place.level else members[own == depth]
                    found.append(Part(alike, layer.keys[:, :, first:], layer.values[:, :, first:]))
        return found

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
    return _filled(DynamicLayer(), like, keys, values)


def _filled(layer, like, keys, values):
    layer.dtype, layer.device, layer.is_initialized = like.dtype, like.device, True
    layer.keys, layer.values = keys, values
    return layer
