"""`benchmarks/claims.py` on a run whose every figure is known, and the search for a reward's unit."""

import importlib.util
import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SCRIPT = ROOT / "benchmarks" / "claims.py"
PROMPTS = [f"p{n}" for n in range(8)]
# method -> KL_ref, ‖u‖ and CPU seconds as multiples of the prompt's number plus 1
MULTIPLES = {
    "misvo": (0.25, 0.75, 3.0),
    "none": (1.0, 1.0, 2.0),
    "kl": (2.0, 1.5, 2.0),
    "aisp": (4.0, 5.0, 1.0),
    "plain": (None, None, 1.0),
}
CELLS = {
    "misvo": {"method": "misvo", "cost": "frozen-fisher"},
    "none": {"method": "misvo", "cost": "none"},
    "kl": {"method": "misvo", "cost": "sequence-kl"},
    "aisp": {"method": "aisp"},
    "plain": {"method": "best-of-n"},
    "other": {"method": "particles"},
}
# Rewards less best-of-n's. MISVO: +1 and −1 on half of the prompts each. AISP: −1 everywhere.
GAINS = {"misvo": lambda n: 1.0 if n % 2 else -1.0, "none": lambda n: 0.0, "kl": lambda n: -0.5, "aisp": lambda n: -1.0}
TRACES = {"misvo": [0.0, 1.0, 2.0, 6.0], "aisp": [0.0, 3.0, 2.0, 1.0], "plain": [1.0, 2.0, 5.0, 0.0]}


def row(method, n, seed, **changes):
    kl, norm, cpu = (None if m is None else m * (n + 1) for m in MULTIPLES[method])
    sign = 0.5 if seed == 1 else -0.5  # gone in the mean over seeds
    return {
        "task": "t",
        "method": method,
        "prompt": PROMPTS[n],
        "seed": seed,
        "reward": n + sign + GAINS.get(method, lambda n: 0.0)(n),
        "held_out": float(n),
        "kl_ref": kl,
        "norm": norm,
        "diversity": 0.9,
        "coherence": None,
        "fluency": None,
        "seconds": {"cpu": cpu},
        "trace": [{"mean": mean} for mean in TRACES.get(method, [0.0] * 4)],
        **changes,
    }


def write_run(folder, rows):
    cells = {name: {"task": "t", "method": name, "settings": settings} for name, settings in CELLS.items()}
    (folder / "config.json").write_text(json.dumps({"tasks": {"t": {}}, "cells": cells}))
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def table_of(*runs):
    """claim -> (paper, here, prompts, verdict, paper's figure inside), and method -> cells of the second table."""
    text = subprocess.run([sys.executable, SCRIPT, *runs], capture_output=True, text=True, check=True).stdout
    lines = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    start = next(n for n, line in enumerate(lines) if line[0] == "method")
    claims = {line[1]: line[2:] for line in lines[2:start]}
    return claims, {line[0]: line[1:] for line in lines[start + 2 :]}


@pytest.fixture
def rows():
    return [row(method, n, seed) for method in MULTIPLES for n in range(8) for seed in (1, 2)]


def test_rows_that_are_kept_and_runs_in_parts_give_the_same_tables(tmp_path, rows):
    parts = [tmp_path / name for name in ("all", "one", "two")]
    for part, some in zip(parts, (rows, rows[:40], rows[40:]), strict=True):
        part.mkdir()
        write_run(part, some)
    kept = tmp_path / "kept.jsonl"
    expected = table_of(parts[0])
    assert table_of(parts[1], parts[2], "--keep", kept) == expected
    assert table_of(kept) == expected
    assert table_of(kept, parts[1], "--keep", kept) == expected
    assert len(kept.read_text().splitlines()) == len(rows)


