"""Nothing grows with rollouts × positions × vocabulary: the peak memory of a run, in a process of its own."""

import subprocess
import sys
import time
import weakref
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from conftest import letter_reward, make_policy

import misvo
from misvo import freed
from misvo.bench.work import Worker
from misvo.engines.torch import TorchEngine
from misvo.freed import give_back
from misvo.law_step import LawStep
from misvo.server import engine_thread

VOCAB, ROLLOUTS, LENGTH = 80_000, 16, 64


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the high-water mark can be reset on Linux only")
@pytest.mark.parametrize("options", ["{}", pytest.param("{'kl_ref': True}", marks=pytest.mark.slow)])
def test_peak_memory_is_a_fraction_of_one_full_tensor(options):
    probe = [sys.executable, "memory_probe.py", str(VOCAB), str(ROLLOUTS), str(LENGTH), options]
    run = subprocess.run(probe, cwd=Path(__file__).parent, capture_output=True, text=True, check=True)
    peak = int(run.stdout.split()[0])
    full = 4 * ROLLOUTS * LENGTH * VOCAB
    assert 0 < peak < full / 4, f"{peak / 2**20:.0f} MiB of {full / 2**20:.0f}"


def test_a_step_that_is_over_is_not_held_while_the_next_one_decodes(monkeypatch):
    """But for the first one's expected rows, which the frozen Fisher matrix is made of."""
    made, alive, advance, begin = [], [], TorchEngine.advance, LawStep.open

    def watched_open(step, request):
        job = begin(step, request)
        made.append(weakref.ref(job.rollouts.score_rows))
        return job

    def watched_advance(engine):
        finished = advance(engine)
        alive.append([number for number, rows in enumerate(made) if rows() is not None])
        return finished

    monkeypatch.setattr(LawStep, "open", watched_open)
    monkeypatch.setattr(TorchEngine, "advance", watched_advance)
    misvo.steer(make_policy("llama"), "a b c", letter_reward, rollouts=4, steps=5, max_new_tokens=8, preset="paper")
    assert len(made) == 5 and {tuple(numbers) for numbers in alive} == {(0,), (0, 1), (0, 2), (0, 3), (0, 4)}


@pytest.mark.skipif(freed._trim() is None, reason="another library of C, which keeps less")
def test_what_was_freed_goes_back_to_the_machine():
    """100 MB in pieces below the last one, which stays: an allocator that gives back its end alone keeps them all."""
    process = psutil.Process()
    pieces = [torch.ones(12_500) for _ in range(2000)]
    del pieces[:-1]
    give_back()
    without = process.memory_info().rss
    pieces += [torch.ones(12_500) for _ in range(2000)]
    with_them = process.memory_info().rss
    del pieces[:-1]
    give_back()
    assert with_them - without > 80e6 and process.memory_info().rss - without < 20e6


def test_a_sweep_gives_memory_back_after_every_chunk(monkeypatch):
    order, worker = [], Worker()
    monkeypatch.setattr("misvo.bench.work.give_back", lambda: order.append("back"))
    monkeypatch.setattr(worker, "policy", lambda model: None)
    monkeypatch.setattr(worker, "reward", lambda spec: None)
    monkeypatch.setattr(worker, "run", lambda chunk, on_step: order.append("run") or ["outcome"])
    chunk = SimpleNamespace(cell=SimpleNamespace(model=None), reward="r")
    assert worker.timed(chunk)[0] == ["outcome"] and order == ["run", "back"]


def test_an_idle_server_gives_memory_back_once(monkeypatch):
    given = []
    monkeypatch.setattr(engine_thread, "IDLE", 0.05)
    monkeypatch.setattr(engine_thread, "give_back", lambda: given.append(time.monotonic()))
    engine = engine_thread.EngineThread(make_policy("llama"), None, 64)
    engine.start()
    try:
        for times in (1, 2):
            deadline = time.monotonic() + 30
            while len(given) < times and time.monotonic() < deadline:
                time.sleep(0.01)
            time.sleep(0.2)  # as long as four times it would take to happen again
            assert len(given) == times and engine.alive
            assert engine.call(lambda: "an answer").result(30) == "an answer"
    finally:
        engine.stop()
