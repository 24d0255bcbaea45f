"""Where `misvo steer` puts a result: looked at before any work, and nothing lost when something fails at the end.

The answer goes to standard output first; then come the files, each whatever became of the others.
"""

import json
import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from misvo import result_files, view
from misvo.errors import MisvoError, first_line
from misvo.invasiveness import Panel
from misvo.invasiveness import panel as make_panel
from misvo.result import Result


@dataclass(frozen=True)
class Outputs:
    """What a user asked for: a folder for the run, a picture, JSON in place of the view."""

    save: Path | None = None
    plot: Path | None = None
    as_json: bool = False
    overwrite: bool = False
    readers: dict = field(default_factory=dict)  # a judge and a held-out reward, for the panel

    def check(self) -> None:
        """Refuse what cannot be written, or would take the place of another run, before somebody waits for it."""
        if self.save is not None:
            if not self.overwrite and result_files.holds_run(self.save):
                raise MisvoError(f"{self.save} already holds a run or a steering: give another folder, or --overwrite.")
            _check_folder(self.save)
        if self.plot is not None:
            _check_picture(self.plot)

    def deliver(self, result: Result, reward: str, stopped: bool = False) -> list[str]:
        """Print the answer, then write the files; gives a sentence for each that could not be had.

        `stopped` is for a run that did not come to its end.
        """
        problems: list[str] = []

        def attempt(what: str, action: Callable[[], None]):
            try:
                action()
            except (OSError, MisvoError) as error:
                problems.append(f"{what}: {first_line(error)}")

        if self.readers and self.as_json and not stopped:  # one object holds everything
            attempt("the responses could not be judged", lambda: self._judge(result))
        attempt("the answer could not be printed", lambda: self._print(result, reward, stopped))
        if self.readers and not self.as_json and not stopped:
            attempt("the responses could not be judged", lambda: view.print_table(self._judge(result)))
        if self.save is not None and result.candidates:
            attempt(f"the run could not be saved in {self.save}", lambda: self._save(result, stopped))
        if self.plot is not None and result.trace:
            attempt(f"the picture could not be drawn in {self.plot}", lambda: self._draw(result))
        return problems

    def _print(self, result, reward, stopped):
        if self.as_json:
            print(json.dumps(result.to_dict()))
        elif result.trace:
            view.show(result, reward)
            if stopped:
                print(f"stopped at step {len(result.trace)} of {result.settings.steps}: this is the best so far.")
        sys.stdout.flush()

    def _judge(self, result) -> Panel:
        panel = make_panel(result, **self.readers)
        result.panel = panel.to_dict()
        return panel

    def _save(self, result, stopped):
        result.save(self.save, overwrite=self.overwrite)
        if stopped:
            print(f"misvo: what was done until then is in {self.save}.", file=sys.stderr)

    def _draw(self, result):
        from misvo.plots import plot_run

        plot_run(result, self.plot)


def _check_folder(folder: Path) -> None:
    """Whether a folder can be made, or written into where it is there."""
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    _check_writable(there, f"the run cannot be saved in {folder}")


def _check_picture(path: Path) -> None:
    from matplotlib.backend_bases import FigureCanvasBase

    kind, known = path.suffix.removeprefix(".").lower(), FigureCanvasBase.get_supported_filetypes()
    if kind and kind not in known:
        raise MisvoError(f"{path} is no picture that can be drawn: its name may end in {', '.join(sorted(known))}.")
    if path.is_dir():
        raise MisvoError(f"{path} is a folder: give --plot the name of a picture, such as {path / 'run.png'}.")
    if not path.parent.is_dir():
        raise MisvoError(f"there is no folder {path.parent} to draw {path.name} in: make it first.")
    _check_writable(path.parent, f"{path} cannot be drawn")
    if path.exists() and not os.access(path, os.W_OK):
        raise MisvoError(f"{path} cannot be drawn: it is there and write-protected.")


def _check_writable(folder: Path, failed: str) -> None:
    """By trying: permissions alone do not know of read-only disks and odd file systems."""
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise MisvoError(f"{failed}: {error.strerror or error} ({folder}).") from error
