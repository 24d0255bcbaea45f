"""A job: something that a client asked for, its state, and its events, which any number of readers may follow.

The engine's thread reports to a job, and everything that changes it happens in the event loop, so readers need no
lock. `Store` keeps jobs that can be looked up: result and events together, for a time and a number.
"""

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from misvo.candidate import Candidate
from misvo.prompts import Prompt
from misvo.recorder import Recorder
from misvo.result import Result
from misvo.server.config import Config
from misvo.server.errors import ApiError, of
from misvo.settings import Settings
from misvo.steering import Steering
from misvo.story import nats_per_token
from misvo.text_policy import Samples

State = Literal["queued", "in_progress", "completed", "failed", "cancelled"]


@dataclass(frozen=True)
class Work:
    """One prompt to steer, or, without a reward, to sample from."""

    prompt: Prompt
    settings: Settings
    reward: Callable | None = None
    columns: dict = field(default_factory=dict)
    steering: Steering | None = None
    greedy: bool = False
    clip: bool = False  # the client named no length: what does not fit the model's context is left out
    strength: float = 1.0
    record: bool = False  # log-probabilities, and the vectors behind answers
    held_out: Callable | None = None  # scores the responses too, and is not optimised
    live: bool = False  # the text of samples is told while it is being written


@dataclass
class Part:
    """What came of a work."""

    work: Work
    settings: Settings  # as they were carried out
    prompt_tokens: int
    recorder: Recorder | None
    result: Result | Samples | None = None  # that of a run grows while it goes on
    best: Candidate | None = None  # once it is over
    story: list[str] = field(default_factory=list)  # what happened, in sentences; once it is over
    fluency: dict[tuple[int, int], float | None] = field(default_factory=dict)  # by step and rollout, once asked for


class Job:
    def __init__(self, kind: str, works: list[Work], tokens: int, owner: str = "", about: dict | None = None):
        self.id = f"{kind}-{secrets.token_hex(16)}"
        self.works, self.tokens, self.owner, self.about = works, tokens, owner, about or {}
        self.created, self.started, self.ended = time.time(), 0.0, 0.0
        self.state: State = "queued"
        self.parts: list[Part] = []
        self.error: ApiError | None = None
        self.events: list[dict] = []
        self.at_end: list[Callable[[], None]] = []
        self._loop = asyncio.get_running_loop()
        self._changed = asyncio.Event()
        self._accepted = False

    @classmethod
    def finished_before(cls, id: str, part: Part, ended: float, about: dict) -> "Job":
        """A run that another process has done: its rows as events, as if they had been followed here."""
        job = cls("run", [part.work], 0, about=about)
        assert isinstance(part.result, Result)
        rows = [measured(row, part.settings.rollouts) for row in part.result.trace]
        seconds = sum(sum(row["seconds"].values()) for row in rows)
        job.id, job.parts, job.state, job._accepted = id, [part], "completed", True
        job.created = job.started = ended - seconds
        job.ended = ended
        steps = [{"type": "step", "prompt": 0, "row": row, "seconds_left": 0.0} for row in rows]
        job.events = [{"type": "started"}, *steps, {"type": "completed"}]
        return job

    @property
    def over(self) -> bool:
        return self.state in ("completed", "failed", "cancelled")

    @property
    def seconds(self) -> float:
        return (self.ended or time.time()) - self.created

    # From the engine's thread.

    def report(self, change: Callable[..., None], *said: Any) -> None:
        try:
            self._loop.call_soon_threadsafe(change, *said)
        except RuntimeError:  # the loop has ended: nobody listens any more
            for last in self.at_end:
                last()

    # In the event loop.

    def accept(self, parts: list[Part]) -> None:
        self.parts, self._accepted = parts, True
        self._tell()

    def begin(self) -> None:
        if self.state == "queued":
            self.state, self.started = "in_progress", time.time()
            self._tell({"type": "started"})

    def step(self, index: int, row: dict) -> None:
        row = measured(row, self.parts[index].settings.rollouts)
        self._tell({"type": "step", "prompt": index, "row": row, "seconds_left": self._left(row, index)})

    def write(self, index: int, sample: int, text: str) -> None:
        self._tell({"type": "text", "prompt": index, "sample": sample, "text": text})

    def complete(self) -> None:
        self._end("completed")

    def fail(self, error: BaseException) -> None:
        self.error = of(error)
        self._end("failed")

    def cancel(self) -> None:
        self._end("cancelled")

    def _end(self, state: State) -> None:
        if self.over:
            return
        self.state, self.ended, self._accepted = state, time.time(), True
        self._tell({"type": state})
        for last in self.at_end:
            last()

    def _left(self, row, index) -> float | None:
        steps = self.parts[index].settings.steps
        done = row["step"] + 1
        return (time.time() - self.started) * (steps - done) / done

    def _tell(self, event: dict | None = None) -> None:
        if event is not None:
            self.events.append(event)
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def accepted(self) -> None:
        """Until the engine's thread has looked at it; raises what it found wrong."""
        while not self._accepted:
            await self._changed.wait()
        if self.error is not None:
            raise self.error

    async def finished(self) -> None:
        while not self.over:
            await self._changed.wait()

    async def follow(self, start: int = 0) -> AsyncIterator[tuple[int, dict]]:
        """Events from a number on, as they come, until the job is over."""
        while True:
            while start < len(self.events):
                yield start, self.events[start]
                start += 1
            if self.over:
                return
            await self._changed.wait()


def measured(row: dict, rollouts: int) -> dict:
    """A trace row with its KL, and the budget where there is one, by token."""
    if "tokens" not in row:
        return row
    row = {**row, "kl_per_token": nats_per_token(row, rollouts)}
    if row.get("kl_budget") is not None:
        row["kl_budget_per_token"] = nats_per_token({**row, "kl": row["kl_budget"]}, rollouts)
    return row


class Store:
    """Jobs by their ids. The oldest that are over go first; those under way, and those of the operator, always stay."""

    def __init__(self, config: Config):
        self.config = config
        self._jobs: dict[str, Job] = {}
        self._shown: dict[str, Job] = {}  # the operator's, for everybody to see

    def __len__(self) -> int:
        return len(self._jobs)

    def keep(self, job: Job) -> None:
        self._jobs[job.id] = job
        self.tidy()

    def show(self, job: Job) -> None:
        self._shown[job.id] = job

    def get(self, id: str, owner: str, kind: str) -> Job:
        self.tidy()
        if id in self._shown and id.startswith(f"{kind}-"):
            return self._shown[id]
        job = self._jobs.get(id)
        if job is None or job.owner != owner or not id.startswith(f"{kind}-"):
            raise ApiError(404, "there is nothing by this id, or no longer.", code="not_found")
        return job

    def of(self, owner: str, kind: str) -> list[Job]:
        """The newest first."""
        self.tidy()
        own = [job for job in reversed(self._jobs.values()) if job.owner == owner]
        return [job for job in (*own, *self._shown.values()) if job.id.startswith(f"{kind}-")]

    def drop(self, job: Job) -> None:
        if job.id in self._shown:
            raise ApiError(409, "the operator of this server shows this run: it stays.", code="shown")
        self._jobs.pop(job.id, None)

    def tidy(self) -> None:
        config, now = self.config, time.time()
        over = [job for job in self._jobs.values() if job.over]
        count, tokens = len(over), sum(job.tokens for job in over)
        for job in over:
            if count <= config.keep_runs and tokens <= config.keep_tokens and now - job.ended <= config.keep_seconds:
                continue
            del self._jobs[job.id]
            count, tokens = count - 1, tokens - job.tokens
