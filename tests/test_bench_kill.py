"""A run that is killed loses nothing: SIGKILL at ten random moments, then resume, equals the undisturbed run."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
from bench_helpers import content, make_config, make_world, raw_config, read_lines, to_toml

from misvo.bench import sweep
from misvo.bench.folder import RunFolder
from misvo.bench.plan import make_plan
from misvo.bench.work import Outcome
from misvo.errors import MisvoError

PROBE = Path(__file__).parent / "kill_probe.py"


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return make_world(tmp_path_factory.mktemp("world"))


@pytest.mark.parametrize("kills", [4, pytest.param(10, marks=pytest.mark.slow)])
def test_kills_and_a_resume_equal_an_undisturbed_run(kills, world, tmp_path):
    path = tmp_path / "tiny.toml"
    path.write_text(to_toml(raw_config(world)))
    command = [sys.executable, str(PROBE), str(path), str(tmp_path / "killed"), str(kills), "7"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=PROBE.parent.parent)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["killed"] == kills and told["code"] == 0
    assert len(set(told["rows"])) > 2, "the kills came at moments that were too much alike"
    calm = subprocess.run(
        [sys.executable, "-m", "misvo.cli", "bench", str(path), "--output", str(tmp_path / "calm")],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert calm.returncode == 0, calm.stderr
    one, other = content(tmp_path / "killed"), content(tmp_path / "calm")
    assert len(one["rows"]) == 5 * 3 * 2 and len(one["candidates"]) == 30 * 12
    assert len(one["vectors"]) == 5 * 2 * 2  # misvo and aisp have vectors
    assert one == other


class FakePool:
    """Answers at once with made-up rows, so that the folder can be cut at every byte."""

    workers = 1

    def __init__(self):
        self.ran = []

    def run(self, chunks, on_step):
        for chunk in chunks:
            self.ran.append(chunk)
            yield chunk, [fake_outcome(chunk, index) for index in range(len(chunk.rows))], 1.0

    def close(self):
        pass


def fake_outcome(chunk, index):
    name = dict(zip(("model", "task", "prompt", "method", "seed"), chunk.keys[index], strict=True))
    reward = random.Random(repr(name)).random()
    candidates = [
        {**name, "step": 0, "rollout": k, "tokens": [k], "text": "é\n\u2028x", "reward": reward} for k in range(3)
    ]
    trace = [{"step": 0, "mean": reward, "max": reward, "best": reward, "kl": 0.0, "norm": 0.0}]
    row = {
        **name,
        "reward": reward,
        "best": {"step": 0, "rollout": 0, "text": "é\n\u2028x"},
        "raw_best": {"step": 0, "rollout": 1, "text": "é\n\u2028x"},
        "reference": None,
        "trace": trace,
        "tokens": 3,
    }
    row |= {"diversity": 1.0, "coherence": None, "kl": 0.0, "kl_ref": None, "norm": None, "seconds": {"wall": 1.0}}
    return Outcome(row, candidates)


def test_a_run_cut_at_any_byte_is_made_whole_again(world, tmp_path):
    config = make_config(world, batch=2, methods=("misvo", "best-of-n"))
    sweep.run(config, tmp_path / "whole", pool=FakePool())
    want = content(tmp_path / "whole")
    rows, candidates = ((tmp_path / "whole" / name).read_bytes() for name in ("rows.jsonl", "candidates.jsonl"))
    ends = [json.loads(line)["candidates_end"] for line in rows.splitlines()]
    chance = random.Random(3)
    for trial in range(60):
        # What a crash leaves: rows up to some byte, and at least the responses of the rows that are there.
        cut = chance.choice([0, len(rows), chance.randrange(len(rows))])
        whole = rows[:cut].count(b"\n")
        least = ends[whole - 1] if whole else 0
        folder = tmp_path / f"cut{trial}"
        folder.mkdir()
        for name in ("config.json", "environment.json"):
            (folder / name).write_bytes((tmp_path / "whole" / name).read_bytes())
        (folder / "rows.jsonl").write_bytes(rows[:cut])
        (folder / "candidates.jsonl").write_bytes(candidates[: chance.randint(least, len(candidates))])
        pool = FakePool()
        done = sweep.run(config, folder, pool=pool)
        assert content(folder) == want and done.fresh == 20 - whole
        assert all(not set(chunk.keys) <= set(_keys(rows[:cut])) for chunk in pool.ran)  # nothing whole is done again


def _keys(data):
    lines = [json.loads(line) for line in data.splitlines(keepends=True) if line.endswith(b"\n")]
    return [tuple(row[name] for name in ("model", "task", "prompt", "method", "seed")) for row in lines]


def test_rows_whose_responses_were_lost_are_done_again(world, tmp_path):
    """After a power cut the row may be on disk and its responses not."""
    config = make_config(world, batch=2, methods=("misvo",))
    sweep.run(config, tmp_path / "r", pool=FakePool())
    want, path = content(tmp_path / "r"), tmp_path / "r" / "candidates.jsonl"
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    assert sweep.run(config, tmp_path / "r", pool=FakePool()).fresh > 0
    assert content(tmp_path / "r") == want


def test_damage_in_the_middle_is_an_error(world, tmp_path):
    config = make_config(world, batch=2, methods=("misvo",))
    sweep.run(config, tmp_path / "r", pool=FakePool())
    path = tmp_path / "r" / "rows.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([lines[0], lines[1][:20] + "\n", *lines[2:]]))
    with pytest.raises(MisvoError, match=r"line 2 of .* is damaged"):
        sweep.run(config, tmp_path / "r", pool=FakePool())


def test_changed_settings_are_refused_with_the_difference(world, tmp_path):
    config = make_config(world, batch=2, methods=("misvo", "aisp"))
    sweep.run(config, tmp_path / "r", pool=FakePool())
    before = content(tmp_path / "r")
    with pytest.raises(MisvoError, match=r"steps: 3 → 4 in 2 cells.*give another folder"):
        sweep.run(make_config(world, batch=2, methods=("misvo", "aisp"), steps=4), tmp_path / "r", pool=FakePool())
    with pytest.raises(MisvoError, match=r"seeds: \[1, 2\] → \[1\]"):
        sweep.run(make_config(world, batch=2, methods=("misvo", "aisp"), seeds=(1,)), tmp_path / "r", pool=FakePool())
    # Other prompts under the same ids are another run too.
    other = json.loads(json.dumps(raw_config(world, batch=2, methods=("misvo", "aisp"))))
    moved = tmp_path / "prompts.jsonl"
    moved.write_text((world / "prompts.jsonl").read_text().replace('"c d"', '"c e"'))
    other["tasks"][0]["data"] = str(moved)
    from misvo.bench import config as configs

    with pytest.raises(MisvoError, match="digest"):
        sweep.run(configs.from_dict(other), tmp_path / "r", pool=FakePool())
    assert content(tmp_path / "r") == before
    assert sweep.run(config, tmp_path / "r", pool=FakePool()).fresh == 0


def test_two_writers_are_refused(world, tmp_path):
    config = make_config(world, batch=2, methods=("misvo",))
    resolved = make_plan(config).resolved("none")
    with RunFolder(tmp_path / "r", resolved, {}), pytest.raises(MisvoError, match="another misvo is at work"):
        sweep.run(config, tmp_path / "r", pool=FakePool())
    assert sweep.run(config, tmp_path / "r", pool=FakePool()).rows == 10


def test_every_session_is_on_record(world, tmp_path):
    config = make_config(world, batch=2, methods=("misvo",))
    for _ in range(2):
        sweep.run(config, tmp_path / "r", pool=FakePool())
    sessions = json.loads((tmp_path / "r" / "environment.json").read_text())
    assert [session["rows_before"] for session in sessions] == [0, 10]
    assert sessions[0]["packages"]["torch"] and sessions[0]["machine"]["cores"]
    summary = json.loads((tmp_path / "r" / "summary.json").read_text())
    rewards = [row["reward"] for row in read_lines(tmp_path / "r" / "rows.jsonl")]
    assert summary["complete"]
    assert summary["cells"]["tiny × prompts × misvo"]["reward"] == pytest.approx(sum(rewards) / 10)
