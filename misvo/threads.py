"""How many threads a program of ours uses: as many as there are cores that nobody else keeps busy.

OpenMP's threads meet hundreds of times for every token, and wait for the slowest. On a quiet machine as many threads as
cores, spinning while they wait, are the quickest; beside a process that keeps a core busy they are two to six times
slower than one thread less (docs/speed.md, `benchmarks/threads.py`). So a program looks around before it imports torch.
A library sets nothing: only programs call this, and what is set in the environment stays.
"""

import os
import time
from collections.abc import Callable
from pathlib import Path

LOOK = 0.1  # seconds, at least
SETTINGS = ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
STAT = Path("/proc/stat")


def use_free_cores(meanwhile: Callable[[], object] | None = None) -> None:
    """Leave cores to those who are at work on them. To be called before torch is imported; a program that has something
    else to do before that does it `meanwhile`, instead of waiting."""
    if any(name in os.environ for name in SETTINGS) or not STAT.exists():
        return
    cores, busy = len(os.sched_getaffinity(0)), busy_cores(meanwhile)
    if round(busy) >= 1:
        os.environ["OMP_NUM_THREADS"] = str(max(1, cores - round(busy)))


def busy_cores(meanwhile: Callable[[], object] | None = None) -> float:
    """How many cores are at work now, this process not counted."""
    before, own, started = _ticks(), time.process_time(), time.monotonic()
    if meanwhile is not None:
        meanwhile()
    time.sleep(max(0.0, LOOK - (time.monotonic() - started)))
    idle, whole = (after - then for after, then in zip(_ticks(), before, strict=True))
    share = (time.process_time() - own) / (time.monotonic() - started)
    return max(0.0, os.cpu_count() * (1 - idle / max(1, whole)) - share)


def _ticks() -> tuple[int, int]:
    """Of all cores together since the start: ticks in which they were idle, and all ticks."""
    first = STAT.read_text().split("\n", 1)[0]
    user, nice, system, idle, waiting, *rest = map(int, first.split()[1:9])
    return idle + waiting, user + nice + system + idle + waiting + sum(rest)
