"""What a reader sees: figures in rows and tables against direct use of judge, reward and candidates.jsonl."""

import json
import statistics
import tomllib
from pathlib import Path

import numpy as np
import pytest
from bench_helpers import make_world, raw_config, read_lines
from conftest import make_model, make_tokenizer

import misvo
from misvo import tasks
from misvo.bench import config as configs
from misvo.bench import figures, report, results, sweep
from misvo.bench.plan import make_plan
from misvo.errors import MisvoError

ROOT = Path(__file__).parent.parent
HELD_OUT = """
def vowels(completions, **_):
    return [float(sum(text.count(v) for v in "aeiou")) for text in completions]

def fails_on_c(prompts, completions, **_):
    if prompts[0] == "c d":
        raise RuntimeError("no vowels today")
    return vowels(completions)
"""


def reading_config(folder: Path, held_out="vowels") -> dict:
    """Two methods of which one passes over its raw best, and best-of-n twice."""
    raw = raw_config(folder, methods=("best-of-n", "aisp"), seeds=(1, 2), batch=2)
    raw["methods"] += [
        {"preset": "auto", "learning_rate": 0.1},
        {"method": "best-of-n", "label": "best-of-n, more", "steps": 5},
    ]
    raw["settings"].pop("learning_rate")
    return {**raw, "judge": str(folder / "judge"), "held_out": f"{folder}/held_out.py:{held_out}", "encoder": "none"}


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = make_world(tmp_path_factory.mktemp("world"))
    make_model("gemma3", seed=7).save_pretrained(folder / "judge")
    make_tokenizer().save_pretrained(folder / "judge")
    (folder / "held_out.py").write_text(HELD_OUT)
    return folder


