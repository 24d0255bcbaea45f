"""A reward of the operator's with a limit of time: one that hangs ends the runs that wait for it, and nobody else's.

Each registered reward has a thread of its own that works off its calls one by one, so that a reward is never called
twice at the same time, whichever requests ask for it. A thread cannot be stopped from outside: one that hangs is left
behind, and another takes its place; after a few of those the reward is refused at once until one comes back.
"""

import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any

from misvo.errors import RewardError
from misvo.rewards.contract import Reward, adapt, evaluate
from misvo.server.errors import began_with, root

log = logging.getLogger("misvo-server")
MOST_STUCK = 3


class Line:
    """Calls in the order in which they come, in a thread that a process does not wait for."""

    def __init__(self, name: str):
        self.name, self.stuck, self.closing = name, 0, Future[None]()
        self._lock = threading.RLock()  # a future that is done calls back at once
        self._calls: queue.SimpleQueue | None = None

    def close(self) -> None:
        """Nobody waits any longer."""
        with self._lock:
            if not self.closing.done():
                self.closing.set_result(None)
            if self._calls is not None:
                self._calls.put(None)

    def ask(self, function: Callable[[], Any], seconds: float) -> Any:
        """What a function gives; RewardError where that takes longer than so many seconds."""
        future: Future = Future()
        with self._lock:
            if self.stuck >= MOST_STUCK:
                raise RewardError(f"the reward {self.name!r} hangs: it has not answered {self.stuck} earlier calls.")
            calls = self._calls
            if calls is None:
                calls = self._calls = queue.SimpleQueue()
                threading.Thread(target=self._work, args=(calls,), name="misvo-line", daemon=True).start()
            calls.put((function, future))
        wait([future, self.closing], timeout=seconds, return_when=FIRST_COMPLETED)
        if not future.done() and not future.cancel():  # it is being called, and hangs
            self._leave_behind(calls, future)
        elif not future.cancelled():
            return future.result()
        raise RewardError(f"the reward {self.name!r} took longer than {seconds:g} seconds.")

    def _leave_behind(self, calls: queue.SimpleQueue, future: Future) -> None:
        """The thread hangs: the next call starts another one, and this one ends should it ever come back."""
        with self._lock:
            if self._calls is calls:
                self._calls = None
                self.stuck += 1
                future.add_done_callback(self._back)
                calls.put(None)

    def _back(self, _) -> None:
        with self._lock:
            self.stuck -= 1

    def _work(self, calls) -> None:
        while (call := calls.get()) is not None:
            function, future = call
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(function())
            except BaseException as error:  # SystemExit of a reward too: it is for whoever asked
                future.set_exception(error)
            del call, function, future


class Guarded:
    """A reward on a line of its own."""

    def __init__(self, reward: Reward, line: Line, seconds: float):
        self.reward, self.line, self.seconds = adapt(reward), line, seconds
        self.scores_prefixes = getattr(self.reward, "scores_prefixes", False)

    def fresh(self) -> "Guarded":
        """For a run of its own: a reward that learns as it goes begins anew."""
        return Guarded(self.reward, self.line, self.seconds)

    def __call__(self, prompts, completions, log_metric=None, log_extra=None, **columns):
        return self.line.ask(lambda: self._evaluate(prompts, completions, columns), self.seconds)

    def _evaluate(self, prompts, completions, columns):
        """What goes wrong inside is told without its words, which may hold secrets; they go to the log."""
        try:
            return evaluate(self.reward, prompts, completions, **columns)
        except RewardError as error:
            log.warning("the reward %r has failed", self.line.name, exc_info=root(error))
            raise RewardError(f"the reward {self.line.name!r} failed{began_with(error)}.") from error