def test_ratios_differences_and_verdicts_are_those_computed_by_hand(tmp_path, rows):
    rows.insert(0, row("misvo", 3, 1, kl_ref=1e6))  # done again later: the later row counts
    rows.append({"task": "t", "method": "none", "prompt": "p9", "seed": 1, "error": "failed"})
    rows.append(row("misvo", 0, 3, kl_ref=1e6))  # a seed that the other method does not have
    claims, methods = table_of(write_run(tmp_path, rows))
    # Both are proportional to n + 1 on every prompt, so every draw of prompts has the same ratio.
    kl = claims["KL_ref: MISVO / unregularised below 1"]
    assert kl == ["0.293", "0.25 [0.25, 0.25]", "8", "holds", "no"]
    assert claims["‖u‖: MISVO / unregularised below 1"][1] == "0.75 [0.75, 0.75]"
    assert claims["KL_ref: direct KL / unregularised below 1"][1:4] == ["2 [2, 2]", "8", "does not hold"]
    assert claims["KL_ref: AISP / MISVO above 1"][1:4] == ["16 [16, 16]", "8", "holds"]
    assert claims["time: MISVO / BoN above 1"][1:4] == ["3 [3, 3]", "8", "holds"]
    assert claims["best reward: AISP − BoN above 0"][1:4] == ["-1.000 [-1.000, -1.000]", "8", "does not hold"]
    assert claims["best reward: direct KL − BoN below 0"] == ["-0.400", "-0.500 [-0.500, -0.500]", "8", "holds", "no"]
    assert claims["diversity: MISVO − BoN within ±0.05"][1:4] == ["+0.000 [+0.000, +0.000]", "8", "holds"]
    # The mean of eight signs: 2·B/8 − 1 with B binomial(8, 1/2); P(B ≤ 1) = 9/256 > 0.025 ≥ 1/256 = P(B = 0).
    assert claims["best reward: MISVO − BoN above 0"] == ["+0.590", "+0.000 [-0.750, +0.750]", "8", "open", "yes"]
    steps = "mean of the last quarter of the steps less that of the"
    assert claims[f"{steps} first: MISVO above 0"] == ["rises", "+6.000 [+6.000, +6.000]", "8", "holds"]
    assert claims[f"{steps} first: AISP below 0"][1:4] == ["+1.000 [+1.000, +1.000]", "8", "does not hold"]
    assert claims[f"{steps} second: AISP below 0"][1:4] == ["-2.000 [-2.000, -2.000]", "8", "holds"]
    assert claims["best reward: MISVO − l2 above 0"][1:4] == ["not run", "", "open"]
    assert claims["coherence: MISVO − BoN within ±0.05"][1:4] == ["not run", "", "open"]  # nobody read them
    assert list(methods) == ["MISVO", "direct KL", "unregularised", "AISP", "BoN"]
    assert methods["AISP"][0] == "2.500: -1.000 [-1.000, -1.000]"  # 0 + … + 7 over 8 is 3.5
    assert methods["BoN"][:3] == ["3.500", "3.500", "0.000"] and methods["unregularised"][3] == "4.500"  # 36/8


def test_a_few_prompts_decide_nothing(tmp_path, rows):
    claims, _ = table_of(write_run(tmp_path, [row for row in rows if row["prompt"] < "p7"]))
    assert claims["KL_ref: MISVO / unregularised below 1"][1:4] == ["0.25 [0.25, 0.25]", "7", "open"]


def test_two_cells_of_one_kind_are_refused(tmp_path, rows, monkeypatch):
    monkeypatch.setitem(CELLS, "again", {"method": "aisp"})
    write_run(tmp_path, rows)
    done = subprocess.run([sys.executable, SCRIPT, tmp_path], capture_output=True, text=True)
    assert done.returncode == 1 and "both 'aisp' and 'again' are AISP on t" in done.stderr


@pytest.mark.parametrize("name", ["claims", "claims_picture"])
def test_the_scripts_are_independent(name):
    source = (ROOT / "benchmarks" / f"{name}.py").read_text(encoding="utf-8")
    assert "import misvo" not in source and "from misvo" not in source


def test_the_picture_shows_steps_above_what_the_model_earns_by_itself(tmp_path, rows):
    rows = [row for row in rows if (row["method"], row["prompt"]) != ("plain", "p7")]  # without it there is no "above"
    claims, picture, folder = module_of("claims"), module_of("claims_picture"), tmp_path / "run"
    folder.mkdir()
    paths = picture.trajectories(claims.Run(write_run(folder, rows)), "t", claims.AISP)
    assert paths.tolist() == [[-2.0, 1.0, 0.0, -1.0]] * 7  # best-of-n's steps have a mean of 2
    script = SCRIPT.with_name("claims_picture.py")
    subprocess.run([sys.executable, script, folder, "--out", tmp_path / "p.png"], check=True)
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