@pytest.fixture(scope="module")
def run(world, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "read"
    sweep.run(configs.from_dict(reading_config(world)), folder)
    return folder


def candidates_of(run):
    found = {}
    for candidate in read_lines(run / "candidates.jsonl"):
        found.setdefault((candidate["method"], candidate["prompt"], candidate["seed"]), []).append(candidate)
    return found


def test_rows_carry_what_was_returned_and_the_raw_best(run, world):
    judge = misvo.Judge.from_pretrained(world / "judge")
    rows, candidates = read_lines(run / "rows.jsonl"), candidates_of(run)
    width = misvo.Policy.from_pretrained(world / "model").head.hidden_size
    assert len(rows) == 40
    for row in rows:
        mine = candidates[row["method"], row["prompt"], row["seed"]]
        raw = max(mine, key=lambda c: c["reward"])
        assert (row["raw_best"]["step"], row["raw_best"]["rollout"]) == (raw["step"], raw["rollout"])
        assert row["raw_best"]["reward"] == raw["reward"] >= row["reward"]
        for place, figures_of in ((row["best"], row), (row["raw_best"], row["raw_best"])):
            text = place["text"]
            expected = judge.fluency([row["prompt_text"]], [text])[0]
            assert figures_of["fluency"] == (None if expected is None else pytest.approx(expected, abs=1e-4))
            assert figures_of["held_out"] == sum(text.count(v) for v in "aeiou")
            assert figures_of["diversity"] == misvo.metrics.diversity(text) and figures_of["coherence"] is None
        last = [c for c in mine if c["step"] == max(c["step"] for c in mine)]
        nats = sum(c["kl"] or 0.0 for c in last) / sum(len(c["tokens"]) for c in last)
        assert row["kl_per_token"] == pytest.approx(nats, rel=1e-5, abs=1e-7)
        if row["method"] == "aisp":
            assert row["reference_rewards"] is None and row["kl_per_token"] > 0.01
        else:
            first = [c["reward"] for c in mine if row["method"].startswith("best-of-n") or c["step"] == 0]
            expected = {"mean": statistics.mean(first), "std": statistics.stdev(first), "count": len(first)}
            assert row["reference_rewards"] == pytest.approx(expected)
        assert row["state_bytes"] == {"auto": 4 * width, "aisp": 4 * width * 10}.get(row["method"], 0)
    passed_over = [row for row in rows if row["raw_best"]["text"] != row["best"]["text"]]
    assert passed_over and {row["method"] for row in passed_over} == {"auto"}


def shown(table, method, heading):
    index = table["columns"].index(heading)
    return next(row[index] for row in table["rows"] if row[2] == method)


def test_the_table_has_means_and_paired_differences_from_best_of_n(run, tmp_path):
    """By hand from candidates.jsonl and the rows; the baseline is the best-of-n that is called so."""
    table = report.make([run], tmp_path).figures["reader"]
    rows = {(row["method"], row["prompt"], row["seed"]): row for row in read_lines(run / "rows.jsonl")}
    prompts, seeds = sorted({key[1] for key in rows}), (1, 2)
    gains = {"auto": {}, "best-of-n": {}, "aisp": {}}
    for (method, prompt, seed), mine in candidates_of(run).items():
        if method in gains:
            pool = [c["reward"] for c in candidates_of(run)["best-of-n", prompt, seed]]
            last = statistics.mean(c["reward"] for c in mine if c["step"] == 2)
            gains[method][prompt, seed] = (last - statistics.mean(pool)) / statistics.stdev(pool)
    for method, name in (("auto", "auto"), ("aisp", "AISP")):
        mean = statistics.mean(gains[method].values())
        difference = mean - statistics.mean(gains["best-of-n"].values())
        text = shown(table, name, "Last step's mean, reference SDs ↑")
        assert text.startswith(f"{mean:.3f}: {difference:+.3f} [")
    fluency = {
        method: [np.mean([rows[method, prompt, seed]["fluency"] for seed in seeds]) for prompt in prompts]
        for method in ("aisp", "best-of-n")
    }
    assert shown(table, "BoN (N=12)", "Fluency ↑") == f"{np.mean(fluency['best-of-n']):.3f}"
    text = shown(table, "AISP", "Fluency ↑")
    apart = np.array(fluency["aisp"]) - np.array(fluency["best-of-n"])
    assert text.startswith(f"{np.mean(fluency['aisp']):.3f}: {apart.mean():+.3f} [")
    low, high = map(float, text.partition("[")[2].rstrip("]").split(", "))
    assert apart.min() - 1e-3 <= low < apart.mean() < high <= apart.max() + 1e-3
    assert "Coherence ↑" not in table["columns"]  # nobody was asked
    assert shown(table, "best-of-n, more", "Reward returned ↑").count("[") == 1


def test_reward_against_fluency_is_drawn_where_a_judge_read(run, tmp_path):
    made = report.make([run], tmp_path)
    assert "reward_fluency-tiny-prompts.png" in made.files
    loaded = results.load([run])
    axis = figures.reward_against_fluency(loaded, "tiny", "prompts").axes[0]
    drawn = {tuple(np.round(line.get_xydata()[0], 9)) for line in axis.lines if len(line.get_xydata()) == 1}
    rows = [row for row in read_lines(run / "rows.jsonl") if row["method"] == "aisp"]
    point = tuple(np.round([np.mean([row[name] for row in rows]) for name in ("fluency", "reward")], 9))
    assert point in drawn and str(loaded.judges.copy().pop()) in axis.get_xlabel()


def test_runs_of_old_load_and_go_on(run, world, tmp_path):
    """Rows and a config without the new columns: a report without them, and a resume that adds what is missing."""
    raw = reading_config(world)
    del raw["judge"], raw["held_out"]
    old = tmp_path / "old"
    old.mkdir()
    resolved = json.loads((run / "config.json").read_text())
    (old / "config.json").write_text(json.dumps({k: v for k, v in resolved.items() if k not in ("judge", "held_out")}))
    (old / "candidates.jsonl").write_bytes((run / "candidates.jsonl").read_bytes())
    fresh = ("fluency", "held_out", "kl_per_token", "raw_best", "reference_rewards")
    rows = [{k: v for k, v in row.items() if k not in fresh} for row in read_lines(run / "rows.jsonl")]
    (old / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:-3]))
    made = report.make([old], tmp_path / "report")
    assert "reader" not in made.figures and made.figures["prompts"]["rows"]
    assert not any(name.startswith("reward_fluency") for name in made.files)
    done = sweep.run(configs.from_dict(raw), old)
    assert done.fresh == 3 and done.rows == 40
    with pytest.raises(MisvoError, match=r"other settings \(judge: null → "):
        sweep.run(configs.from_dict(reading_config(world)), old)


def test_a_held_out_reward_that_fails_is_a_failed_prompt(world, tmp_path):
    raw = reading_config(world, held_out="fails_on_c")
    raw["methods"], raw["seeds"] = [{"method": "best-of-n"}], [1]
    done = sweep.run(configs.from_dict(raw), tmp_path / "r")
    errors = [row for row in read_lines(tmp_path / "r" / "rows.jsonl") if "error" in row]
    assert [row["prompt"] for row in errors] == ["p2"] and "held_out: " in done.failed[0]
    assert "no vowels today" in done.failed[0]


def test_what_reads_loads_before_anything_is_steered_and_only_where_something_is_left(run, world, tmp_path):
    raw = reading_config(world)
    raw["judge"] = "no/such-model"
    with pytest.raises(MisvoError, match="no model could be loaded from the name 'no/such-model'"):
        sweep.run(configs.from_dict(raw), tmp_path / "r")
    assert not (tmp_path / "r").exists()
    hidden = (world / "judge").rename(world / "hidden")
    try:
        assert sweep.run(configs.from_dict(reading_config(world)), run).fresh == 0
    finally:
        hidden.rename(world / "judge")


