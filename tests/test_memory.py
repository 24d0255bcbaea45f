"""Nothing grows with rollouts × positions × vocabulary: the peak memory of a run, in a process of its own."""

import subprocess
import sys
import weakref
from pathlib import Path

import pytest
from conftest import letter_reward, make_policy

import misvo
from misvo.engines.torch import TorchEngine
from misvo.law_step import LawStep

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
