"""Running a sweep: what is not yet done goes to workers, what comes back goes to the folder, in one place.

    from misvo.bench import config, sweep
    sweep.run(config.read("configs/quick.toml"), "runs/quick")

Resume is not a mode: a run does whatever its folder does not have yet.
"""

import contextlib
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from misvo.bench.config import Config
from misvo.bench.environment import environment
from misvo.bench.folder import CONFIG, SUMMARY, RunFolder, whole_rows
from misvo.bench.plan import KEY, expected_rows, make_plan
from misvo.bench.progress import SweepProgress
from misvo.bench.reader import Reader, Text
from misvo.bench.trackers import open_trackers, scalars
from misvo.bench.work import Outcome, Worker
from misvo.errors import MisvoError, RewardError
from misvo.lines import read_json


@dataclass(frozen=True)
class Done:
    """How a session ended."""

    folder: Path
    rows: int  # finished in all, failures included
    fresh: int  # of which this session added
    total: int
    failed: list[str]  # one message per failed prompt
    notes: list[str]


class LocalPool:
    """The one worker of this process."""

    workers = 1

    def __init__(self):
        self.worker = Worker()

    def run(self, chunks, on_step):
        for chunk in chunks:
            yield chunk, *self.worker.timed(chunk, lambda _, row, chunk=chunk: on_step(chunk, row))

    def close(self):
        pass


def run(config: Config, folder, *, pool=None, report_to=(), retry_errors=False, only=()) -> Done:
    """Do what `folder` does not have yet of this sweep. `pool` hands chunks to workers; None works here.

    `only` has labels of methods and tasks, and seeds, that are to be done now; the others wait for another session.
    """
    plan = make_plan(config)
    wanted = _wanted(config, only)
    reader = _reader(config, Path(folder))
    if not (Path(folder) / CONFIG).exists():
        reader.load()  # before there is a folder that would be held to a judge that cannot be had
    resolved = plan.resolved(reader.encoder_name)
    pool = pool or LocalPool()
    try:
        with RunFolder(folder, resolved, environment()) as run_folder:
            done = {key for key, well in run_folder.done.items() if well or not retry_errors}
            missing = [chunk for chunk in plan.chunks if not done.issuperset(chunk.keys)]
            total = sum(len(chunk.rows) for chunk in plan.chunks)
            finished = total - sum(len(chunk.rows) for chunk in missing)
            todo = [chunk for chunk in missing if wanted(chunk)]
            if todo:
                reader.load()
            trackers = open_trackers(report_to, run_folder.path, resolved)
            writer, before = _Writer(run_folder, plan, reader, trackers), len(run_folder.done)
            try:
                with SweepProgress(todo, finished, pool.workers) as progress:
                    for note in plan.notes:
                        progress.bar.console.print(note, style="yellow")
                    for chunk, outcomes, seconds in pool.run(todo, progress.step):
                        for outcome in outcomes:
                            key = tuple(outcome.row[name] for name in KEY)
                            if key not in done:  # a chunk that was half written is computed whole
                                writer.write(outcome)
                                done.add(key)
                        progress.chunk_done(chunk, outcomes, seconds)
            finally:
                for tracker in trackers:
                    tracker.close()
                with contextlib.suppress(OSError):  # it can be made again, and may not hide why a run ended
                    run_folder.write_json(SUMMARY, summarise(run_folder.path))
            failed = [row["error"] for row in latest(whole_rows(run_folder.path)[0]).values() if "error" in row]
            count = len(run_folder.done)
    finally:
        pool.close()
    if failed and len(failed) == count:
        raise MisvoError(f"all {count} prompts failed, the first with: {failed[0]}")
    return Done(Path(folder), count, count - before, total, failed, plan.notes)


