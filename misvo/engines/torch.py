"""The engine on transformers: continuous batching of rollouts in one process.

A turn reads like the loop that it is: admit waiting rows, draw a token for every row, let ended rows leave, run the
body on the rest. Prompts are read once, when their first request comes, and kept until they are forgotten.
"""

import time
import warnings
from collections import deque
from dataclasses import dataclass
from itertools import groupby

import torch

from misvo.engine import Engine, Ticket
from misvo.engines.batch import Batch, Source
from misvo.engines.stems import Stem, Stems
from misvo.errors import MisvoError
from misvo.footprint import FP32, MOST_ROWS
from misvo.law_step import Group, Job, LawStep
from misvo.model import Model, Prefix, free_memory
from misvo.rollouts import Request, Rollouts

NUMBERS = 5  # of each token that are always kept: itself, its KL, two log-probabilities


@dataclass(frozen=True)
class _Waiting:
    """Rows that are to join the batch, and the stem that each goes on from, where there is one."""

    group: Group
    stems: list[Stem | None]

    def split(self, size: int) -> list["_Waiting"]:
        group = self.group
        return [
            _Waiting(Group(group.job, rows, group.position), self.stems[start : start + size])
            for start, rows in zip(range(0, len(group.rows), size), group.rows.split(size), strict=True)
        ]


