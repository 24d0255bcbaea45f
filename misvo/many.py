"""The body of `misvo steer --file PROMPTS --out RESULTS.jsonl`: many prompts on one session, a line for each when it
is done. Killed or stopped, the same command goes on where it was (`results_file.py`).

A line has: id, prompt and columns as they were asked; text and reward of the answer; unsteered_text and
unsteered_reward, the best of the first step, which sampled the model as it was; kl_per_token, nats of the last step;
first_mean and last_mean, the mean rewards of those steps; tokens that were sampled in all; error where the reward
or the method failed, else null.
"""

import json
import statistics
import sys
from collections import deque
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from rich.table import Table

import misvo
from misvo import prompts, rewards, tasks, view
from misvo.cli_process import second_ctrl_c_ends
from misvo.errors import MisvoError, short
from misvo.policy import Policy
from misvo.result_view import best_of
from misvo.results_file import ResultsFile
from misvo.session import Handle
from misvo.settings import Settings, deciding
from misvo.story import nats_per_token
from misvo.tasks import Row

AHEAD = 16  # prompts that wait in the session: enough for rows that come free, and few enough to hold in memory
DECIDING_LOAD = ("dtype", "revision", "quantize")  # of how a model is loaded, what makes it another one


def steer_file(
    file: Path,
    out: Path,
    *,
    reward: str,
    model: str,
    load: dict,
    settings: Settings,
    system: str | None = None,
    columns: dict | None = None,
    overwrite: bool = False,
    retry_errors: bool = False,
    as_json: bool = False,
) -> None:
    rows = read_rows(file, system, columns or {})
    if out.exists() and out.samefile(file):
        raise MisvoError(f"--file and --out are both {file}: give the results a file of their own.")
    made_with = {
        "model": model,
        "load": {name: load[name] for name in DECIDING_LOAD},
        "reward": reward,
        "settings": deciding(settings.to_dict()),
    }
    with ResultsFile(out, made_with, rows, overwrite=overwrite, retry_errors=retry_errors) as results:
        todo = [row for row in rows if row.id not in results.done]
        if todo:
            score = rewards.load(reward)
            with view.loading(model):
                policy = misvo.Policy.from_pretrained(model, **load)
            try:
                with second_ctrl_c_ends(), _Progress(settings, len(rows), len(rows) - len(todo)) as progress:
                    _steer(policy, score, settings, todo, results, progress)
            except KeyboardInterrupt:
                done = sum(row.id in results.done for row in rows)
                print(
                    f"misvo: {done} of {len(rows)} prompts are done and safe in {out}; the same command goes on there.",
                    file=sys.stderr,
                )
                raise
        lines = [results.done[row.id] for row in rows]
    _report(lines, out, len(todo), as_json)


def read_rows(file: Path, system: str | None, columns: dict) -> list[Row]:
    """The prompts of a file, each behind the system message; a field of its own stands for the column of that name."""
    rows = []
    for row in tasks.load("prompts", file).rows:
        with _naming(row):
            prompt = prompts.with_system(row.prompt, system)
        rows.append(replace(row, prompt=prompt, columns={**columns, **row.columns}))
    return rows


def _longest(policy: Policy, rows: list[Row], settings: Settings) -> int:
    """Tokens of the longest prompt; one that cannot be steered is refused before hours have gone into others."""
    template, lengths = settings.chat_template_kwargs, []
    for row in rows:
        with _naming(row):
            lengths.append(len(policy.encode(row.prompt, raw=settings.raw, chat_template_kwargs=template)))
            policy.check_length(lengths[-1], settings.max_new_tokens)
            rewards.check_columns(row.columns)
    return max(lengths)


@contextmanager
def _naming(row: Row):
    try:
        yield
    except MisvoError as error:
        raise MisvoError(f"the prompt with the id {row.id!r} cannot be steered: {error}") from error


def _steer(policy: Policy, score, settings: Settings, rows: list[Row], results: ResultsFile, progress) -> None:
    longest, resolved = _longest(policy, rows, settings), settings.for_model(policy.own_sampler)
    at_once = settings.max_rows or policy.rows_that_fit(None, resolved, len(rows), longest)
    left, asked = deque(rows), {}
    with misvo.Session(policy, policy.engine(at_once)) as session:
        while left or session.busy:
            while left and sum(handle.state == "waiting" for handle in asked) < AHEAD:
                row = left.popleft()
                asked[session.add(row.prompt, score, settings, row.columns)] = row
            for event in session.step():
                if event.row is not None:
                    progress.step(event.row)
                else:
                    line = to_line(asked.pop(event.handle), event.handle)
                    results.append(line)
                    progress.prompt_done(line, len(event.handle.result.trace))


