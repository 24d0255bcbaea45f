"""The law step for rows that somebody else schedules: vLLM asks for tokens, in its own order, and sometimes twice.

A row is asked for by its job, its rollout and how many tokens it has, prompt included. Each token is drawn and recorded
once. Where vLLM threw a token away (preemption, a cache that was reset) and asks again, it hears what it heard before;
where it asks for a token behind a row's end, as asynchronous scheduling does, it hears an end. Knows nothing of vLLM.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from misvo.engines.stops import stopped
from misvo.errors import MisvoError
from misvo.head import Head
from misvo.law_step import Group, Job, LawStep
from misvo.rollouts import Request, Rollouts


@dataclass(frozen=True)
class Ask:
    """A row of vLLM's batch whose next token is wanted."""

    row: int  # of the batch
    job: str
    rollout: int  # index among the job's rollouts
    length: int  # tokens that it has, those of the prompt included


@dataclass
class Counts:
    """What was asked since the last time that somebody looked."""

    steps: int = 0
    drawn: int = 0
    again: int = 0  # tokens that had been drawn before
    late: int = 0  # tokens behind a row's end


@dataclass
class _Open:
    """A job, and what the host knows of its rows without asking the device."""

    job: Job
    drawn: list[int]  # the position that each row stands at
    over: list[bool] = field(default_factory=list)
    error: str | None = None  # why it has no further tokens

    def position(self, ask: Ask) -> int:
        return ask.length - len(self.job.request.prompt)


class LawRows:
    """Open jobs by name; `draw` answers for rows of any of them."""

    def __init__(self, head: Head, ends: tuple[int, ...], decode: Callable[[list[int]], str]):
        self.head, self.ends, self.decode, self.counts = head, ends, decode, Counts()
        self._steps = LawStep(head)
        self._jobs: dict[str, _Open] = {}
        self._end = ends[0] if ends else 0  # what a row hears that is over

    def open(self, name: str, request: Request) -> None:
        begun = [len(request.beginning(row)) for row in range(len(request.rollouts))]
        self._jobs[name] = _Open(self._steps.open(request), begun, [False] * len(begun))

    def cancel(self, name: str) -> None:
        """Forget a job, whatever has become of it."""
        self._steps.flush()  # other jobs' distributions may wait beside those of this one
        self._jobs.pop(name, None)

    def take(self, name: str) -> Job:
        """A job whose rows are all over; it is forgotten here."""
        self._steps.flush()
        opened = self._jobs.pop(name)
        if not self._jobs:
            self._steps.forget()
        if opened.error is not None:
            raise MisvoError(opened.error)
        if opened.job.unfinished:
            raise MisvoError(f"vLLM ended {opened.job.unfinished} rows before they had drawn their last token.")
        return opened.job

    @torch.inference_mode(False)  # in which vLLM calls: a value network needs gradients
    @torch.no_grad()
    def draw(self, hidden: torch.Tensor, asks: list[Ask]) -> torch.Tensor:
        """The next token of every row that is asked for, (n,) on the host, from the states (B, d) of the batch."""
        answers = torch.full((len(asks),), self._end)
        fresh: dict[tuple[str, int], list[int]] = {}  # job and position -> indices into `asks`
        for index, ask in enumerate(asks):
            opened = self._jobs.get(ask.job)
            position = -1 if opened is None else opened.position(ask)
            if opened is None or opened.error is not None:
                self.counts.late += 1
            elif position < opened.drawn[ask.rollout]:
                answers[index] = opened.job.rollouts.tokens[ask.rollout, position]
                self.counts.again += 1
            elif opened.over[ask.rollout]:
                self.counts.late += 1
            elif position > opened.drawn[ask.rollout]:
                self._fail([opened], f"vLLM skipped from position {opened.drawn[ask.rollout]} to {position} of a row.")
            else:
                fresh.setdefault((ask.job, position), []).append(index)
        self.counts.steps += 1
        groups = [
            Group(self._jobs[job].job, torch.tensor([asks[index].rollout for index in members]), position)
            for (job, position), members in fresh.items()
            if self._jobs[job].error is None
        ]
        order = [index for (job, _), members in fresh.items() if self._jobs[job].error is None for index in members]
        if groups:
            try:
                tokens = self._steps.draw(groups, hidden[[asks[index].row for index in order]]).cpu()
            except (MisvoError, RuntimeError) as error:  # not finite, no memory: vLLM itself must live on
                if self.head.split and not isinstance(error, MisvoError):
                    raise  # of this rank alone
                self._steps.forget()
                self._fail([self._jobs[job] for job, _ in fresh], str(error))
                return answers
            answers[order] = tokens
            self._count(groups, [asks[index] for index in order], tokens)
        return answers

    def _count(self, groups: list[Group], asks: list[Ask], tokens: torch.Tensor) -> None:
        """Note which rows have moved on, and which of them have ended."""
        self.counts.drawn += len(asks)
        ends, start = torch.isin(tokens, torch.tensor(self.ends, dtype=torch.long)), 0
        for group in groups:
            count, opened = len(group.rows), self._jobs[asks[start].job]
            own = ends[start : start + count]
            if group.job.request.stop:
                own = own | stopped(group, self.decode)
            group.job.ended(group.rows[own])
            last = group.position + 1 == group.job.request.max_new_tokens
            for rollout, ended in zip(group.rows.tolist(), own.tolist(), strict=True):
                opened.drawn[rollout] = group.position + 1
                opened.over[rollout] = ended or last
                group.job.unfinished -= ended or last
            start += count

    def _fail(self, jobs: list[_Open], error: str) -> None:
        for opened in jobs:
            opened.error = opened.error or error


def light(rollouts: Rollouts, states: bool) -> Rollouts:
    """The part of the records that is sent, on the CPU: without laws (T, V), and with states only if it is said so."""
    bare = replace(rollouts, mean_probs=None, hidden=rollouts.hidden if states else None)
    if rollouts.mean_probs is not None:
        bare.fisher_rows = None  # goes into Fisher products alone, which are made here
    sent: dict[str, Any] = {name: value.cpu() for name, value in vars(bare).items() if isinstance(value, torch.Tensor)}
    return replace(bare, **sent)
