"""How many threads our own programs use: what is free, and nothing where the user has spoken."""

import json
import multiprocessing
import os
import subprocess
import sys

import pytest

from misvo import threads


def in_a_fresh_process(code, **environment):
    """What it prints, where nobody has said how many threads there are to be."""
    clean = {name: value for name, value in os.environ.items() if name not in threads.SETTINGS}
    done = subprocess.run([sys.executable, "-c", code], env={**clean, **environment}, capture_output=True, check=True)
    return json.loads(done.stdout)


def chosen(call="threads.use_free_cores()", **environment):
    """What a fresh process sets for itself."""
    code = (
        f"import json, os; from misvo import cli_process, threads; {call}; "
        "print(json.dumps({name: os.environ.get(name) for name in threads.SETTINGS}))"
    )
    return in_a_fresh_process(code, **environment)


@pytest.mark.parametrize(
    ("cores", "busy", "expected"), [(2, 0.2, None), (2, 1.0, "1"), (2, 2.0, "1"), (16, 0.6, "15"), (16, 5.1, "11")]
)
def test_a_program_leaves_busy_cores_to_others(monkeypatch, cores, busy, expected):
    for name in threads.SETTINGS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(threads.os, "sched_getaffinity", lambda _: range(cores))
    monkeypatch.setattr(threads, "busy_cores", lambda _: busy)
    threads.use_free_cores()
    assert os.environ.get("OMP_NUM_THREADS") == expected
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)


@pytest.mark.parametrize("name", threads.SETTINGS)
def test_what_the_user_has_set_stays(name):
    assert chosen(**{name: "3"}) == {**dict.fromkeys(threads.SETTINGS), name: "3"}


def _spin(until):
    while not until.is_set():
        pass


@pytest.mark.skipif(not threads.STAT.exists(), reason="tells load from /proc/stat")
def test_a_busy_process_is_seen():
    """As many processes at work as there are cores: hardly anything is idle, and one thread is what is left."""
    done = multiprocessing.Event()
    others = [multiprocessing.Process(target=_spin, args=(done,), daemon=True) for _ in range(os.cpu_count())]
    for other in others:
        other.start()
    try:
        assert threads.busy_cores() > 0.5 * os.cpu_count()
        for call in ("threads.use_free_cores()", "cli_process.quiet_libraries(decoding=True)"):
            assert int(chosen(call)["OMP_NUM_THREADS"]) <= max(1, os.cpu_count() // 2)
    finally:
        done.set()
        for other in others:
            other.join()


@pytest.mark.skipif(not threads.STAT.exists(), reason="tells load from /proc/stat")
def test_what_is_done_meanwhile_is_no_load():
    """A core that this process itself keeps busy while it looks is free for its threads."""
    work = "def work():\n    until = time.monotonic() + 1\n    while time.monotonic() < until: pass"
    code = f"import time\nfrom misvo import threads\n{work}\nprint([threads.busy_cores(work), threads.busy_cores()])"
    busy = [in_a_fresh_process(code) for _ in range(3)]
    assert min(worked - waited for worked, waited in busy) < 0.7


@pytest.mark.skipif(not threads.STAT.exists(), reason="tells load from /proc/stat")
def test_torch_is_not_there_before_threads_are_chosen():
    code = "import json, sys; from misvo.cli_process import quiet_libraries; quiet_libraries(decoding=True); "
    print_it = "print(json.dumps(['transformers' in sys.modules, 'torch' in sys.modules]))"
    assert in_a_fresh_process(code + print_it) == [True, False]
