"""The tables of docs/untuned.md, from the rows that are kept beside it; no model is needed.

    python benchmarks/untuned_rows.py                       # print them
    python benchmarks/untuned_rows.py --add runs/untuned    # first take over what a run of configs/untuned.toml has

A row of docs/untuned.jsonl is one prompt, method and reward of that sweep without its responses: figures of what was
returned and of the highest reward, and the mean of every step. What a run did again takes the place of what was there,
and what came out otherwise is told: after a change of the engine, sums that round otherwise turn single near ties.
"""

import argparse
import json
import math
from collections import Counter
from pathlib import Path

from misvo.bench.folder import whole_rows
from misvo.metrics import paired_bootstrap
from misvo.selection import ends_a_sentence

ROWS = Path(__file__).parent.parent / "docs" / "untuned.jsonl"
KEY = ("task", "prompt", "method", "seed")
BASE, EQUAL = "best-of-n", "best-of-n, equal time"
FIGURES = {
    "highest reward seen": lambda row: row["raw_best"]["reward"],
    "reward returned": lambda row: row["reward"],
    "fluency of what is returned": lambda row: row["fluency"],
    "coherence": lambda row: row["coherence"],
    "diversity": lambda row: row["diversity"],
    "KL per token": lambda row: row["kl_per_token"],
    "KL per token of choosing rows": lambda row: row.get("kl_of_choice"),  # estimated; a bound for blockwise
    "last mean, reference SDs": lambda row: row.get("gain"),
    "highest reward, reference SDs": lambda row: row.get("room"),  # no mean can be above it
    "CPU seconds": lambda row: row.get("cpu"),
}
COMPARED = list(FIGURES)[:5]  # with best-of-n


def short(row: dict) -> dict:
    """What is kept of a row of a run."""
    kept = {name: row[name] for name in (*KEY, "reward", "fluency", "coherence", "diversity", "kl_per_token")}
    kept |= {name: row[name] for name in ("raw_best", "responses", "tokens", "reference_rewards")}
    kept |= {"text": row["best"]["text"], "cpu": row["seconds"]["cpu"]}
    if (of_choice := kl_of_choice(row)) is not None:
        kept["kl_of_choice"] = of_choice
    return kept | {"trace": [round(step["mean"], 4) for step in row["trace"]]}


def kl_of_choice(row: dict) -> float | None:
    """How far choosing rows moves their law, in nats a token: estimated by particles, bounded by blockwise."""
    count = row["responses"] / len(row["trace"])  # of a step
    told = [(step.get("kl_target", step.get("kl_bound")), step["tokens"] / count) for step in row["trace"]]
    told = [nats / tokens for nats, tokens in told if nats is not None]
    return sum(told) / len(told) if told else None


def key(row: dict) -> tuple:
    return tuple(row[name] for name in KEY)


def add(rows: list[dict], run: Path) -> list[dict]:
    """Rows with those of a run, which stand in the place of older ones."""
    known = {key(row): row for row in rows}
    for row in (short(row) for row in whole_rows(run)[0] if "error" not in row):
        before = known.get(key(row), row)
        if before["trace"] != row["trace"] or before["text"] != row["text"]:
            print(f"{key(row)} came out otherwise: means {before['trace']} were there, {row['trace']} are now.")
        known[key(row)] = row
    return list(known.values())


def with_gains(rows: list[dict]) -> list[dict]:
    """How far the last step's mean and the highest reward are above those of the reference's responses to the same
    prompt, in their deviations, where known."""
    references = {row["task"] + row["prompt"]: row.get("reference_rewards") for row in rows if row["method"] == BASE}
    for row in rows:
        reference = references.get(row["task"] + row["prompt"])
        if reference and reference["std"]:
            row["gain"] = (row["trace"][-1] - reference["mean"]) / reference["std"]
            row["room"] = (row["raw_best"]["reward"] - reference["mean"]) / reference["std"]
    return rows


def values(rows, task, method, figure) -> dict[str, float]:
    found = {row["prompt"]: FIGURES[figure](row) for row in rows if (row["task"], row["method"]) == (task, method)}
    return {prompt: value for prompt, value in found.items() if value is not None and math.isfinite(value)}