class _Writer:
    """Adds what only the writer knows, commits, and tells the trackers."""

    def __init__(self, folder, plan, reader, trackers):
        self.folder, self.reader, self.trackers = folder, reader, trackers
        self.prompts = {(label, row.id): row for label, task in plan.tasks.items() for row in task.rows}
        self.rewards = defaultdict(list)

    def write(self, outcome):
        if "error" not in outcome.row:
            try:
                self._read(outcome)
            except RewardError as error:  # of the held-out reward: the prompt has no whole row
                outcome = Outcome({**{name: outcome.row[name] for name in KEY}, "error": f"held_out: {error}"}, [])
        row = outcome.row
        self.folder.append(row, outcome.candidates, outcome.steering)
        if self.trackers and "error" not in row:
            rewards = self.rewards[row["model"], row["task"], row["method"]]
            rewards.append(row["reward"])
            for tracker in self.trackers:
                tracker.log(scalars(row, sum(rewards) / len(rewards)), len(self.folder.done))

    def _read(self, outcome):
        """Have what was returned, the raw best and the first response of the reference read."""
        row = outcome.row
        asked = self.prompts[row["task"], row["prompt"]]
        tokens = {(c["step"], c["rollout"]): c["tokens"] for c in outcome.candidates}
        places = {name: (row[name]["step"], row[name]["rollout"]) for name in ("best", "raw_best")}
        if row["reference"] is not None and row["reference"]["step"] == 0:  # else it was not scored either
            places["reference"] = (row["reference"]["step"], row["reference"]["rollout"])
        texts = {place: Text(row[name]["text"], tokens[place]) for name, place in places.items()}  # often the same one
        figures = dict(zip(texts, self.reader.read(asked.prompt, asked.columns, [*texts.values()]), strict=True))
        row |= figures[places.pop("best")]
        for name, place in places.items():
            row[name] |= figures[place]


def latest(rows: list[dict]) -> dict[tuple, dict]:
    """Rows by key; a row that was done again (`--retry-errors`) stands for the earlier one."""
    return {tuple(row[name] for name in KEY): row for row in rows}


def summarise(folder: Path) -> dict:
    """Counts and means of each cell, from the rows on disk."""
    resolved = read_json(folder / CONFIG)
    rows = latest(whole_rows(folder)[0])
    cells = {}
    for name, cell in resolved["cells"].items():
        mine = [row for row in rows.values() if all(row[part] == cell[part] for part in ("model", "task", "method"))]
        well = [row for row in mine if "error" not in row]
        expected = len(expected_rows(resolved, cell))
        cells[name] = {
            "expected": expected,
            "finished": len(well),
            "failed": len(mine) - len(well),
            "missing": expected - len(mine),
            "reward": sum(row["reward"] for row in well) / len(well) if well else None,
            "tokens": sum(row["tokens"] for row in well),
            "seconds": sum(row["seconds"]["wall"] for row in well),
        }
    return {"cells": cells, "complete": all(cell["missing"] == 0 for cell in cells.values())}


def _wanted(config, only):
    """Whether a chunk is of these methods, tasks and seeds; of a kind that is not named, all are."""
    methods, tasks = ([entry.label for entry in entries] for entries in (config.methods, config.tasks))
    kinds = methods, tasks, [str(seed) for seed in config.seeds]
    known = [name for kind in kinds for name in kind]
    for name in only:
        if name not in known:
            raise MisvoError(f"no method, task or seed is called {name!r}: choose one of {', '.join(known)}.")
    named = [[name for name in only if name in kind] for kind in kinds]

    def wanted(chunk):
        of = (chunk.cell.method.label, chunk.cell.task.label, str(chunk.seed))
        return all(not names or name in names for name, names in zip(of, named, strict=True))

    return wanted


def _reader(config, folder) -> Reader:
    """Who reads what was returned; a run that began with an encoder keeps it, whatever `auto` would find today."""
    name = config.encoder
    if name == "auto" and (folder / CONFIG).exists():
        name = read_json(folder / CONFIG).get("encoder", name)
    return Reader(name, config.judge, config.held_out)
