"""The rows in flight: their cache, their states, and where each of them stands."""

from dataclasses import dataclass

import torch
from transformers.cache_utils import Cache

from misvo import cache as kv
from misvo.engines.stops import stopped
from misvo.law_step import Group, Job
from misvo.model import Model, Prefix
from misvo.row_layer import TOGETHER, Common

Source = tuple[Prefix, torch.Tensor]  # what was read, and which rows of it


@dataclass
class _Rows:
    """What is kept of the rows, in their order."""

    cache: Cache
    depths: torch.Tensor  # (B,) tokens that each row has read
    hidden: torch.Tensor  # (B, d), the states that the next tokens are drawn from


class Batch:
    """Groups of rows that take a token each at every turn; groups join as a whole, and rows leave as they end."""

    def __init__(self, model: Model):
        self.model = model
        self.groups: list[Group] = []
        self._live: _Rows | None = None

    def __len__(self) -> int:
        return sum(len(group.rows) for group in self.groups)

    @property
    def _rows(self) -> _Rows:
        assert self._live is not None  # there are groups
        return self._live

    @property
    def hidden(self) -> torch.Tensor:
        return self._rows.hidden

    def join(self, group: Group, sources: list[Source]) -> None:
        """Add the rows of a group, which go on from rows that have been read: those of `sources`, one after another."""
        request = group.job.request
        room = request.max_new_tokens - group.position
        for prefix, rows in sources:
            hidden, depths = prefix.hidden[rows.to(prefix.hidden.device)], torch.full((len(rows),), prefix.length)
            common = prefix.common
            if group.position == 0 and len(request.rollouts) >= TOGETHER:  # by the request: a row limit changes nothing
                common = Common(prefix.cache, prefix.length)
            if self._live is None:
                self._live = _Rows(self.model.replicate(prefix, rows, room, common), depths, hidden)
            else:
                live = self._live
                kv.join(live.cache, prefix.cache, rows, room, common, prefix.length)
                live.hidden, live.depths = torch.cat([live.hidden, hidden]), torch.cat([live.depths, depths])
        self.groups = [*self.groups, group]  # last, so that a group for which there was no memory has not joined

    def ends(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Which rows have drawn their last token, and which of these will go on some time; (B,) bool on the host.

        The loop's one synchronisation.
        """
        ends, last, start = torch.isin(tokens, self.model.eos_tokens.to(tokens.device)).cpu(), [], 0
        pausing = []
        for group in self.groups:
            own = ends[start : start + len(group.rows)]  # a view: what is found here counts there
            if group.job.request.stop:
                own |= stopped(group, self.model.decode)
            group.job.ended(group.rows[own])
            last.append(torch.full((len(group.rows),), group.position + 1 == group.job.request.max_new_tokens))
            pausing.append(last[-1] & ~own if group.job.request.resumable else torch.zeros_like(own))
            start += len(group.rows)
        return ends | torch.cat(last), torch.cat(pausing)

    def leave(self, ended: torch.Tensor) -> None:
        """Let rows (B,) bool that have drawn their last token leave; the others move on by one position."""
        self._keep(~ended, moved=1)

    def pause(self) -> list[tuple[Group, Prefix]]:
        """Take rows out that stand at the end of their request, to go on some time, and what was read of them."""
        paused, start, live = [], 0, self._rows
        stays = torch.ones(len(self), dtype=torch.bool)
        for group in self.groups:
            rows = torch.arange(start, start + len(group.rows))
            start += len(group.rows)
            if group.position == group.job.request.max_new_tokens:
                depth, commons = int(live.depths[rows[0]]), [kv.common_of(live.cache, row) for row in rows.tolist()]
                for common in dict.fromkeys(commons):  # of rows that were read anew, there is none
                    alike = torch.tensor([other == common for other in commons])
                    some, hidden = rows[alike], live.hidden[rows[alike].to(live.hidden.device)]
                    prefix = Prefix(depth, kv.take(live.cache, some, depth), hidden, common)
                    paused.append((Group(group.job, group.rows[alike], group.position), prefix))
                stays[rows] = False
        if paused:
            self._keep(stays, moved=0)
        return paused

    def remove(self, job: Job) -> None:
        """Take all rows of a job out, between two turns."""
        if self.groups:
            others = [torch.full((len(group.rows),), group.job is not job) for group in self.groups]
            self._keep(torch.cat(others), moved=0)

    def step(self, tokens: torch.Tensor) -> None:
        """Run the body on the last token of every row."""
        rows = self._rows
        rows.hidden = self.model.body_step(tokens, rows.cache, rows.depths)
        rows.depths = rows.depths + 1

    def _keep(self, stays, moved):
        groups, start = [], 0
        for group in self.groups:
            own = stays[start : start + len(group.rows)]
            start += len(group.rows)
            if own.any():
                groups.append(Group(group.job, group.rows[own], group.position + moved))
        self.groups, rows = groups, self._rows
        if not groups:
            self._live = None
        elif not stays.all():
            keep = torch.nonzero(stays).squeeze(-1)
            kv.select(rows.cache, keep)
            columns, rows.depths = int(rows.depths.max()), rows.depths[keep]
            rows.hidden = rows.hidden[keep.to(rows.hidden.device)]
            if spare := columns - int(rows.depths.max()):
                kv.trim(rows.cache, spare)