# Which prompts


def write_prompts(path, texts, name="history"):
    path.write_text("".join(json.dumps({name: text}) + "\n" for text in texts))
    return path


def test_first_longest_and_more_data_choose_prompts(world, tmp_path):
    """Every third prompt has five tokens more than the others; tokens are those of the model."""
    texts = [" ".join("abcdefgh"[: 3 + 5 * (n % 3 == 0)]) for n in range(20)]
    write_prompts(tmp_path / "p.jsonl", texts)
    more = ('{"id": "x", "prompt": "a b c d e f g h"}', '{"id": "y", "prompt": "a"}')
    (tmp_path / "more.jsonl").write_text("\n".join(more))
    raw = raw_config(world)
    raw["tasks"] = [
        {
            "name": "prompts",
            "data": "p.jsonl",
            "first": 4,
            "longest": 5,
            "prompts": 6,
            "more_data": "more.jsonl",
            "more_prompts": 1,
            "reward": "length:3",
        }
    ]
    task = make_plan(configs.from_dict(raw, folder=tmp_path)).tasks["prompts"]
    assert [row.id for row in task.rows] == ["x", "0004", "0005", "0007", "0008", "0010", "0011"]
    assert task.source == "more.jsonl and p.jsonl"
    for change, says in (
        ({"first": 20}, "none from 20 on"),
        ({"longest": 2}, "no prompt of at most 2 tokens"),
        ({"more_data": "p.jsonl", "more_prompts": 5}, "have the id '0004'"),
        ({"first": -1}, "first of .* must be a whole number of at least 0"),
        ({"more_prompts": 0}, "more_prompts of .* must be a whole number of at least 1"),
        ({"longest": 1.5}, "longest of .* must be a whole number"),
    ):
        bad = {**raw, "tasks": [{**raw["tasks"][0], **change}]}
        with pytest.raises(MisvoError, match=says):
            make_plan(configs.from_dict(bad, folder=tmp_path))


def test_bad_readers_are_one_sentence(world):
    for name in ("judge", "held_out"):
        with pytest.raises(MisvoError, match=f"{name} must be a text such as"):
            configs.from_dict({**raw_config(world), name: 3})


def test_untuned_asks_for_the_same_24_prompts_of_every_smooth_reward(world, tmp_path):
    write_prompts(tmp_path / "posts.jsonl", [f"a b c {'d ' * (n % 4 * 80)}" for n in range(160)])
    raw = tomllib.loads((ROOT / "configs" / "untuned.toml").read_text())
    raw["models"] = [{"path": str(world / "model")}]  # its tokenizer counts
    config = configs.from_dict(raw, folder=ROOT / "configs", data={"": str(tmp_path / "posts.jsonl")})
    plan = make_plan(config)
    shared = {label: plan.tasks[label] for label in ("sentiment", "similarity", "reading ease")}
    assert len(plan.tasks) == 5 and len({task.digest for task in shared.values()}) == 1
    ids = [row.id for row in shared["sentiment"].rows]
    assert ids[:16] == [f"instruction-{n:02d}" for n in range(16)]
    assert ids[16:20] == ["0100", "0101", "0104", "0105"] and len(ids) == 24
    names = {cell.method.label: cell.settings for cell in config.cells() if cell.task.label == "sentiment"}
    assert names["best-of-n, equal time"].steps > names["best-of-n"].steps == 6
    samplers = {(s.rollouts, s.max_new_tokens, s.temperature, s.top_p) for s in names.values()}
    assert samplers == {(16, 40, 0.6, 0.9)} and len(names) == 10


def test_a_named_file_wins_over_the_one_for_all(world, tmp_path):
    one, two = (write_prompts(tmp_path / f"{n}.jsonl", [f"a {n}"]) for n in "bc")
    raw = raw_config(world)
    entry = {"name": "prompts", "data": "asked.jsonl", "reward": "length:3"}
    raw["tasks"] = [{**entry, "label": name} for name in "xyz"] + [{"name": "prompts", "label": "own"}]
    config = configs.from_dict(raw, data={"": str(one), "y": str(two)})
    assert [task.data for task in config.tasks] == [str(one), str(two), str(one), None]


def test_tasks_are_cut_and_joined():
    task = tasks.load("prompts")
    assert [row.id for row in task.since(10).rows] == ["own-10", "own-11"]
    lengths = {row.id: len(row.prompt) for row in task.rows}
    kept = task.no_longer_than(70, len).rows
    assert {row.id for row in kept} == {name for name, length in lengths.items() if length <= 70} and kept
