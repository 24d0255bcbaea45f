"""The one thread that touches the model: it steps a session, takes orders from an inbox and reports to jobs.

Between two steps it empties the inbox, so a job that is cancelled loses its rows within one decoding step. An error
that no single run can be blamed for ends all that are running, and the session begins anew; where that happens again
and again without a step in between, the thread ends, and /health says so.
"""

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

from misvo.errors import MisvoError
from misvo.freed import give_back
from misvo.policy import Policy
from misvo.recorder import Recorder
from misvo.result import Result
from misvo.server.errors import ApiError
from misvo.server.jobs import Job, Part, Work
from misvo.server.live import Live
from misvo.server.rooms import Rooms
from misvo.session import Handle, Session
from misvo.story import story

log = logging.getLogger("misvo-server")
RESTARTS = 3  # in a row, without a step that went well
WINDOW = 2.0  # seconds over which tokens per second are counted
IDLE = 5.0  # seconds without work after which freed memory goes back to the machine
GONE = ApiError(503, "the engine of this server has stopped.", code="engine_stopped", retry=True)
ANEW = ApiError(503, "the engine of this server had to begin anew: try again.", code="engine_restarted", retry=True)


@dataclass
class Tally:
    """What the thread has done so far; others only read it."""

    tokens: int = 0
    rows: int = 0  # in flight
    tokens_per_second: float = 0.0
    steps: int = 0
    kl: float = 0.0  # nats of all steps' mean responses
    reward_seconds: float = 0.0
    restarts: int = 0


