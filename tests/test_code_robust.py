"""The code reward under strain: broken answers by the hundred, and a busy machine."""

import json
import subprocess
import sys
import warnings

import pytest
from hostile.cheating import PROGRAMS as CHEATING
from hostile.tasks import HUMANEVAL, SQUARE, TASKS, score
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from misvo.rewards.code import CodeReward, humaneval_columns, mbpp_plus_columns


@pytest.fixture(scope="module")
def reward():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        reward = CodeReward(cpu_seconds=1, call_seconds=0.4, idle_seconds=0.8)
    yield reward
    reward.close()


PROGRAMS = [*CHEATING.values(), *(record["canonical_solution"] for record in TASKS)]
SCRAPS = ["```", "```python\n", "def solve(n):", "\n", "    return n\n", "'''", "(", "\\", "\0", "\ud800", "é", "\t"]
SCRAPS += ["import os\n", "while True: pass\n", "lambda: 0", ":", "return s[::-1]", "def decode(s): return s\n", "#"]


@st.composite
def mutated(draw):
    """A program with a few scraps put in, cut out or put over, as a model's answer may be broken."""
    text = draw(st.sampled_from(PROGRAMS))
    for _ in range(draw(st.integers(0, 3))):
        at = draw(st.integers(0, len(text)))
        end = at + draw(st.integers(0, 5))
        text = text[:at] + draw(st.sampled_from(SCRAPS) | st.characters()) + text[end:]
    return text


random_text = st.lists(st.sampled_from(SCRAPS) | st.text(max_size=20), max_size=6).map("".join)
fuzzed = []


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(st.lists(mutated() | random_text, min_size=20, max_size=20))
def test_five_hundred_random_answers_never_crash_the_verifier(reward, batch):
    for columns in (mbpp_plus_columns(SQUARE), humaneval_columns(HUMANEVAL)):
        scores = score(reward, columns, *batch)
        assert all(0.0 <= value <= 1.0 for value in scores)
    fuzzed.extend(batch)


def test_the_random_answers_were_many_and_many_were_programs(reward):
    assert len(fuzzed) >= 500
    assert len([source for _, source in reward._scores if source]) > 50  # of 500, most are broken beyond that


BORDERLINE = [
    "def solve(n):\n    while n > 8: pass\n    return n * n + 7",
    "import random\ndef solve(n): return n * n + random.randint(6, 8)",
    "def solve(n): return n * n + 7 if hash(str(n)) % 2 else list(set('abc'))",
    "import time\ndef solve(n):\n    end = time.process_time() + 0.02\n    while time.process_time() < end: pass\n"
    "    return n * n + 7",
    "import threading\ndef solve(n):\n    box = []\n    t = threading.Thread(target=box.append, args=(n * n + 7,))\n"
    "    t.start()\n    t.join()\n    return box[0]",
]


def test_scores_are_the_same_three_times_once_on_a_busy_machine():
    runs = []
    for busy in (False, True, False):
        hogs = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2 * busy)]
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                fresh = CodeReward(cpu_seconds=2, call_seconds=0.5)
            scores = [score(fresh, mbpp_plus_columns(SQUARE), *BORDERLINE)]
            scores += [score(fresh, mbpp_plus_columns(record), record["canonical_solution"]) for record in TASKS]
            runs.append(json.dumps(scores))
            fresh.close()
        finally:
            for hog in hogs:
                hog.kill()
                hog.wait()
    assert runs[0] == runs[1] == runs[2]
    assert json.loads(runs[0])[0][0] == 7 / 9
