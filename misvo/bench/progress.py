"""Live progress of a sweep, with an estimate of the time left that rests on what was measured.

A cell that has run predicts itself. One that has not is predicted from the seconds per token budget of its nearest
kin: same model and method, then same model, then any. Before anything was measured there is no estimate, and the bar
says so. Seconds are those of one worker; several share what is left.
"""

import sys
import time

from rich.console import Console
from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as Bar

from misvo.bench.plan import Chunk
from misvo.progress import clock


class Estimator:
    """Seconds left for chunks that were not done yet."""

    def __init__(self):
        self._measured = {}  # kinship -> (budget, seconds)

    def record(self, chunk: Chunk, seconds: float) -> None:
        for kin in _kinships(chunk):
            budget, total = self._measured.get(kin, (0, 0.0))
            self._measured[kin] = (budget + chunk.budget, total + seconds)

    def seconds(self, chunk: Chunk) -> float | None:
        for kin in _kinships(chunk):
            if kin in self._measured:
                budget, total = self._measured[kin]
                return total / budget * chunk.budget
        return None

    def left(self, chunks: list[Chunk], workers: int = 1) -> float | None:
        predictions = [self.seconds(chunk) for chunk in chunks]
        return None if None in predictions else sum(predictions) / workers


def _kinships(chunk):
    model, task, method = chunk.cell.model.label, chunk.cell.task.label, chunk.cell.method.label
    return (model, task, method), (model, None, method), (model, None, None), (None, None, None)


class SweepProgress:
    """A bar for the whole sweep on a terminal, a line per chunk in a log."""

    def __init__(self, chunks: list[Chunk], finished: int, workers: int = 1):
        self.pending, self.workers, self.estimator = list(chunks), workers, Estimator()
        total = finished + sum(len(chunk.rows) for chunk in chunks)
        columns = [
            BarColumn(),
            TextColumn("{task.completed:.0f}/{task.total} prompts"),
            TextColumn("{task.fields[state]}"),
        ]
        self.console = Console(stderr=True, highlight=False)
        self.bar = Bar(*columns, console=self.console, transient=True)
        self.task = self.bar.add_task("", total=total, completed=finished, state="")
        self.started, self.finished, self.errors = time.perf_counter(), finished, 0
        self._steps = 0  # steps that the chunk under way has behind it

    def __enter__(self):
        self.bar.start()
        return self

    def __exit__(self, *_):
        self.bar.stop()

    def step(self, chunk: Chunk, row: dict) -> None:
        """A step of the chunk under way is done (in this process; workers elsewhere report whole chunks)."""
        self._steps += 1
        share = min(1.0, self._steps / (chunk.cell.settings.steps * len(chunk.rows)))
        state = f"{_where(chunk)} mean {row['mean']:.3f} best {row['best']:.3f}"
        self.bar.update(
            self.task,
            completed=self.finished + share * len(chunk.rows),
            state=f"{state} · {self.time_left(chunk, share)}",
        )

    def chunk_done(self, chunk: Chunk, outcomes: list, seconds: float) -> None:
        self._steps = 0
        self.pending.remove(chunk)
        self.finished += len(chunk.rows)
        failed = [outcome for outcome in outcomes if "error" in outcome.row]
        self.errors += len(failed)
        if not failed:
            self.estimator.record(chunk, seconds)
        rewards = [outcome.row["reward"] for outcome in outcomes if "error" not in outcome.row]
        mean = f"best {sum(rewards) / len(rewards):.3f}" if rewards else "failed"
        errors = f" · {self.errors} failed" if self.errors else ""
        state = f"{_where(chunk)} {mean}{errors} · {self.time_left()}"
        self.bar.update(self.task, completed=self.finished, state=state)
        if not self.console.is_terminal:
            print(f"{self.finished}/{self.bar.tasks[0].total} {state}", file=sys.stderr, flush=True)

    def time_left(self, chunk: Chunk | None = None, share: float = 0.0) -> str:
        """In words; `share` of `chunk` is already done."""
        left = self.estimator.left(self.pending, self.workers)
        if left is None:
            return f"{clock(time.perf_counter() - self.started)} so far, no estimate yet"
        if chunk is not None:
            left -= share * (self.estimator.seconds(chunk) or 0.0)
        return f"{clock(time.perf_counter() - self.started)} so far, about {clock(left)} left"


def _where(chunk):
    return f"{chunk.cell.model.label} · {chunk.cell.task.label} · {chunk.cell.method.label} · seed {chunk.seed}"
