"""A run's folder, and why it survives being killed.

    config.json       the resolved config; a resume with another one is refused
    environment.json  versions and machine of every session that worked on it
    candidates.jsonl  every response, append-only
    rows.jsonl        one row per finished (model, task, prompt, method, seed), append-only
    vectors/          the steering of each row, where that was asked for
    summary.json      counts and means, made anew whenever a session ends

One process writes. The responses of a prompt go to disk before its row, and the row says where they end
(`candidates_end`): on resume whatever lies behind the last whole row is cut off and done again.
"""

import hashlib
import json
from contextlib import ExitStack
from pathlib import Path

from misvo.bench.plan import KEY, Key
from misvo.errors import MisvoError
from misvo.lines import (
    Appender,
    difference,
    only_writer,
    read_json,
    safe_write,
    some_of,
    to_line,
    whole_lines,
    write_atomically,
)
from misvo.settings import deciding

CONFIG, ENVIRONMENT, ROWS, CANDIDATES, SUMMARY = (
    "config.json",
    "environment.json",
    "rows.jsonl",
    "candidates.jsonl",
    "summary.json",
)


class RunFolder:
    """Open for writing: `with RunFolder(path, resolved, environment) as folder`."""

    def __init__(self, path, resolved: dict, environment: dict):
        self.path, self.resolved, self.environment = Path(path), resolved, environment
        self.done: dict[Key, bool] = {}  # key -> whether it went well

    def __enter__(self) -> "RunFolder":
        self.path.mkdir(parents=True, exist_ok=True)
        refusal = f"another misvo is at work in {self.path}: wait for it, or give another folder."
        with ExitStack() as held:
            held.enter_context(only_writer(self.path / ".lock", refusal))
            self._adopt()
            held.callback(self._candidates.close)
            held.callback(self._rows.close)
            self._held = held.pop_all()
        return self

    def __exit__(self, *_):
        self._held.close()

    def append(self, row: dict, candidates: list[dict], steering=None) -> None:
        """Commit one finished prompt: vectors, then responses, then the row that vouches for them."""
        key = tuple(row[name] for name in KEY)
        row = dict(row, vectors=None)
        with safe_write(self.path, f"the {len(self.done)} finished rows"):
            if steering is not None and self.resolved["save_vectors"]:
                row["vectors"] = f"vectors/{_slug(key)}"
                steering.save_pretrained(self.path / row["vectors"])
            self._candidates.append("".join(to_line(candidate) for candidate in candidates))
            self._rows.append(to_line({**row, "candidates_end": self._candidates.size}))
        self.done[key] = "error" not in row

    def write_json(self, name: str, content) -> None:
        write_atomically(self.path / name, json.dumps(content, indent=2, ensure_ascii=False) + "\n")

    def _adopt(self):
        """Take over what an earlier session left, or begin."""
        if (self.path / CONFIG).exists():
            changes = _by_change(difference(read_config(self.path), self.resolved))
            if changes:
                shown = some_of(changes, 6)
                raise MisvoError(f"{self.path} holds a run with other settings ({shown}): give another folder.")
        elif (self.path / ROWS).exists():
            raise MisvoError(f"{self.path} holds rows but no {CONFIG}: it is no run that can go on.")
        else:
            self.write_json(CONFIG, self.resolved)
        rows, size = whole_rows(self.path)
        self._candidates = Appender(self.path / CANDIDATES, rows[-1]["candidates_end"] if rows else 0)
        self._rows = Appender(self.path / ROWS, size)
        for row in rows:
            self.done[tuple(row[name] for name in KEY)] = "error" not in row
        sessions = read_json(self.path / ENVIRONMENT) if (self.path / ENVIRONMENT).exists() else []
        self.write_json(ENVIRONMENT, [*sessions, {**self.environment, "rows_before": len(rows)}])


def whole_rows(path: Path) -> tuple[list[dict], int]:
    """The rows that are whole, with their responses on disk, and the bytes they take; a torn last line is left out."""
    saved = (path / CANDIDATES).stat().st_size if (path / CANDIDATES).exists() else 0
    rows, size = [], 0
    for row, end in whole_lines(path / ROWS):
        if row["candidates_end"] > saved:
            break
        rows.append(row)
        size = end
    return rows, size


def _by_change(changes: list[str]) -> list[str]:
    """The same change of a setting in many cells is said once."""
    cells = {}
    for change in changes:
        cell, inside, setting = change.partition(".settings.")
        cells.setdefault(setting if inside else change, []).append(cell)
    return [
        what if len(where) == 1 and where[0] == what else f"{what} in {len(where)} cells"
        for what, where in cells.items()
    ]


def read_config(folder: Path) -> dict:
    """The resolved config of a run, without what decides none of its rows: earlier versions kept some of that."""
    resolved = {"judge": None, "held_out": None, **read_json(folder / CONFIG)}  # runs of old have neither
    for cell in resolved["cells"].values():
        cell["settings"] = deciding(cell["settings"])
    return resolved


def _slug(key: Key) -> str:
    return hashlib.blake2b(json.dumps(key).encode(), digest_size=8).hexdigest()
