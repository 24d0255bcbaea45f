"""What the benchmarks share: prompts, a model whose responses all have full length, clocks and memory marks."""

import ctypes
import gc
import json
import os
import subprocess
import sys
import time
from itertools import accumulate
from pathlib import Path

from misvo.threads import use_free_cores

use_free_cores()

import torch

import misvo
from misvo.bench.environment import PeakMemory

PROMPTS = [
    f"{topic} I have tried a few things already and I would like to hear what you would do, step by step, and why."
    for topic in (
        "My flatmate plays the drums at night and I have an exam next week.",
        "My sourdough bread comes out flat and dense every single time I bake it.",
        "I want to start running but my knees hurt after the first kilometre.",
        "The tomatoes on my balcony have yellow leaves and brown spots since last week.",
        "My old laptop takes ten minutes to start and the fan is always loud.",
        "I have to give a speech at my sister's wedding and I am terribly nervous.",
        "Our team meetings take two hours and nobody remembers what was decided.",
        "I would like to learn Spanish before a trip in three months from now.",
    )
]


def load(name="smollm2-135m", **options):
    """The embedded model, with ends of text ignored, so that all competitors do the same work."""
    policy = misvo.Policy.from_pretrained(name, **options)
    policy.eos_tokens = torch.tensor([], dtype=torch.long)
    return policy


def seconds(call):
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def cpu_seconds(call):
    """CPU time of this process: what other processes disturb less than the clock."""
    started = time.process_time()
    call()
    return time.process_time() - started


def peak_bytes(call):
    """Peak resident memory of a call above what was held before it. Meant for a process that does nothing else."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what was freed before the call must not hide what the call takes
    before = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    with PeakMemory(torch.device("cpu")) as peak:
        call()
    return peak.bytes - before


def allocated_bytes(call):
    """The most that torch had allocated at once during a call, above what it held before: tensors and nothing else."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        call()
    changes = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    return max(accumulate(event.nbytes() for event in sorted(changes, key=lambda event: event.start_ns())))


def in_a_process_of_its_own(script, *arguments):
    """The JSON that the last line of another run of a script prints: memory is measured in a fresh heap."""
    command = [sys.executable, script, *map(str, arguments)]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(run.stdout.splitlines()[-1])


def spread(values):
    return max(values) - min(values)


def write_json(path, report):
    if path:
        threads = {"torch": torch.__version__, "threads": torch.get_num_threads()}
        Path(path).write_text(json.dumps({**threads, **report}, indent=2) + "\n")
