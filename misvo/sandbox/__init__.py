"""Run model-written programs where they can do no harm, several at a time, and get plain data back.

    with Sandbox() as sandbox:
        [outcome] = sandbox.run([Program("def f(x): return x + 1", "f", Calls.of([encode([41])]))])
        outcome.answers                      # {0: 42}: trees, see `codec`
    isolation_report()                       # what stands between a program and this machine

Each program gets a fresh process in its own user, mount, pid, network, ipc and uts namespaces (see `cell`), forked
from a bare interpreter (see `zygote`) that bubblewrap starts where it is installed. What this machine does not
allow is said once, as a warning, or is an error with `require_sandbox=True`.

`link` is this end of the line, `codec` what travels on it; `cell`, `child`, `kernel`, `landlock` and `seccomp` run at
the other end, where there is no misvo: they import each other by `from .`, and the standard library.

Left out on purpose: systems other than Linux, and control groups.
"""

import contextlib
import functools
import importlib.util
import math
import os
import sys
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field

from misvo.errors import MisvoError
from misvo.sandbox import link
from misvo.sandbox.codec import dumps

_warned = set()


@dataclass(frozen=True)
class Limits:
    """What one program may use. Time is CPU time; idleness and wall clock only catch programs that wait."""

    cpu_seconds: int = 4  # of the whole program
    call_seconds: float = 1.5  # of one call: two calls that never end cost only themselves
    memory: int = 512 << 20  # bytes of address space
    processes: int = 16  # threads; children are refused altogether
    file_bytes: int = 16 << 20  # of one file, and of the whole temporary folder
    answer_bytes: int = 64 << 10  # of one answer
    output_bytes: int = 8 << 20  # of all answers together
    idle_seconds: float = 5.0
    wall_seconds: float = 120.0

    def __post_init__(self):
        for name, value in asdict(self).items():
            if not (math.isfinite(value) and value > 0):
                raise MisvoError(f"The sandbox limit {name} must be a positive number, not {value!r}.")
        for name in ("cpu_seconds", "memory", "processes", "file_bytes", "answer_bytes", "output_bytes"):
            # The kernel counts these in whole units.
            object.__setattr__(self, name, math.ceil(getattr(self, name)))


@dataclass(frozen=True)
class Calls:
    """The argument lists of a program's calls, written out once for all programs of a task."""

    text: str
    count: int

    @classmethod
    def of(cls, trees):
        """From a tree (`encode`) of each argument list."""
        return cls(dumps(list(trees)), len(trees))


@dataclass(frozen=True)
class Program:
    """Source text, the function to call, and what to call it with."""

    source: str
    entry_point: str
    calls: Calls
    extra_seconds: float = 0.0  # CPU time on top of the limits, for tasks whose own solution needs long


@dataclass(frozen=True)
class Outcome:
    """What came back: the answer of each call that gave one, as a tree, and how the process ended.

    `ended` is "exit", "killed" (CPU time, memory, a crash), "idle", "wall" or "flood" (too much output).
    """

    answers: dict = field(default_factory=dict)
    ended: str = "exit"
    cpu_seconds: float = 0.0
    call_seconds: dict = field(default_factory=dict)  # CPU time by answered call, as the process itself says


