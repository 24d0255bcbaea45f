"""`misvo ARGUMENTS` in the process of the tests: what a shell would show, without ten seconds of imports.

Tests whose point is a process, of its imports, signals, limits or death, start one.
"""

import contextlib
import io
import sys
from dataclasses import dataclass

import pytest

from misvo import cli


@dataclass(frozen=True)
class Shown:
    """As subprocess.run calls them."""

    returncode: int
    stdout: str
    stderr: str


def run_shell(*arguments, input: str = "a b") -> Shown:
    out, err = (io.TextIOWrapper(io.BytesIO(), "utf-8", "backslashreplace", write_through=True) for _ in range(2))
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        patch.setattr(sys, "argv", ["misvo", *map(str, arguments)])
        patch.setattr(sys, "stdin", io.StringIO(input))
        try:
            cli.main()
            code = 0
        except SystemExit as stop:
            code = stop.code or 0
    return Shown(code, *(stream.buffer.getvalue().decode() for stream in (out, err)))
