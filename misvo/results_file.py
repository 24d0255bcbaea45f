"""The file that `misvo steer --file … --out RESULTS.jsonl` writes, and why it survives being killed.

    RESULTS.jsonl                 a line per finished prompt, appended whole
    RESULTS.jsonl.settings.json   the model, the reward and the settings that the lines were made with

One process writes. Lines that are whole count when the same command comes again; what would mix lines of different
makes is refused. Nothing is touched before there is a line to write, so that a typing error beside `--overwrite` costs
nothing.
"""

import json
from contextlib import ExitStack
from pathlib import Path

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
from misvo.tasks import Row

ELSE = "give another file with --out, or --overwrite"


class ResultsFile:
    """Open for writing: `with ResultsFile(path, made_with, rows) as results`."""

    def __init__(self, path, made_with: dict, rows: list[Row], *, overwrite: bool = False, retry_errors: bool = False):
        self.path, self.settings_path = Path(path), Path(f"{path}.settings.json")
        self.made_with = json.loads(json.dumps(made_with))  # as a file gives it back
        self.rows, self.overwrite, self.retry_errors = rows, overwrite, retry_errors
        self.done: dict[str, dict] = {}  # id -> its line
        self._size, self._file = 0, None

    def __enter__(self) -> "ResultsFile":
        if self.path.is_dir():
            raise MisvoError(f"{self.path} is a folder: give --out the name of a file, such as results.jsonl.")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        refusal = f"another misvo writes {self.path}: wait for it, or give another file."
        with ExitStack() as held:
            held.enter_context(only_writer(self.path.with_name(f".{self.path.name}.lock"), refusal))
            if not self.overwrite:
                self._adopt()
            self._held = held.pop_all()
        return self

    def __exit__(self, *_):
        self._held.close()

    def append(self, line: dict) -> None:
        """Commit one finished prompt."""
        with safe_write(self.path, f"the {len(self.done)} lines in it"):
            if self._file is None:
                self._file = self._begin()
                self._held.callback(self._file.close)
            self._file.append(to_line(line))
        self.done[line["id"]] = line

    def _adopt(self):
        """Take over the lines that an earlier command left."""
        if not self.path.exists() or not self.path.stat().st_size:
            return
        if not self.settings_path.exists():
            raise MisvoError(f"{self.path} holds something else than results of `misvo steer --file`: {ELSE}.")
        lines = whole_lines(self.path)
        if not lines:
            return
        changes = difference(read_json(self.settings_path), self.made_with)
        if changes:
            raise MisvoError(f"{self.path} was made with other settings ({some_of(changes, 4)}): {ELSE}.")
        asked = {row.id: _content(row.prompt, row.columns) for row in self.rows}
        for number, (line, _) in enumerate(lines, 1):
            if not isinstance(line, dict) or not {"id", "prompt", "columns", "error"} <= line.keys():
                raise MisvoError(f"line {number} of {self.path} is no result of `misvo steer --file`: {ELSE}.")
            if asked.get(line["id"], content := _content(line["prompt"], line["columns"])) != content:
                raise MisvoError(f"{self.path} holds another prompt or other columns by the id {line['id']!r}: {ELSE}.")
        self.done = {line["id"]: line for line, _ in lines}
        self._size = lines[-1][1]
        if self.retry_errors:
            self.done = {name: line for name, line in self.done.items() if line["error"] is None}

    def _begin(self) -> Appender:
        """The file with the lines that count in it and nothing behind them, and beside it what made them."""
        if self.retry_errors:  # lines that are to be done again stand among them
            kept = "".join(map(to_line, self.done.values()))
            write_atomically(self.path, kept)
            self._size = len(kept)
        file = Appender(self.path, self._size)
        write_atomically(self.settings_path, json.dumps(self.made_with, indent=2, ensure_ascii=False) + "\n")
        return file


def _content(prompt, columns) -> str:
    return json.dumps([prompt, columns], sort_keys=True)
