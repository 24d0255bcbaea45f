"""What the sandbox's tests share: a sandbox with tight limits, a call in it, and a look at its processes."""

import contextlib
import random
import textwrap
import time
import warnings
from pathlib import Path

from misvo.sandbox import Calls, Limits, Program, Sandbox
from misvo.sandbox.codec import decode, encode


@contextlib.contextmanager
def tight_sandbox(plan):
    """The best walls of this machine ("auto"), or what is left where the kernel allows no namespaces ("none")."""
    # The odd fraction marks this sandbox's processes: it is part of their command line.
    wall = 20 + random.random()
    limits = Limits(cpu_seconds=1, call_seconds=0.4, memory=256 << 20, idle_seconds=0.8, wall_seconds=wall)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        sandbox = Sandbox(limits, _plan=plan)
    with sandbox:
        yield sandbox


def call(sandbox, source, *arguments):
    """The value of `solve(*arguments)`, or None when there is no answer."""
    [outcome] = sandbox.run([Program(textwrap.dedent(source), "solve", Calls.of([encode(list(arguments))]))])
    return decode(outcome.answers[0]) if outcome.answers else None


def marked(mark):
    """The processes, other than dead ones, of the sandbox with this wall-clock limit: zygote, attendants, programs."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command = (folder / "cmdline").read_bytes().decode(errors="replace")
            state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if "sandbox/zygote.py" in command and f'"wall_seconds": {mark}' in command and state != "Z":
            found.append(int(folder.name))
    return found


def leftovers(sandbox):
    """Processes of this sandbox, other than its zygote, that are still there after a moment."""
    zygote = sandbox._zygote
    known = _family(zygote.process.pid) if zygote.bubblewrap else {zygote.process.pid}
    deadline = time.monotonic() + 5
    while (found := set(marked(sandbox.limits.wall_seconds)) - known) and time.monotonic() < deadline:
        time.sleep(0.05)
    return found


def _family(pid):
    """bubblewrap's own processes: it, its child, and the zygote below."""
    family = {pid}
    for _ in range(2):
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
                if parent in family:
                    family.add(int(folder.name))
    return family