class EngineThread:
    def __init__(self, policy: Policy, max_rows: int | None, prompt_tokens: int):
        self.policy, self.rooms, self.prompt_tokens = policy, Rooms(policy, max_rows), prompt_tokens
        self.tally = Tally()
        self._lock = threading.Lock()
        self._inbox: list[Callable[[], None]] = []
        self._wake: Future = Future()
        self._jobs: dict[Handle, tuple[Job, int]] = {}
        self._handles: dict[Job, list[Handle]] = {}
        self._live: dict[Handle, Live] = {}
        self._stopping = False
        self._session, self._rows = self._new_session(), self.rooms.most
        self._failures = 0
        self._mark = (time.monotonic(), 0)  # where the window of tokens per second began
        self._thread = threading.Thread(target=self._run, name="misvo-engine", daemon=True)

    # From any thread.

    def start(self) -> None:
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def submit(self, job: Job) -> None:
        self._post(lambda: self._add(job))

    def cancel(self, job: Job) -> None:
        self._post(lambda: self._cancel(job))

    def call(self, function: Callable[[], Any]) -> Future:
        """Do something with the model between two steps."""
        future: Future = Future()

        def command():
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(function())
                except Exception as error:
                    future.set_exception(error)

        self._post(command)
        return future

    def stop(self, patience: float = 5.0) -> None:
        """End the thread: what is left is told that the engine is gone."""

        def command():
            self._stopping = True

        self._post(command)
        if self._thread.is_alive():
            self._thread.join(patience)

    def _post(self, command) -> None:
        with self._lock:
            self._inbox.append(command)
            if not self._wake.done():
                self._wake.set_result(None)

    # In the thread.

    def _run(self) -> None:
        try:
            while not self._stopping:
                if not self._session.busy:
                    self._measure()
                    self._rest()
                for command in self._commands():
                    command()
                if self._session.busy and not self._stopping:
                    self._step()
        except BaseException:
            log.exception("the engine's thread has died")
            raise
        finally:
            for job in list(self._handles):
                job.report(job.fail, GONE)
            self._session.close(wait=False)

    def _rest(self) -> None:
        """Wait for work; after a while without any, what was freed goes back to the machine."""
        try:
            self._wake.result(IDLE)
        except TimeoutError:
            give_back()
            self._wake.result()

    def _commands(self) -> list[Callable[[], None]]:
        with self._lock:
            commands, self._inbox, self._wake = self._inbox, [], Future()
        return commands

    def _new_session(self) -> Session:
        return Session(self.policy, self.policy.engine(self.rooms.most), background=True)

    def _make_room(self) -> None:
        """Rows for the prompts that are open now; to be called whenever one has come or gone."""
        engine = self._session.engine
        if engine.max_rows < self._rows:  # memory ran out, and the engine has halved them
            self.rooms.ran_out(engine.max_rows)
        self._rows = self.rooms.rows(handle.run for handle in self._jobs)
        engine.limit(self._rows)

    def _step(self) -> None:
        drawn = self._session.engine.drawn
        try:
            events = self._session.step(self._wake)
        except Exception as error:
            self._begin_anew(error)
            return
        self._failures = 0
        self.tally.tokens += self._session.engine.drawn - drawn
        for event in events:
            self._tell(event.handle, event.row)
        for job, handles in self._handles.items():
            if job.state == "queued" and any(handle.state != "waiting" for handle in handles):
                job.report(job.begin)
        self._tell_live()
        self._measure()

    def _tell_live(self) -> None:
        """What has been written of samples by now."""
        for handle, live in self._live.items():
            if live.due() and (rows := self._session.written(handle)) is not None:
                job, index = self._jobs[handle]
                for sample, text in live.pieces(rows):
                    job.report(job.write, index, sample, text)

    def _add(self, job: Job) -> None:
        handles: list[Handle] = []
        parts = []
        try:
            for work in job.works:
                part, handle = self._begin(work)
                parts.append(part)
                handles.append(handle)
        except Exception as error:
            for handle in handles:
                self._session.cancel(handle)
            if not isinstance(error, MisvoError | ApiError):
                log.exception("a request could not be begun")
            job.report(job.fail, error)
            return
        self._handles[job] = handles
        self._jobs |= {handle: (job, index) for index, handle in enumerate(handles)}
        for work, handle in zip(job.works, handles, strict=True):
            if work.live:
                tidied = bool(getattr(self.policy.tokenizer, "clean_up_tokenization_spaces", False))
                self._live[handle] = Live(self.policy.decode, handle.run.settings.stop or (), tidied)
        self._make_room()
        job.report(job.accept, parts)

    def _begin(self, work: Work) -> tuple[Part, Handle]:
        settings = work.settings
        tokens = len(self.policy.encode(work.prompt, raw=settings.raw))
        if tokens > self.prompt_tokens:
            raise ApiError(
                400,
                f"the prompt has {tokens} tokens: the limit of this server is {self.prompt_tokens}.",
                code="prompt_too_long",
            )
        room = (self.policy.context_length or settings.max_new_tokens + tokens) - tokens
        if work.clip and 0 < room < settings.max_new_tokens:
            settings = replace(settings, max_new_tokens=room)
        if work.reward is None:
            steering = None if work.steering is None else work.strength * work.steering
            handle = self._session.draw(work.prompt, settings, steering, work.greedy)
            recorder = None
        else:
            recorder = Recorder() if work.record else None
            handle = self._session.add(work.prompt, work.reward, settings, work.columns, recorder, work.held_out)
        return Part(work, handle.run.settings, tokens, recorder, handle.result), handle

    def _cancel(self, job: Job) -> None:
        if job not in self._handles:
            return
        handles = self._forget(job)
        for handle in handles:
            self._session.cancel(handle)
            handle.run.settle()
        self._measure()
        self._hand_over(job, handles)
        job.report(job.cancel)

    def _tell(self, handle: Handle, row: dict | None) -> None:
        if handle not in self._jobs:
            return
        job, index = self._jobs[handle]
        if row is not None:
            self.tally.steps += 1
            self.tally.kl += row["kl"]
            self.tally.reward_seconds += row["seconds"]["reward"]
            job.report(job.begin)
            job.report(job.step, index, dict(row))
        elif handle.state == "failed":
            self._fail(job, handle.error)
        elif all(other.ended for other in self._handles[job]):
            handles = self._forget(job)
            self._hand_over(job, handles)
            job.report(job.complete)

    def _fail(self, job: Job, error) -> None:
        handles = self._forget(job)
        for handle in handles:
            self._session.cancel(handle)
        self._hand_over(job, handles)
        job.report(job.fail, error)

    def _forget(self, job: Job) -> list[Handle]:
        handles = self._handles.pop(job)
        for handle in handles:
            self._jobs.pop(handle, None)
            self._live.pop(handle, None)
        self._make_room()
        return handles

    @staticmethod
    def _hand_over(job: Job, handles: list[Handle]) -> None:
        """Results, the best of their responses, their story: that looks at all of them, so not in the event loop."""
        found = []
        for handle in handles:
            result = handle.result
            scored = isinstance(result, Result) and any(one.reward is not None for one in result.candidates)
            found.append((result, *((result.best, story(result)) if scored else (None, []))))

        def change() -> None:
            for part, (result, best, told) in zip(job.parts, found, strict=True):
                part.result, part.best, part.story = result, best, told

        job.report(change)

    def _begin_anew(self, error: Exception) -> None:
        """Tell all that are running, and start with an empty session."""
        self._failures += 1
        self.tally.restarts += 1
        log.error("the session has failed with %s and begins anew", type(error).__name__, exc_info=error)
        for job in list(self._handles):
            self._forget(job)
            job.report(job.fail, ANEW)
        self._session.close(wait=False)
        if self._failures > RESTARTS:
            raise error
        self._session, self._rows = self._new_session(), self.rooms.most

    def _measure(self) -> None:
        self.tally.rows = self._session.engine.in_flight
        now, (began, tokens) = time.monotonic(), self._mark
        if now - began >= WINDOW:
            self.tally.tokens_per_second = (self.tally.tokens - tokens) / (now - began)
            self._mark = (now, self.tally.tokens)