def table(rows: list[dict], task: str) -> str:
    methods = list(dict.fromkeys(row["method"] for row in rows if row["task"] == task))
    lines = [f"**{task}**", "", "| | " + " | ".join(methods) + " |", "|---" * (len(methods) + 1) + "|"]
    for figure in FIGURES:
        cells = []
        for method in methods:
            mine = values(rows, task, method, figure)
            cell = f"{sum(mine.values()) / len(mine):.3f} ({len(mine)})" if mine else "–"
            for other in (BASE, EQUAL) if figure in COMPARED and method != BASE else ():
                theirs = values(rows, task, other, figure)
                if method != other and (less := paired_bootstrap(mine, theirs)):
                    cell += f"; less {other} {less.mean:+.3f} [{less.low:+.3f}, {less.high:+.3f}] ({less.prompts})"
            cells.append(cell)
        lines.append(f"| {figure} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def on_shared_prompts(rows: list[dict], share: float = 0.75) -> tuple[list[dict], list[str]]:
    """The rows of the tasks that all methods are for, of those prompts that most methods have; and the tasks."""
    by_task = {task: _methods(rows, task) for task in dict.fromkeys(row["task"] for row in rows)}
    tasks = [task for task, methods in by_task.items() if "particles" in methods]
    chosen = {}
    for task in tasks:
        have = Counter(prompt for method in by_task[task] for prompt in values(rows, task, method, "reward returned"))
        chosen[task] = {prompt for prompt, count in have.items() if count >= share * len(by_task[task])}
    return [row for row in rows if row["prompt"] in chosen.get(row["task"], ())], tasks


def side_by_side(rows: list[dict], tasks: list[str]) -> str:
    """Every method on the same prompts: rewards returned on each task, all else over all tasks."""
    columns = [f"{task}: returned" for task in tasks]
    columns += ["highest, SDs", "last mean, SDs", "fluency", "ends a sentence", "nats a token", "CPU time", "prompts"]
    lines = ["| | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    for method in dict.fromkeys(row["method"] for row in rows):
        cells = []
        for task in tasks:
            mine = values(rows, task, method, "reward returned")
            less = _less(mine, values(rows, task, BASE, "reward returned"), method)
            cells.append(f"{_mean(mine):.3f}{less}" if mine else "–")
        for name in ("highest reward, reference SDs", "last mean, reference SDs", "fluency of what is returned"):
            mine, theirs = (_pooled(rows, tasks, one, name) for one in (method, BASE))
            mean = f"{_mean(mine):.2f}" if name == "last mean, reference SDs" else ""
            cells.append(mean or _less(mine, theirs, method).strip() or "–")
        mine = [row for row in rows if row["method"] == method]
        cpu, base = (_pooled(rows, tasks, one, "CPU seconds") for one in (method, BASE))
        shared = cpu.keys() & base.keys()
        prose = [ends_a_sentence(row["text"]) for row in mine if row["task"] != "json"]
        cells.append(f"{sum(prose)} of {len(prose)}")
        cells.append(f"{_mean(_pooled(rows, tasks, method, 'KL per token')):.3f}")
        cells.append(f"{sum(cpu[k] for k in shared) / sum(base[k] for k in shared):.2f}" if shared else "–")
        lines.append(f"| {method} | " + " | ".join([*cells, str(len(mine))]) + " |")
    return "\n".join(lines) + "\n"


def draw(rows: list[dict], tasks: list[str], path: Path) -> None:
    """What is returned, less best-of-n's: its reward on each task, and its fluency over all of them."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    methods = [method for method in dict.fromkeys(row["method"] for row in rows) if method != BASE]
    reads = "fluency of what is returned"
    panels = {f"{task}: reward": lambda one, task=task: values(rows, task, one, "reward returned") for task in tasks}
    panels["fluency, nats a token"] = lambda one: _pooled(rows, tasks, one, reads)
    figure, axes = pyplot.subplots(1, len(panels), figsize=(2.6 * len(panels), 0.8 + 0.3 * len(methods)), sharey=True)
    for axis, (title, of) in zip(axes, panels.items(), strict=True):
        for place, method in enumerate(methods):
            if less := paired_bootstrap(of(method), of(BASE)):
                axis.plot([less.low, less.high], [place, place], color="tab:blue")
                axis.plot([less.mean], [place], "o", color="tab:blue")
        axis.axvline(0, color="black", linewidth=0.8)
        axis.set_title(title, fontsize=10)
        axis.grid(axis="x", alpha=0.3)
        axis.locator_params(axis="x", nbins=4)
    axes[0].set_yticks(range(len(methods)), methods)
    axes[0].invert_yaxis()
    figure.supxlabel("returned answers, less best-of-n's on the same prompts, with 95 % intervals", y=-0.03)
    figure.savefig(path, dpi=130, bbox_inches="tight")


def _methods(rows, task):
    return dict.fromkeys(row["method"] for row in rows if row["task"] == task)


def _pooled(rows, tasks, method, figure):
    return {(task, prompt): value for task in tasks for prompt, value in values(rows, task, method, figure).items()}


def _mean(values):
    return sum(values.values()) / len(values) if values else math.nan


def _less(mine, theirs, method):
    less = None if method == BASE else paired_bootstrap(mine, theirs)
    return f" {less.mean:+.3f} [{less.low:+.3f}, {less.high:+.3f}]" if less else ""


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--add", type=Path, nargs="*", default=[], metavar="RUN", help="folders of configs/untuned.toml"
    )
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw what methods return beside best-of-n")
    given = parser.parse_args()
    rows = [json.loads(line) for line in ROWS.read_text().splitlines()]
    for run in given.add:
        rows = add(rows, run)
    if given.add:
        ROWS.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    rows = with_gains(rows)
    for task in dict.fromkeys(row["task"] for row in rows):
        print(table(rows, task))
    shared, tasks = on_shared_prompts(rows)
    print(side_by_side(shared, tasks))
    if given.picture:
        draw(shared, tasks, given.picture)


if __name__ == "__main__":
    main()
