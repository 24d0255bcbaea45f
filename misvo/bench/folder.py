"""A run's folder, and why it survives being killed.

    config.json       the resolved config; a resume with another one is refused
    environment.json  versions and machine of every session that worked on it
    candidates.jsonl  every response, append-only
    rows.jsonl        one row per finished (model, task, prompt, method, seed), append-only
    vectors/          the steering of each row, where that was asked for
    summary.json      counts and means, made anew whenever a session ends

One process writes, under a lock that dies with it. The responses of a prompt go to disk before its row, and the row
says where they end (`candidates_end`): on resume whatever lies behind the last whole row is cut off and done again.
"""

import hashlib
import json
import os
from pathlib import Path

from filelock import FileLock, Timeout

from misvo.bench.plan import KEY, Key
from misvo.errors import MisvoError, cut
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
        self._lock = FileLock(self.path / ".lock")
        try:
            self._lock.acquire(timeout=0)
        except Timeout as error:
            raise MisvoError(
                f"another misvo is at work in {self.path}: wait for it, or give another folder."
            ) from error
        try:
            self._adopt()
        except BaseException:
            self._lock.release()
            raise
        return self

    def __exit__(self, *_):
        for file in (self._rows, self._candidates):
            file.close()
        self._lock.release()

    def append(self, row: dict, candidates: list[dict], steering=None) -> None:
        """Commit one finished prompt: vectors, then responses, then the row that vouches for them."""
        key = tuple(row[name] for name in KEY)
        row = dict(row, vectors=None)
        try:
            if steering is not None and self.resolved["save_vectors"]:
                row["vectors"] = f"vectors/{_slug(key)}"
                steering.save_pretrained(self.path / row["vectors"])
            self._candidates.append("".join(_line(candidate) for candidate in candidates))
            self._rows.append(_line({**row, "candidates_end": self._candidates.size}))
        except OSError as error:
            raise MisvoError(
                f"{self.path} could not be written ({error.strerror or error}); the {len(self.done)} finished rows "
                "are safe, and the same command goes on from there."
            ) from error
        self.done[key] = "error" not in row

    def write_json(self, name: str, content) -> None:
        write_atomically(self.path / name, json.dumps(content, indent=2, ensure_ascii=False) + "\n")

    def _adopt(self):
        """Take over what an earlier session left, or begin."""
        if (self.path / CONFIG).exists():
            changes = _by_change(difference(read_config(self.path), self.resolved))
            if changes:
                shown = "; ".join(changes[:6]) + ("; …" if len(changes) > 6 else "")
                raise MisvoError(f"{self.path} holds a run with other settings ({shown}): give another folder.")
        elif (self.path / ROWS).exists():
            raise MisvoError(f"{self.path} holds rows but no {CONFIG}: it is no run that can go on.")
        else:
            self.write_json(CONFIG, self.resolved)
        rows, size = whole_rows(self.path)
        self._candidates = _Appender(self.path / CANDIDATES, rows[-1]["candidates_end"] if rows else 0)
        self._rows = _Appender(self.path / ROWS, size)
        for row in rows:
            self.done[tuple(row[name] for name in KEY)] = "error" not in row
        sessions = read_json(self.path / ENVIRONMENT) if (self.path / ENVIRONMENT).exists() else []
        self.write_json(ENVIRONMENT, [*sessions, {**self.environment, "rows_before": len(rows)}])


class _Appender:
    """A file that only grows by whole writes: a write that fails is taken back."""

    def __init__(self, path: Path, size: int):
        self.file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        os.ftruncate(self.file, size)  # what lies behind was never vouched for
        self.size = os.lseek(self.file, 0, os.SEEK_END)

    def append(self, text: str):
        data = memoryview(text.encode())
        try:
            while data:
                data = data[os.write(self.file, data) :]
            os.fsync(self.file)
        except BaseException:  # a full disk, or Ctrl-C in mid-write
            os.ftruncate(self.file, self.size)
            os.lseek(self.file, self.size, os.SEEK_SET)
            raise
        self.size = os.lseek(self.file, 0, os.SEEK_CUR)

    def close(self):
        os.close(self.file)


def whole_rows(path: Path) -> tuple[list[dict], int]:
    """The rows that are whole, with their responses on disk, and the bytes they take; a torn last line is left out."""
    source = path / ROWS
    content = source.read_bytes() if source.exists() else b""
    saved = (path / CANDIDATES).stat().st_size if (path / CANDIDATES).exists() else 0
    rows, size = [], 0
    lines = content.splitlines(keepends=True)
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line) if line.endswith(b"\n") else None
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            if number < len(lines):
                raise MisvoError(f"line {number} of {source} is damaged, and it is not the last one.") from error
            row = None
        if row is None or row["candidates_end"] > saved:
            break
        rows.append(row)
        size += len(line)
    return rows, size


def difference(before, after, where="") -> list[str]:
    """What changed between two nested values, one `path: old → new` for each leaf."""
    if isinstance(before, dict) and isinstance(after, dict):
        keys = [*before, *(key for key in after if key not in before)]
        found = [
            difference(before.get(key, "absent"), after.get(key, "absent"), f"{where}.{key}" if where else str(key))
            for key in keys
        ]
        return [change for changes in found for change in changes]
    return [] if before == after else [f"{where}: {_shown(before)} → {_shown(after)}"]


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


def read_json(path: Path):
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise MisvoError(f"{path} is not JSON ({error}).") from error


def read_config(folder: Path) -> dict:
    """The resolved config of a run, without what decides none of its rows: earlier versions kept some of that."""
    resolved = {"judge": None, "held_out": None, **read_json(folder / CONFIG)}  # runs of old have neither
    for cell in resolved["cells"].values():
        cell["settings"] = deciding(cell["settings"])
    return resolved


def write_atomically(path: Path, text: str) -> None:
    """All or nothing: built beside its place, then renamed into it."""
    building = path.with_name(f".{path.name}.building")
    building.write_text(text, encoding="utf-8")
    os.replace(building, path)


def _line(record: dict) -> str:
    return json.dumps(record) + "\n"  # plain ASCII: a line ends where a line ends, whatever a model says


def _slug(key: Key) -> str:
    return hashlib.blake2b(json.dumps(key).encode(), digest_size=8).hexdigest()


def _shown(value):
    return cut(json.dumps(value, ensure_ascii=False), 60)
