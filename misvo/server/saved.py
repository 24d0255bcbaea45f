"""Finished runs of the operator's: folders that `misvo steer --save` wrote, named at the start, shown beside the rest.

No client ever names a path. A run's id is made of its folder's, so that an address in a browser outlives a restart.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from misvo.result import Result
from misvo.result_files import RESULT
from misvo.server.jobs import Job, Part, Work
from misvo.story import story


@dataclass(frozen=True)
class SavedRun:
    id: str
    name: str  # of its folder, without the way to it
    ended: float
    result: Result


def read(folders: Sequence[Path]) -> list[SavedRun]:
    """All of them, or a MisvoError that names the one that is none."""
    found = {}
    for folder in folders:
        result, place = Result.load(folder), Path(folder).resolve()
        id = f"run-{hashlib.sha256(str(place).encode()).hexdigest()[:32]}"
        found[id] = SavedRun(id, place.name, (place / RESULT).stat().st_mtime, result)
    return list(found.values())


def job_of(run: SavedRun) -> Job:
    """In the event loop, as all jobs are made."""
    result = run.result
    scored = any(candidate.reward is not None for candidate in result.candidates)
    best, told = (result.best, story(result)) if scored else (None, [])
    work = Work(result.prompt, result.settings, record=True)
    part = Part(work, result.settings, len(result.prompt_ids), None, result, best, told)
    return Job.finished_before(run.id, part, run.ended, {"name": run.name, "seed": result.settings.seed})