class TorchEngine(Engine):
    """Decodes requests on a model, at most `max_rows` rows at a time."""

    def __init__(self, model: Model, max_rows: int = MOST_ROWS):
        self.model, self.head, self.max_rows = model, model.head, max_rows
        self._steps, self._batch = LawStep(model.head), Batch(model)
        self._waiting: deque[_Waiting] = deque()
        self._jobs: dict[Ticket, Job] = {}
        self._prefixes: dict[tuple[int, ...], Prefix] = {}
        self._stems = Stems()
        self._finished: list[Ticket] = []  # that nobody was told of yet
        self._submitted = 0
        self.drawn = 0  # tokens, of all requests so far

    @property
    def in_flight(self) -> int:
        """Rows that are in the batch."""
        return len(self._batch)

    def submit(self, request: Request) -> Ticket:
        if request.adapter is not None:
            raise MisvoError("this engine decodes the model as it is: requests with an adapter go to AdaptingEngine.")
        self._check_memory(request)
        seconds = self._read(request)
        job = self._steps.open(request)
        job.rollouts.prefill_seconds = seconds
        self._submitted += 1
        self._jobs[self._submitted] = job
        self._wait_for(job, self._stems.take(request))
        return self._submitted

    @property
    def busy(self) -> bool:
        return bool(self._batch.groups or self._waiting)

    def room(self, request: Request) -> bool:
        return self.load == 0 or self.load + len(self._stems) + len(request.rollouts) <= self.max_rows

    @property
    def load(self) -> int:
        """Rows that decode or wait to."""
        return len(self._batch) + sum(len(waiting.group.rows) for waiting in self._waiting)

    def cancel(self, ticket: Ticket) -> None:
        job = self._jobs.pop(ticket, None)
        if job is None:
            return
        self._waiting = deque(waiting for waiting in self._waiting if waiting.group.job is not job)
        self._steps.flush()  # other jobs' distributions may wait beside those of this one
        self._batch.remove(job)

    def written(self, ticket: Ticket) -> list[list[int]] | None:
        job = self._jobs.get(ticket)
        return None if job is None else job.rollouts.responses()

    def forget(self, prompt: tuple[int, ...]) -> None:
        self._prefixes.pop(prompt, None)
        self._stems.forget(prompt)

    def close(self) -> None:
        self._waiting.clear()
        self._jobs.clear()
        self._prefixes.clear()
        self._stems.clear()
        self._batch = Batch(self.model)
        self._steps.forget()

    def advance(self) -> list[tuple[Ticket, Rollouts]]:
        """One token for every row in flight; gives the requests that this token finished.

        Where memory runs out, the requests in flight begin again with half as many rows at a time.
        """
        started, exhausted = time.perf_counter(), None
        groups: list[Group] = []
        try:
            groups = self._turn()
        except RuntimeError as error:  # what is bound in its frames is let go when this block ends
            if not _out_of_memory(error):
                raise
            exhausted = str(error)
        if exhausted is not None:
            self._begin_again(exhausted)
        elapsed, rows = time.perf_counter() - started, sum(len(group.rows) for group in groups)
        for group in groups:
            group.job.rollouts.seconds += elapsed * len(group.rows) / rows
        finished, self._finished = self._finished, []
        return [(ticket, self._jobs.pop(ticket).rollouts) for ticket in finished if ticket in self._jobs]

    @torch.no_grad()
    def _turn(self) -> list[Group]:
        """One token for every row; gives the groups that took part."""
        self._admit()
        batch, groups = self._batch, self._batch.groups
        if not groups:
            return []
        tokens = self._steps.draw(groups, batch.hidden)
        self.drawn += len(tokens)
        ended, pausing = batch.ends(tokens)
        start = 0
        for group in groups:
            group.job.unfinished -= int(ended[start : start + len(group.rows)].sum())
            start += len(group.rows)
        complete = [ticket for ticket, job in self._jobs.items() if job.unfinished == 0]
        if complete:
            self._steps.flush()  # before they are told to be finished: where memory runs out here, they begin again
        self._finished += complete  # and before the body runs: where memory runs out there, these are done
        stays = pausing | ~ended  # who goes on some time reads the last token too
        batch.leave(~stays)
        if batch.groups:
            batch.step(tokens[stays])
            for group, prefix in batch.pause():
                rows = group.job.rollouts.tokens[group.rows, : group.position].tolist()
                self._stems.keep(group.job.request, [tuple(row) for row in rows], prefix)
        elif not self._waiting:  # all requests are complete, so no distribution waits for its product either
            self._steps.forget()
        return groups

    def _check_memory(self, request):
        """Refuse what could never be held: a few numbers for every token, and the states that are to be kept."""
        rows, length, keep = len(request.rollouts), request.max_new_tokens, request.keep
        states = (keep.scores + (keep.fisher is not None) + keep.hidden) * self.head.hidden_size
        if rows * length * (NUMBERS + states) * FP32 > free_memory(self.head.device) // 2:
            raise MisvoError(
                f"there is not enough memory for {rows} responses of {length} tokens: take fewer or shorter ones."
            )

    def _admit(self):
        """Move waiting groups into the batch while there is room for them whole."""
        while self._waiting:
            waiting = self._waiting[0]
            if self._batch.groups and len(self._batch) + len(waiting.group.rows) > self.max_rows:
                return
            self._batch.join(waiting.group, self._sources(waiting))
            self._waiting.popleft()  # last, so that a group for which there was no memory still waits

    def _wait_for(self, job, stems):
        """Queue the rows of a job: those at one position together, and side by side what goes on from one source."""
        lengths = [len(job.request.beginning(row)) for row in range(len(stems))]
        prefixes = [None if stem is None else id(stem.prefix) for stem in stems]
        order = sorted(range(len(stems)), key=lambda row: (lengths[row], prefixes.index(prefixes[row]), row))
        for position, rows in groupby(order, key=lambda row: lengths[row]):
            alike = list(rows)
            whole = _Waiting(Group(job, torch.tensor(alike), position), [stems[row] for row in alike])
            self._waiting.extend(whole.split(self.max_rows))

    def _sources(self, waiting) -> list[Source]:
        """What the rows of a group go on from; what was not kept is read."""
        group, request, stems = waiting.group, waiting.group.job.request, dict[tuple[int, ...], Stem]()
        prompt = self._prefixes[request.prompt]
        for row, kept in zip(group.rows.tolist(), waiting.stems, strict=True):
            beginning = request.beginning(row)
            if not beginning:
                stems[beginning] = Stem(prompt, 0)
            elif kept is not None:
                stems[beginning] = kept
            elif beginning not in stems:
                stems[beginning] = Stem(self.model.extend(request.prompt, prompt, beginning), 0)
        found = [stems[request.beginning(row)] for row in group.rows.tolist()]
        runs = groupby(found, key=lambda stem: id(stem.prefix))
        parts = [list(part) for _, part in runs]
        return [(part[0].prefix, torch.tensor([stem.row for stem in part])) for part in parts]

    def _read(self, request) -> float:
        """Read a prompt that was not read yet; gives the seconds that it took."""
        if request.prompt in self._prefixes:
            return 0.0
        started = time.perf_counter()
        self._prefixes[request.prompt] = self.model.prefill(request.prompt, request.max_new_tokens)
        return time.perf_counter() - started

    def _begin_again(self, reason):
        """Halve the rows and put every request in flight back to its beginning.

        Random numbers have addresses, so the tokens will be the same.
        """
        rows = len(self._batch) or len(self._waiting[0].group.rows)
        if rows <= 1:
            raise MisvoError(f"there is not enough memory to decode a single row of this prompt ({reason}).")
        self.max_rows = rows // 2
        warnings.warn(f"out of memory with {rows} rows at once: going on with {self.max_rows}.", stacklevel=3)
        flying = [job for job in self._jobs.values() if any(group.job is job for group in self._batch.groups)]
        kept = [waiting for waiting in self._waiting if all(waiting.group.job is not job for job in flying)]
        self._batch = Batch(self.model)
        self._steps.forget()
        self._waiting = deque(part for waiting in kept for part in waiting.split(self.max_rows))
        for job in flying:
            self._steps.begin_again(job)
            self._stems.take(job.request)  # what it kept so far comes about once more
            self._wait_for(job, [None] * len(job.request.rollouts))
        if self.head.device.type == "cuda":
            torch.cuda.empty_cache()


def _out_of_memory(error: RuntimeError) -> bool:
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)
