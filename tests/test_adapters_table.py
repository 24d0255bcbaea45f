"""`benchmarks/adapters.py` on rows whose every figure is known."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
GAINS = {"best-of-n": 0.0, "auto, 0.1": 1.0, "lora, 0.1": 1.5, "lora, 4, 1e-3": 0.5, "lora, 16, 1e-3": 2.5}


def row(method, n, seed=0):
    """The last step's mean is `gain` deviations of 2 above the reference's mean, which is the prompt's number."""
    return {
        "method": method,
        "prompt": f"p{n}",
        "seed": seed,
        "reward": 10.0 * n + GAINS[method],
        "held_out": 0.0,
        "kl_per_token": 0.1,
        "fluency": -2.0,
        "state_bytes": 2048,
        "trace": [{"mean": 0.0}, {"mean": n + 2 * GAINS[method]}],
        "seconds": {"cpu": 4.0 if "lora" in method else 2.0},
        "reference_rewards": {"mean": float(n), "std": 2.0, "count": 128},
    }


def tables(tmp_path, rows, *options):
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    call = [sys.executable, ROOT / "benchmarks" / "adapters.py", tmp_path, *options]
    return subprocess.run(call, capture_output=True, text=True, check=True).stdout


def test_differences_are_of_prompts_that_both_have(tmp_path):
    rows = [row(method, n) for method in ("best-of-n", "auto, 0.1", "lora, 0.1") for n in range(3)]
    failed = {"method": "lora, 0.1", "prompt": "p3", "seed": 0, "error": "out of memory"}
    text = tables(tmp_path, [*rows, row("best-of-n", 3), row("auto, 0.1", 3), failed])
    line = next(line for line in text.splitlines() if line.startswith("| lora, 0.1 − auto, 0.1"))
    assert line.split(" | ")[1:3] == ["+0.500 [+0.500, +0.500]", "+0.500 [+0.500, +0.500]"]
    assert line.endswith("| 2.00 |")
    assert "| auto, 0.1 | 4 | 16 | 3.5 | 1 | 0 | 0.1 | -2 | 2 | 2 |" in text  # 16 = 10 · mean(0, 1, 2, 3) + 1


def test_seeds_of_a_prompt_are_one_observation(tmp_path):
    """Two seeds of one prompt and one of another: the prompts weigh alike, so 10·(0 + 1)/2, not 10·(0 + 0 + 1)/3."""
    rows = [row(method, n, seed) for method in ("best-of-n", "auto, 0.1") for n, seed in ((0, 0), (0, 1), (1, 0))]
    assert "| best-of-n | 2 | 5 | 0.5 |" in tables(tmp_path, rows)


def test_a_page_gets_its_tables_behind_its_lines(tmp_path):
    page, methods = tmp_path / "page.md", ("best-of-n", "auto, 0.1", "lora, 0.1")
    places = [f"<!-- adapters: {name} -->\nold\n\n" for name in ("methods", "budgets", "time")]
    page.write_text("".join(places) + "The end.\n")
    rows = [row(method, n) for method in methods for n in range(3)]
    assert tables(tmp_path, rows, "--into", page) == ""
    text = page.read_text()
    assert "| lora, 0.1 − auto, 0.1 | +0.500" in text and "old" not in text and text.endswith("The end.\n")


def test_the_page_of_results_says_what_its_rows_say(tmp_path):
    page, made = ROOT / "docs" / "results.md", tmp_path / "results.md"
    made.write_text(page.read_text(encoding="utf-8"), encoding="utf-8")
    call = [sys.executable, ROOT / "benchmarks" / "adapters.py", ROOT / "docs" / "adapters.jsonl", "--into", made]
    subprocess.run(call, check=True)
    assert made.read_text(encoding="utf-8") == page.read_text(encoding="utf-8")


def test_kept_rows_give_the_same_tables(tmp_path):
    rows = [row(method, n) for method in ("best-of-n", "auto, 0.1", "lora, 0.1") for n in range(3)]
    first = tables(tmp_path, rows, "--keep", tmp_path / "kept.jsonl")
    again = [json.loads(line) for line in (tmp_path / "kept.jsonl").read_text().splitlines()]
    assert tables(tmp_path, again) == first


def test_the_setting_that_moved_the_policy_furthest_wins(tmp_path):
    methods = ("best-of-n", "lora, 4, 1e-3", "lora, 16, 1e-3")
    text = tables(tmp_path, [row(method, n) for method in methods for n in range(2)], "--tuning")
    assert "| lora | 2 | lora, 16, 1e-3 +2.50; lora, 4, 1e-3 +0.50 |" in text