def to_line(row: Row, handle: Handle) -> dict:
    """What is kept of a prompt that has ended; of one that failed, what it had until then."""
    result, trace = handle.result, handle.result.trace
    best, plain = best_of(result), result.unsteered
    return {
        "id": row.id,
        "prompt": row.prompt,
        "columns": row.columns,
        "text": best and best.text,
        "reward": best and best.reward,
        "unsteered_text": plain and plain.text,
        "unsteered_reward": plain and plain.reward,
        "kl_per_token": nats_per_token(trace[-1], result.settings.rollouts) if trace else None,
        "first_mean": trace[0]["mean"] if trace else None,
        "last_mean": trace[-1]["mean"] if trace else None,
        "tokens": sum(step["tokens"] for step in trace),
        "error": None if handle.error is None else _told(handle.error),
    }


def _told(error: Exception) -> str:
    """A sentence of ours as it is; of what broke otherwise, also what it is."""
    return short(error if isinstance(error, MisvoError) else f"{type(error).__name__}: {error}", 2000)


class _Progress:
    """A bar over prompts on a terminal, a line per prompt in a log."""

    def __init__(self, settings: Settings, total: int, finished: int):
        columns = [TextColumn(f"Steering with {settings.method}"), BarColumn()]
        columns += [TextColumn("{task.fields[count]} prompts"), TextColumn("{task.fields[state]}")]
        self.console = Console(stderr=True, highlight=False)
        self.bar = Bar(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=self.console, transient=True)
        self.steps_each, self.total, self.finished = settings.steps, total, finished
        self.steps = self.failed = 0  # steps of prompts that are under way; prompts that failed
        self.task = self.bar.add_task("", total=total, completed=finished, count=f"{finished}/{total}", state="")

    def __enter__(self):
        self.bar.start()
        return self

    def __exit__(self, *_):
        self.bar.stop()

    def step(self, row: dict) -> None:
        self.steps += 1
        self._show(f"mean {row['mean']:.3f}  KL {row['kl']:.2f}")

    def prompt_done(self, line: dict, steps: int) -> None:
        self.steps -= steps
        self.finished += 1
        self.failed += line["error"] is not None
        reward = "no reward" if line["reward"] is None else f"reward {line['reward']:.3f}"
        state = f"{line['id']}: {reward if line['error'] is None else 'failed'}"
        self._show(f"{state}  {self.failed} failed" if self.failed else state)
        if not self.console.is_terminal:
            print(f"{self.finished}/{self.total} {state}", file=sys.stderr, flush=True)

    def _show(self, state):
        completed = self.finished + self.steps / self.steps_each
        self.bar.update(self.task, completed=completed, count=f"{self.finished}/{self.total}", state=state)


def summarise(lines: list[dict]) -> dict:
    """Counts, and means over the prompts that did not fail."""
    well = [line for line in lines if line["error"] is None]
    names = ("reward", "unsteered_reward", "first_mean", "last_mean", "kl_per_token")
    known = {name: [line[name] for line in well if line[name] is not None] for name in names}
    pairs = [(line["reward"], line["unsteered_reward"]) for line in well if line["unsteered_reward"] is not None]
    return {
        "prompts": len(lines),
        "failed": len(lines) - len(well),
        **{name: statistics.fmean(values) if values else None for name, values in known.items()},
        "better_than_unsteered": sum(steered > plain for steered, plain in pairs) if pairs else None,
        "tokens": sum(line["tokens"] for line in lines),
    }


def _report(lines: list[dict], out: Path, fresh: int, as_json: bool) -> None:
    summary = summarise(lines)
    failed = [line for line in lines if line["error"] is not None]
    if as_json:
        print(json.dumps({"out": str(out), "fresh": fresh, **summary}))
    else:
        view.print_table(table(summary))
        print(f"{len(lines)} prompts in {out}, {fresh} of them now; {summary['tokens']} tokens were sampled")
        if summary["better_than_unsteered"] is not None:
            print(f"{summary['better_than_unsteered']} answers have a higher reward than the best without steering")
    if failed:
        told = f"{len(failed)} of {len(lines)} prompts failed, the first, {failed[0]['id']!r}, with: "
        told += f"{failed[0]['error'].rstrip('.')}; --retry-errors does them again."
        if len(failed) == len(lines):
            raise MisvoError(told)
        print(f"misvo: {told}", file=sys.stderr)


def table(summary: dict) -> Table:
    """The means, unsteered beside steered."""
    made = Table()
    for heading in (f"mean over {summary['prompts'] - summary['failed']} prompts", "without steering", "steered"):
        made.add_column(heading, justify="right" if made.columns else "left")
    made.add_row("reward of the answer", *map(_figure, (summary["unsteered_reward"], summary["reward"])))
    made.add_row("mean reward, first and last step", *map(_figure, (summary["first_mean"], summary["last_mean"])))
    made.add_row("KL per token, nats", "", _figure(summary["kl_per_token"]))
    return made


def _figure(value: float | None) -> str:
    return "—" if value is None else f"{value:.3f}"