def module_of(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "benchmarks" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look for their module there
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def unit():
    return module_of("unit")


@pytest.mark.parametrize("first", [0.01, 1.0, 400.0])
@pytest.mark.parametrize("nats", [lambda f: 0.003 * f**2, lambda f: 0.02 * f / (1 + 0.03 * f), lambda f: 2e-6 * f**3.5])
def test_the_unit_is_found_in_a_few_tries(unit, nats, first):
    """KLs that grow as a square, that level off at 0.67 and that explode; 0.317 is reached at 10.3, 30.2 and 30.6."""
    tries = [(first, nats(first))]
    while abs(tries[-1][1] / unit.NATS - 1) > 0.1:
        tries.append((factor := unit.next_factor(tries, unit.NATS), nats(factor)))
        assert len(tries) <= 8
    assert math.isclose(nats(tries[-1][0]), 0.317, rel_tol=0.1)


def test_a_try_stays_between_too_little_and_too_much(unit):
    tries = [(1.0, 0.01), (100.0, 5.0), (10.0, 0.29)]
    assert 10.0 < unit.next_factor(tries, 0.317) < 100.0
    assert unit.next_factor([(2.0, 0.0)], 0.317) == 2.0 * unit.WIDEST  # nothing moved yet


def test_a_factor_scales_every_term(unit):
    from misvo.rewards.specs import terms

    spec = "sentiment - 0.5*length:40 + clip(reading-ease, 0, 100)"
    assert unit.scaled(spec, 3.0) == "3*sentiment - 1.5*length:40 + 3*clip(reading-ease, 0, 100)"
    assert terms(unit.scaled(spec, 3.0)) == [(3 * weight, text) for weight, text in terms(spec)]


def test_the_sweeps_are_what_the_tables_need():
    """Every method that a claim speaks of on both rewards, as printed; five budgets and six settings side by side."""
    from misvo.bench import config as configs
    from misvo.names import COSTS

    claims = configs.read(ROOT / "configs" / "claims.toml")
    for task in claims.tasks:
        settings = [cell.settings for cell in claims.cells() if cell.task is task]
        kinds = [one.cost if one.method == "misvo" else one.method for one in settings]
        assert sorted(kinds) == sorted([*COSTS, "aisp", "re-control", "best-of-n"])
        assert {(one.rollouts, one.steps, one.max_new_tokens, one.top_p, one.kl_ref) for one in settings} == {
            (16, 16, 64, 0.95, True)
        }
        steered = [one for one in settings if one.method == "misvo"]
        assert {(one.learning_rate, one.tie, one.step, one.kl_budget_per_token) for one in steered} == {
            (0.1, "position", "euler", None)
        }
        assert all(one.penalty == 1.0 for one in steered if one.cost != "none")
        assert task.prompts + task.more_prompts == 16 and task.first == 100
    compared = configs.read(ROOT / "configs" / "adapters.toml").cells()
    budgets = {
        method: {one.settings.kl_budget_per_token for one in compared if one.settings.method == method}
        for method in ("misvo", "lora")
    }
    assert budgets["lora"] == budgets["misvo"] - {None} and len(budgets["lora"]) == 5  # without one: as printed
    tuned = configs.read(ROOT / "configs" / "adapters-tuning.toml")
    labels = [method.label.partition(",")[0] for method in tuned.methods]
    assert {name: labels.count(name) for name in labels} == {
        "best-of-n": 1,
        **dict.fromkeys(("lora", "auto", "paper", "particles"), 6),
    }
    assert len({str(cell.settings) for cell in tuned.cells()}) == 25 and tuned.tasks[0].data is None


def test_the_page_of_results_says_what_its_rows_say(tmp_path):
    page = ROOT / "docs" / "results.md"
    made = tmp_path / "results.md"
    made.write_text(page.read_text(encoding="utf-8"), encoding="utf-8")
    subprocess.run([sys.executable, SCRIPT, ROOT / "docs" / "claims.jsonl", "--into", made], check=True)
    assert made.read_text(encoding="utf-8") == page.read_text(encoding="utf-8")


def test_a_page_without_a_place_for_a_table_is_left_alone(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("<!-- learned: verdicts -->\nnone yet\n\nThe end.\n", encoding="utf-8")
    call = [sys.executable, SCRIPT, ROOT / "docs" / "claims.jsonl", "--into", page]
    done = subprocess.run(call, capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.strip().endswith("has no line <!-- claims -->.")
    assert "none yet" in page.read_text(encoding="utf-8")
