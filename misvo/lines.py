"""Files of JSON lines that only grow, and why they survive a process that is killed; and what was changed since.

One process writes, under a lock that dies with it. A line that ends in a newline is whole and counts; a torn last one
is cut off by whoever goes on with the file.
"""

import json
import os
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from misvo.errors import MisvoError, cut


@contextmanager
def only_writer(lock: Path, refusal: str):
    """Nobody else writes meanwhile; whoever comes second is told so."""
    held = FileLock(lock)
    try:
        held.acquire(timeout=0)
    except Timeout as error:
        raise MisvoError(refusal) from error
    try:
        yield
    finally:
        held.release()


@contextmanager
def safe_write(path: Path, done: str):
    """A write that fails costs nothing of what is done already, and says so."""
    try:
        yield
    except OSError as error:
        raise MisvoError(
            f"{path} could not be written ({error.strerror or error}); {done} are safe, and the same command goes on "
            "from there."
        ) from error


class Appender:
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


def to_line(record: dict) -> str:
    return json.dumps(record) + "\n"  # plain ASCII: a line ends where a line ends, whatever a model says


def whole_lines(path: Path) -> list[tuple[dict, int]]:
    """The records of the lines that are whole, each with the bytes up to its end; a torn last line is left out."""
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    records, size = [], 0
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line) if line.endswith(b"\n") else None
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            if number < len(lines):
                raise MisvoError(f"line {number} of {path} is damaged, and it is not the last one.") from error
            record = None
        if record is None:
            break
        size += len(line)
        records.append((record, size))
    return records


def read_json(path: Path):
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise MisvoError(f"{path} is not JSON ({error}).") from error


def write_atomically(path: Path, text: str) -> None:
    """All or nothing: built beside its place, then renamed into it."""
    building = path.with_name(f".{path.name}.building")
    building.write_text(text, encoding="utf-8")
    os.replace(building, path)


def some_of(changes: list[str], most: int) -> str:
    return "; ".join(changes[:most]) + ("; …" if len(changes) > most else "")


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


def _shown(value):
    return cut(json.dumps(value, ensure_ascii=False), 60)
