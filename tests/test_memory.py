"""Nothing grows with rollouts × positions × vocabulary: the peak memory of a run, in a process of its own."""

import subprocess
import sys
from pathlib import Path

import pytest

VOCAB, ROLLOUTS, LENGTH = 200_000, 16, 64


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the high-water mark can be reset on Linux only")
@pytest.mark.parametrize("options", ["{}", "{'kl_ref': True}"])
def test_peak_memory_is_a_fraction_of_one_full_tensor(options):
    probe = [sys.executable, "memory_probe.py", str(VOCAB), str(ROLLOUTS), str(LENGTH), options]
    run = subprocess.run(probe, cwd=Path(__file__).parent, capture_output=True, text=True, check=True)
    peak = int(run.stdout.split()[0])
    full = 4 * ROLLOUTS * LENGTH * VOCAB
    assert 0 < peak < full / 4, f"{peak / 2**20:.0f} MiB of {full / 2**20:.0f}"