class Sandbox:
    """A pool: `run` takes programs and gives their outcomes in order, `workers` at a time."""

    def __init__(self, limits=None, workers=None, require_sandbox=False, packages=("numpy",), *, _plan="auto"):
        self.limits = limits or Limits()
        self.workers = workers or len(os.sched_getaffinity(0))
        self._settings = asdict(self.limits)
        self._start = functools.partial(_start, _plan, packages, self._settings)
        self._lock = threading.Lock()
        self._zygote, self._owner = self._start(), os.getpid()
        self._threads = ThreadPoolExecutor(self.workers, thread_name_prefix="misvo-sandbox")
        self.report = _describe(self._zygote)
        missing = "; ".join(self.report["missing"])
        if missing and require_sandbox:
            self.close()
            raise MisvoError(f"This machine cannot isolate model-written code: {missing}.")
        if missing and missing not in _warned:
            _warned.add(missing)
            warnings.warn(f"Model-written code runs behind weaker walls here: {missing}.", stacklevel=2)

    def run(self, programs):
        """Outcomes in the order of `programs`."""
        if self._owner != os.getpid():  # a fork has neither the parent's threads nor a claim on its zygote
            self._lock, self._threads = threading.Lock(), ThreadPoolExecutor(self.workers)
        return list(self._threads.map(self._run, programs))

    def close(self):
        with self._lock:
            zygote, self._zygote = self._zygote, None
        if zygote and self._owner == os.getpid():
            zygote.close()
        self._threads.shutdown(wait=False)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def __del__(self):
        with contextlib.suppress(Exception):
            self.close()

    def _ready(self):
        """The zygote of this process (after a fork, not the parent's), started again when it has died."""
        with self._lock:
            if self._zygote is None or self._owner != os.getpid() or not self._zygote.alive:
                self._zygote, self._owner = self._start(), os.getpid()
            return self._zygote

    def _run(self, program):
        source, name = dumps(program.source), dumps(program.entry_point)
        request = f'{{"source":{source},"entry_point":{name},"calls":{program.calls.text}}}'
        problem = None
        settings = self._settings | {
            "cpu_seconds": math.ceil(self.limits.cpu_seconds + program.extra_seconds),
            "call_seconds": self.limits.call_seconds + program.extra_seconds,
            "wall_seconds": self.limits.wall_seconds + 20 * program.extra_seconds,
        }
        for _ in range(2):  # once more if the sandbox itself broke down, as when the system ran out of memory
            zygote = self._ready()
            # Bubblewrap allowed, namespaces inside it not: then every program gets a bubblewrap of its own.
            alone = zygote.bubblewrap and zygote.facts["plan"] == "none"
            zygote = self._start() if alone else zygote
            try:
                lines, ended = link.exchange(zygote, request.encode(), settings)
                answers, seconds = link.parse_answers(lines, program.calls.count)
                return Outcome(answers, ended["ended"], ended["cpu"], seconds)
            except OSError as error:
                problem = error
            finally:
                if alone:
                    zygote.close()
        raise MisvoError(f"The sandbox could not run a program: {problem}.")


def _start(plan, packages, settings):
    if not sys.platform.startswith("linux"):
        raise MisvoError("Model-written code runs only on Linux: the sandbox needs its kernel.")
    return link.start(plan, _package_folders(packages), settings)


def _package_folders(names):
    """The folders of the installed packages that programs may import, found without importing them."""
    folders = []
    for name in names:
        spec = importlib.util.find_spec(name)
        for folder in spec.submodule_search_locations if spec else ():
            folders += [path for path in (folder, f"{folder}.libs") if os.path.isdir(path)]
    return folders


def _describe(zygote):
    facts, layers, missing = zygote.facts, [], []
    if zygote.bubblewrap:
        layers.append("bubblewrap")
    if facts["plan"] != "none" or zygote.bubblewrap:
        layers += ["user, mount, pid, network, ipc and uts namespaces", "private read-only file system"]
    else:
        why = "; ".join(dict.fromkeys(facts["problems"].values())) or "switched off"
        missing.append(f"no namespaces of its own ({why})")
        if facts["landlock"]:
            layers.append("Landlock")
        else:
            missing.append("no Landlock either, so it can read what this user can read")
    if facts["seccomp"]:
        layers.append("system-call filter")
    else:
        missing.append("no system-call filter against sockets, children and signals")
    layers += ["no new privileges", "no capabilities", "resource limits"]
    layers += ["scrubbed environment", "empty temporary folder"]
    return {"plan": facts["plan"], "bubblewrap": zygote.bubblewrap, "layers": layers, "missing": missing}


@functools.cache
def isolation_report():
    """What stands between a model-written program and this machine, found out by building one cell."""
    zygote = _start("auto", (), asdict(Limits()))
    try:
        return _describe(zygote)
    finally:
        zygote.close()
