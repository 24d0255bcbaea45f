"""All 160 MBPP+ tasks of the shared data, where it is present: references 1.0, systematic errors less, every time.

Slow: some references alone need seconds of CPU time.
"""

import json
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from misvo.rewards.code import CodeReward, CodeTask, mbpp_plus_columns, mbpp_plus_prompt
from misvo.sandbox.codec import loads

DATA = Path(__file__).parent.parent.parent / "shared" / "data" / "mbpp_plus.jsonl"
# 120: its assertions use math without importing it. 164: a wrong reference (it counts square roots twice and adds 1).
DISAGREES = {"Mbpp/120", "Mbpp/164"}
# 255 lists combinations: 13 of its answers are over the sandbox's size for one answer, and are not held out.
SHORTENED = {"Mbpp/255"}

WRONG = {
    "None": "return None",
    "its input": "return a[0]",
    "its last input": "return a[-1]",
    "all its input": "return a",
    "off by one": """
    def bump(v):
        if isinstance(v, bool): return not v
        if isinstance(v, (int, float)): return v + 1
        if isinstance(v, str): return v + "x"
        if isinstance(v, (list, tuple)): return type(v)([bump(v[0]), *v[1:]]) if v else type(v)([0])
        if isinstance(v, set): return v | {"one more"}
        if isinstance(v, dict): return {**v, "one more": 1}
        return 1
    return bump(_right(*a))
""",
}

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not DATA.exists(), reason="the shared MBPP+ data is not here")]


@pytest.fixture(scope="module")
def records():
    return [json.loads(line) for line in DATA.read_text().splitlines()]


def answers(record):
    """The reference in two forms, then the wrong programs."""
    source, name = record["canonical_solution"], record["entry_point"]
    wrong = [f"{source}\n_right = {name}\ndef {name}(*a):\n    {body.strip()}\n" for body in WRONG.values()]
    return [source, f"Here:\n```python\n{source}\n```\n", *wrong]


def score_all(records):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        reward = CodeReward()
    scores, held_out = {}, {}
    for record in records:
        columns, texts = mbpp_plus_columns(record), answers(record)
        rows = {name: [value] * len(texts) for name, value in columns.items()}
        scores[record["task_id"]] = reward(prompts=["?"] * len(texts), completions=texts, **rows)
        tests = reward._tests[CodeTask(**columns)]
        held_out[record["task_id"]] = len(tests), len(loads(columns["calls"]))
    reward.close()
    return scores, held_out


def test_all_tasks_three_times_once_on_a_busy_machine(records):
    assert len(records) == 160
    scores, held_out = score_all(records)
    for record in records:
        task, name = record["task_id"], record["entry_point"]
        scope = {}
        try:
            exec(record["canonical_solution"] + "\n" + record["assertion"], scope)
            agrees = True
        except (AssertionError, NameError):
            agrees = False
        assert agrees == (task not in DISAGREES)
        reference, fenced, *wrong = scores[task]
        assert reference == fenced == 1.0, task
        assert max(wrong) < 1.0, (task, dict(zip(WRONG, wrong, strict=True)))
        kept, total = held_out[task]
        assert kept > 50 and (kept == total) == (task not in SHORTENED), task
        assert name in mbpp_plus_prompt(record)
    hogs = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
    try:
        assert score_all(records) == (scores, held_out)
    finally:
        for hog in hogs:
            hog.kill()
            hog.wait()
    assert score_all(records) == (scores, held_out)
