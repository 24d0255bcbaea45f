"""Reports: figures against an independent recomputation, pictures, the page, partial runs, profiles."""

import base64
import itertools
import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
from bench_helpers import make_config, make_world, raw_config, read_lines

from misvo.bench import config as configs
from misvo.bench import figures as pictures
from misvo.bench import overall, report, results, sweep, tables
from misvo.bench import profile as profiles
from misvo.errors import MisvoError

NAMES = {"misvo": "MISVO", "best-of-n": "BoN (N=12)", "aisp": "AISP", "misvo/none": "misvo/none"}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A finished run of four cells and two seeds, with MiniLM coherence."""
    world = make_world(tmp_path_factory.mktemp("world"))
    raw = raw_config(world)
    raw["encoder"] = "minilm"
    raw["methods"].append({"cost": "none"})
    folder = tmp_path_factory.mktemp("runs") / "tiny"
    sweep.run(configs.from_dict(raw), folder)
    return folder


def column(table, heading):
    index = [name.split()[0] for name in table["columns"]].index(heading)
    return {row[1]: row[index] for row in table["rows"]}


def test_figures_agree_with_an_independent_script_to_the_last_digit(run, tmp_path):
    made = report.make([run], tmp_path)
    script = Path(__file__).parent / "recompute.py"
    done = subprocess.run(
        [sys.executable, script, run / "candidates.jsonl"], capture_output=True, text=True, check=True
    )
    independent = json.loads(done.stdout)
    assert len(independent) == 4
    loaded = results.load([run])
    for key, figures in independent.items():
        method = key.split("|")[2]
        assert column(made.figures["prompts"], "Reward")[NAMES[method]] == figures["reward"]
        assert column(made.figures["prompts"], "Diversity")[NAMES[method]] == figures["diversity"]
        cell = next(cell for cell in loaded.cells if cell.method == method)
        for name in ("mean", "max", "best"):
            assert cell.trajectory(name)[1] == pytest.approx(figures[name])
        assert cell.trajectory("best")[0] == [4, 8, 12]


def test_coherence_norm_and_deviation_from_texts_and_vectors(run, tmp_path):
    """Coherence by a direct use of MiniLM; ‖u‖ from the saved vectors; ± over prompts, seeds averaged first."""
    from misvo.rewards.similarity import SentenceEncoder

    made, rows = report.make([run], tmp_path), read_lines(run / "rows.jsonl")
    encoder = SentenceEncoder()
    mine = [row for row in rows if row["method"] == "misvo"]
    cosines = {
        (row["prompt"], row["seed"]): float(encoder([row["prompt_text"]])[0] @ encoder([row["best"]["text"]])[0])
        for row in mine
    }
    by_seed = [np.mean([value for (_, seed), value in cosines.items() if seed == s]) for s in (1, 2)]
    expected = f"{np.mean(by_seed):.3f} ± {np.std(by_seed, ddof=1):.3f}"
    assert column(made.figures["prompts"], "Coherence")["MISVO"] == expected
    norms = {}
    for row in mine:
        vectors = safetensors.torch.load_file(run / row["vectors"] / "steering.safetensors")["vectors"]
        norms.setdefault(row["prompt"], []).append(float(np.linalg.norm(vectors.double().numpy())))
    values = [np.mean(found) for found in norms.values()]
    table = made.figures["measured-kl"]
    line = next(row for row in table["rows"] if row[2] == "MISVO")
    assert line[4] == f"{np.mean(values):.2f} ± {np.std(values, ddof=1):.2f}"
    baseline = next(row for row in table["rows"] if row[2].startswith("BoN"))
    assert baseline[4:] == ["n/a", "n/a", "n/a"]


def test_the_interval_is_paired_over_prompts(run, tmp_path):
    made, rows = report.make([run], tmp_path), read_lines(run / "rows.jsonl")
    reward = {(row["method"], row["prompt"], row["seed"]): row["reward"] for row in rows}
    differences = [
        np.mean([reward["aisp", prompt, seed] - reward["best-of-n", prompt, seed] for seed in (1, 2)])
        for prompt in sorted({row["prompt"] for row in rows})
    ]
    picks = np.random.default_rng(5).integers(5, size=(200_000, 5))
    low, high = np.quantile(np.array(differences)[picks].mean(1), [0.025, 0.975])
    shown = column(made.figures["prompts"], "vs")["AISP"]
    mean, first, last = map(float, re.fullmatch(r"(\S+) \[(\S+), (\S+)\]", shown).groups())
    assert mean == pytest.approx(np.mean(differences), abs=5e-4)  # three digits are shown
    # The 2.5 % quantile of 10,000 means of five, whose standard deviation is about 0.2 of the spread and whose density
    # there is 0.058/SD, has a standard error of √(0.025·0.975/10,000)/0.058 SD = 0.005 of the spread. Ten of them.
    spread = max(differences) - min(differences)
    assert first == pytest.approx(low, abs=0.05 * spread) and last == pytest.approx(high, abs=0.05 * spread)


def test_reward_against_seconds_and_what_is_held(run, tmp_path):
    """By hand from the rows: steps add up to stages, curves to steps, and the state is the vectors that were saved."""
    mine = [row for row in read_lines(run / "rows.jsonl") if row["method"] == "misvo"]
    for row in mine:
        assert len(row["seconds"]["steps"]) == 3
        assert sum(row["seconds"]["steps"]) == pytest.approx(
            sum(row["seconds"][stage] for stage in ("decode", "reward", "update"))
        )
        vectors = safetensors.torch.load_file(run / row["vectors"] / "steering.safetensors")["vectors"]
        assert row["state_bytes"] == 4 * vectors.numel() > 0
    seconds = np.mean([row["seconds"]["prefill"] + np.cumsum(row["seconds"]["steps"]) for row in mine], axis=0)
    loaded = results.load([run])
    axes = pictures.reward_against_seconds(loaded, "tiny", "prompts").axes
    for axis, name in zip(axes, ("mean", "best"), strict=True):
        line = next(line for line in axis.lines if line.get_label() == "MISVO")
        assert line.get_xdata() == pytest.approx(seconds)
        assert line.get_ydata() == pytest.approx(
            np.mean([[step[name] for step in row["trace"]] for row in mine], axis=0)
        )
    table = report.make([run], tmp_path).figures["held"]
    held = {row[2]: row[3:] for row in table["rows"]}
    cpu = np.mean([row["seconds"]["cpu"] for row in mine])
    assert held["MISVO"][0] == f"{mine[0]['state_bytes'] / 1024:.1f}" and held["MISVO"][3] == f"{cpu:.1f}"
    assert held["BoN (N=12)"][0] == "0.0"
    for row in loaded.cells[0].rows:
        del row["seconds"]["steps"]  # as runs of old
    assert loaded.cells[0].clock() is None


def test_the_script_of_claims_reads_a_run(run):
    """Of five prompts nothing follows, but the figures are those of the rows."""
    script = Path(__file__).parent.parent / "benchmarks" / "claims.py"
    told = subprocess.run([sys.executable, script, run], capture_output=True, text=True, check=True).stdout
    rows = read_lines(run / "rows.jsonl")
    moved = {
        name: np.mean([row["kl_ref"] for row in rows if row["method"] == name]) for name in ("misvo", "misvo/none")
    }
    line = next(line for line in told.splitlines() if "KL_ref: MISVO / unregularised below 1" in line)
    _, _, _, paper, here, prompts, verdict, *_ = (cell.strip() for cell in line.split("|"))
    assert float(here.split()[0]) == pytest.approx(moved["misvo"] / moved["misvo/none"], rel=5e-3)  # three digits
    assert (paper, prompts, verdict) == ("0.293", "5", "open")


BASE = {"a": 0.125, "b": 0.5, "c": 0.25, "d": 0.75}
GAINS = {  # of each method over the first best-of-n; multiples of 0.012, so that means of three and four have 3 digits
    "best-of-n": dict.fromkeys("abcd", 0.0),
    "best-of-n, equal time": {"d": 0.24, "b": 0.048, "a": 0.96},
    "misvo": {"c": 0.012, "a": 1.2, "d": 0.0, "b": 0.12},
}


def made_up(task, labels):
    """Cells whose rewards are known, each with its prompts in an order of its own."""

    def row(prompt, gain):
        known = {"prompt": prompt, "seed": 1, "reward": BASE[prompt] + gain, "kl_per_token": 0.0}
        return known | {"diversity": 1.0, "trace": [{"mean": 0.0}]}

    size = {"rollouts": 4, "steps": 2, "cost": "none"}
    return [
        results.Cell(
            "tiny", task, label, {"method": label.split(",")[0], **size}, [row(*pair) for pair in GAINS[label].items()]
        )
        for label in labels
    ]


def enumerated(differences):
    """Mean and percentile interval over all n^n samples with replacement: what a bootstrap draws from."""
    means = sorted(np.mean(picks) for picks in itertools.product(differences, repeat=len(differences)))
    low, high = (means[int(share * len(means))] for share in (0.025, 0.975))
    return f"{np.mean(differences):+.3f} [{low:+.3f}, {high:+.3f}]"


def test_every_best_of_n_has_its_paired_intervals():
    """Pairs are those of the prompts that both have; nobody is held against itself, or against what ran elsewhere."""
    cells = made_up("both", ["misvo", "best-of-n, equal time", "best-of-n"]) + made_up("one", ["misvo", "best-of-n"])
    task = {"source": "nowhere", "reward": "made up"}
    loaded = results.Results(cells, {"both": task, "one": task}, [], [], [], [], {"none"}, set(), set())
    made = {table.name: table for table in tables.all_tables(loaded)}
    expected = {
        (ours, theirs): enumerated([GAINS[ours][p] - GAINS[theirs][p] for p in GAINS[ours].keys() & GAINS[theirs]])
        for ours, theirs in itertools.permutations(GAINS, 2)
    }
    both, one = made["both"], made["one"]
    heads = ["vs BoN [95 % interval]", "vs best-of-n, equal time [95 % interval]"]
    assert both.columns[5:-1] == heads and one.columns[5:-1] == heads[:1]
    labels = {"MISVO": "misvo", "BoN (N=8)": "best-of-n", "best-of-n, equal time": "best-of-n, equal time"}
    for row in both.rows:
        assert row[5:-1] == [expected.get((labels[row[1]], name), "–") for name in GAINS if name != "misvo"]
    assert [row[5] for row in one.rows] == [expected["misvo", "best-of-n"], "–"]
    readers = (("reader", "best-of-n", {"both", "one"}), ("reader-2", "best-of-n, equal time", {"both"}))
    for name, theirs, tasks in readers:
        assert {row[1] for row in made[name].rows} == tasks and f"difference from {theirs} [" in made[name].caption
        place = made[name].columns.index("Reward returned ↑")
        for row in made[name].rows:
            assert row[place].partition(": ")[2] == expected.get((labels[row[2]], theirs), "")


SCALES = {"small": (1.0, 0.0), "large": (1000.0, 7.0)}  # a unit and an offset of the same rewards
SPREADS = {"a": 0.5, "b": 2.0, "c": 0.0, "d": 0.25}  # of the reference's rewards; c has no unit


def two_scales():
    """The cells of `made_up` on two tasks whose rewards differ in their unit, with all that is told of all tasks."""

    def row(task, label, prompt, gain):
        (unit, offset), worth = SCALES[task], BASE[prompt] + gain
        reference = {"mean": unit * 0.1 + offset, "std": unit * SPREADS[prompt], "count": 8}
        return {
            "prompt": prompt,
            "seed": 1,
            "reward": unit * worth + offset,
            "raw_best": {"reward": unit * (worth + gain) + offset, "fluency": -3.0},
            "kl_per_token": gain,
            "fluency": -2.0 + gain,
            "diversity": 1.0,
            "reference_rewards": reference if label == "best-of-n" else None,
            "trace": [{"mean": 0.0, "kl_bound": 1.0}, {"mean": unit * (0.1 + 2 * SPREADS[prompt]) + offset}],
            "seconds": {"cpu": 3.0 if label == "misvo" else 2.0},
        }

    size = {"rollouts": 4, "steps": 2, "cost": "none"}
    cells = [
        results.Cell(
            "tiny", task, label, {"method": label, **size}, [row(task, label, *g) for g in GAINS[label].items()]
        )
        for task in SCALES
        for label in ("misvo", "best-of-n")
    ]
    tasks = {task: {"source": "nowhere", "reward": "made up"} for task in SCALES}
    return results.Results(cells, tasks, [], [], [], [], {"none"}, {"somebody"}, set())


def test_all_tasks_together_are_told_in_one_unit():
    """Differences by hand: those of a prompt over its deviation, the same on both scales; c has none."""
    loaded = two_scales()
    ours, base = overall.standings(loaded, "tiny", "best-of-n")
    by_hand = {prompt: gain / SPREADS[prompt] for prompt, gain in GAINS["misvo"].items() if SPREADS[prompt]}
    assert (ours.tasks, ours.prompts, ours.best.prompts, ours.fluency.prompts) == (2, 8, 6, 8)
    assert ours.returned.mean == pytest.approx(np.mean(list(by_hand.values())))
    assert ours.best.mean == pytest.approx(2 * np.mean(list(by_hand.values())))
    assert ours.returned.low < ours.returned.mean < ours.returned.high
    gains = list(GAINS["misvo"].values())
    assert [ours.fluency.mean, ours.kl_per_token] == pytest.approx([np.mean(gains)] * 2)
    assert ours.gain == pytest.approx(2.0) and ours.choosing == 1.0 and ours.cpu == 1.5
    assert base.best is None and base.cpu == 1.0
    table = next(table for table in tables.all_tables(loaded) if table.name == "overall")
    assert [row[1] for row in table.rows] == ["MISVO", "BoN"] and table.rows[0][-1] == "8 in 2 tasks"
    alone = [cell for cell in loaded.cells if cell.task == "small"]
    one_task = results.Results(alone, {"small": loaded.tasks["small"]}, [], [], [], [], {"none"}, {"x"}, set())
    assert "overall" not in {table.name for table in tables.all_tables(one_task)}
    assert pictures.all_tasks(one_task, "tiny") is None


def test_one_picture_has_a_panel_for_each_task_with_the_means_of_each_method():
    figure = pictures.all_tasks(two_scales(), "tiny")
    assert [axes.get_title() for axes in figure.axes] == list(SCALES)
    for axes, (unit, offset) in zip(figure.axes, SCALES.values(), strict=True):
        shown = {(round(x, 6), round(y, 6)) for line in axes.lines for x, y in zip(*line.get_data(), strict=True)}
        for label in ("misvo", "best-of-n"):
            gains = list(GAINS[label].values())
            rewards = [BASE[prompt] + gain for prompt, gain in GAINS[label].items()]
            assert (round(-2.0 + np.mean(gains), 6), round(unit * np.mean(rewards) + offset, 6)) in shown


def test_all_files_are_there_and_the_page_is_self_contained(run, tmp_path):
    made = report.make([run], tmp_path)
    assert {"tables.md", "tables.tex", "figures.json", "report.html"} <= {path.name for path in tmp_path.iterdir()}
    pictures = sorted(tmp_path.glob("*.png"))
    assert [path.name.split("-")[0] for path in pictures] == [
        "kl_position",
        "reward_kl",
        "reward_seconds",
        "trajectory",
    ]
    assert all(path.name in made.files for path in pictures)
    page = (tmp_path / "report.html").read_text()
    sources = re.findall(r'src="([^"]*)"', page)
    assert sorted(base64.b64decode(s.removeprefix("data:image/png;base64,")) for s in sources) == sorted(
        path.read_bytes() for path in pictures
    )
    assert "http" not in re.sub(r"base64,[^\"]*", "", page)  # nothing is fetched
    parser = Balanced()
    parser.feed(page)
    assert not parser.open
    tex = (tmp_path / "tables.tex").read_text()
    assert tex.count(r"\begin{tabular}") == tex.count(r"\end{tabular}") == 5  # task, reader, deviation, ablation, held
    assert r"\textbf{" in tex and "±" not in tex and "×" not in tex
    for line in tex.splitlines():
        if line.endswith(r"\\"):
            assert line.count(" & ") >= 5


@pytest.mark.parametrize("threshold", [0.1, 0.01])
@pytest.mark.parametrize("top", [3e-6, 0.00705693, 0.0123, 0.0999, 0.1, 0.19, 0.2, 0.37, 1, 4.4, 62.5, 912, 3.3e7])
def test_ticks_are_round_and_few_and_reach_far(top, threshold):
    ticks = pictures.ticks_from_zero(top, threshold)
    assert ticks[0] == 0 and ticks == sorted(ticks) and 3 <= len(ticks) <= 8
    assert top / 10 < ticks[-1] <= top or (top > 1e6 and ticks[-1] > top / 100)
    for tick in ticks:
        assert float(f"{tick:g}") == float(f"{tick:.2g}")  # two digits at most, as it is shown


def test_ticks_of_the_pictures_can_be_read(run):
    """0.00705693 is where an axis ends, and no number to read."""
    loaded = results.load([run])
    for draw, which in ((pictures.reward_against_kl, "x"), (pictures.kl_by_position, "y")):
        figure = draw(loaded, "tiny", "prompts")
        pictures.png(figure)
        for axes in figure.axes:
            axis = getattr(axes, f"{which}axis")
            low, high = axis.get_view_interval()
            labels = [tick.label1.get_text() for tick in axis.get_major_ticks() if low <= tick.get_loc() <= high]
            assert low == 0 and len(labels) >= 3 and max(map(len, labels)) <= 6
            assert not axis.get_minorticklocs().size


class Balanced(HTMLParser):
    def __init__(self):
        super().__init__()
        self.open = []

    def handle_starttag(self, tag, _):
        if tag not in ("meta", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_the_page_shows_best_and_worst_beside_the_reference(run, tmp_path):
    report.make([run], tmp_path)
    page = (tmp_path / "report.html").read_text()
    rows = [row for row in read_lines(run / "rows.jsonl") if row["method"] == "misvo"]
    gains = {row["reward"] - row["reference"]["reward"]: row for row in rows}
    for row in (gains[max(gains)], gains[min(gains)]):
        assert f"prompt {row['prompt']}, seed {row['seed']}: {row['prompt_text']}" in page
        assert f"best, {row['reward']:.3f}" in page and f"reference, {row['reference']['reward']:.3f}" in page


def test_partial_runs_say_what_is_missing(run, tmp_path):
    part = tmp_path / "part"
    part.mkdir()
    for name in ("config.json", "environment.json", "candidates.jsonl"):
        (part / name).write_bytes((run / name).read_bytes())
    lines = (run / "rows.jsonl").read_text().splitlines(keepends=True)
    of = {name: [line for line in lines if json.loads(line)["method"] == name] for name in ("misvo", "best-of-n")}
    lines = [*of["misvo"][:5], *of["best-of-n"]]
    failed = {**{k: json.loads(lines[7])[k] for k in ("model", "task", "prompt", "method", "seed", "candidates_end")}}
    failed["error"] = "RewardError: <b>no</b> score"
    (part / "rows.jsonl").write_text("".join(lines[:7]) + json.dumps(failed) + "\n" + lines[8][:40])
    made = report.make([part])
    assert made.folder == part / "report"
    assert "tiny × prompts × misvo: 5 of 10 prompts are not done yet" in made.markdown
    assert "tiny × prompts × aisp: 10 of 10 prompts are not done yet" in made.markdown
    assert "tiny × prompts × best-of-n: 1 prompts failed" in made.markdown
    assert "no</b> score" in made.markdown and "<b>no</b>" not in (part / "report" / "report.html").read_text()
    assert set(column(made.figures["prompts"], "Reward")) == {"MISVO", "BoN (N=12)"}


def test_what_one_of_two_folders_has_is_not_missing(run, tmp_path):
    """One sweep in two folders, each with a part of its rows."""
    lines = (run / "rows.jsonl").read_text().splitlines(keepends=True)
    parts = [tmp_path / "one", tmp_path / "other"]
    for part, own in zip(parts, (lines[:7], lines[7:]), strict=True):
        part.mkdir()
        for name in ("config.json", "environment.json", "candidates.jsonl"):
            (part / name).write_bytes((run / name).read_bytes())
        (part / "rows.jsonl").write_text("".join(own))
    assert results.load(parts[:1]).missing and results.load(parts[1:]).missing
    assert results.load(parts).missing == []


def test_runs_of_several_folders_are_put_together(run, tmp_path):
    world = make_world(tmp_path)
    raw = raw_config(world, methods=("misvo",), seeds=(3,))
    raw["tasks"][0]["reward"] = json.loads((run / "config.json").read_text())["tasks"]["prompts"]["reward"]
    raw["encoder"] = "minilm"
    sweep.run(configs.from_dict(raw), tmp_path / "more")
    made = report.make([run, tmp_path / "more"], tmp_path / "report")
    assert column(made.figures["prompts"], "prompts")["MISVO"] == "5 × 3"
    raw["settings"]["steps"] = 2
    sweep.run(configs.from_dict(raw), tmp_path / "other")
    with pytest.raises(MisvoError, match="with different settings"):
        report.make([run, tmp_path / "other"], tmp_path / "report")


def test_bad_folders_are_one_sentence(tmp_path):
    with pytest.raises(MisvoError, match="there is no run folder"):
        report.make([tmp_path / "none"])
    with pytest.raises(MisvoError, match="is no run of misvo"):
        report.make([tmp_path])
    sweep_config = make_config(make_world(tmp_path), methods=("misvo",), seeds=(1,))
    from misvo.bench.folder import RunFolder
    from misvo.bench.plan import make_plan

    with RunFolder(tmp_path / "empty", make_plan(sweep_config).resolved("none"), {}):
        pass
    with pytest.raises(MisvoError, match="nothing to report yet"):
        report.make([tmp_path / "empty"])


def test_profile_times_every_method_and_reports(tmp_path):
    world = make_world(tmp_path)
    config = configs.from_dict({**raw_config(world), "warmup": 1})
    measured = profiles.run(config, prompts=3)
    assert [entry["label"] for entry in measured["methods"]] == ["misvo", "best-of-n", "aisp"]
    for entry in measured["methods"]:
        assert len(entry["per_prompt"]) == 3 == measured["prompts"]
        total = sum(entry["stages"].values())
        assert 0 < total <= entry["seconds"] * 1.01 and entry["stages"]["decode"] > 0
        tokens, seconds = (sum(p[name] for p in entry["per_prompt"]) for name in ("tokens", "seconds"))
        assert entry["tokens_per_second"] == pytest.approx(tokens / seconds) and entry["peak_memory"] > 1e8
    profiles.save(measured, tmp_path / "profile")
    made = report.make([tmp_path / "profile"], tmp_path / "report")
    table = made.figures["profile"]
    assert table["rows"][0][3] == f"{measured['methods'][0]['seconds']:.1f}" and "K=4, N=3" in table["rows"][0]
    with pytest.raises(MisvoError, match="too few prompts"):
        profiles.run(config, warmup=5)


def test_best_of_n_kl_bound_against_enumeration():
    """KL of best-of-2 from a uniform law over many values tends to log 2 − 1/2: a midpoint sum, within 1/size of it."""
    size = 4000
    law = np.array([((i + 1) ** 2 - i**2) / size**2 for i in range(size)])
    assert float((law * np.log(law * size)).sum()) == pytest.approx(results.best_of_n_kl(2), abs=1 / size)


def test_tex_escapes():
    assert tables._tex("a_b & 5 % ± 2") == r"a\_b \& 5 \% $\pm$ 2"
