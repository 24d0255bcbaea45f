"""Adapters for each prompt against steering: tables and a picture from rows.jsonl, with nothing of misvo.

    misvo bench configs/adapters-tuning.toml
    python benchmarks/adapters.py runs/adapters-tuning --tuning              # the setting of each method that won
    misvo bench configs/adapters.toml --data SHP_PROMPTS.jsonl
    python benchmarks/adapters.py runs/adapters
    python benchmarks/adapters.py docs/adapters.jsonl                        # of rows that are kept
    python benchmarks/adapters.py docs/adapters.jsonl runs/adapters --keep docs/adapters.jsonl     # which were kept so
    python benchmarks/adapters.py docs/adapters.jsonl --into docs/results.md # the tables of a page, made anew
    python benchmarks/adapters.py docs/adapters.jsonl --picture docs/results/adapters.png

Rewards are told as they are; the mean of the last step also in standard deviations of the reference's rewards, which
best-of-n draws: how far the policy came. Every comparison is over the prompts that both methods have, each averaged
over its seeds, and its interval a paired bootstrap over prompts (`benchmarks/claims.py`).
"""

import argparse
import json
from collections import defaultdict
from pathlib import Path

import numpy as np
from claims import FEWEST, fill, interval, markdown

BON = "best-of-n"
BUDGETS = ["0.025", "0.05", "0.1", "0.2", "0.4"]  # nats a token, of `lora` and `auto`
KEPT = ["reward", "held_out", "kl_per_token", "fluency", "state_bytes"]
WORDS = {
    "reward": "best reward",
    "last": "mean, last step",
    "deviations": "in reference SDs",
    "held_out": "held-out reward",
    "kl_per_token": "KL a token",
    "fluency": "fluency",
    "cpu": "CPU seconds",
    "state_bytes": "KiB of state",
}


def read(paths) -> dict[str, dict[tuple, dict]]:
    """Rows by method and (prompt, seed), of folders and of files that `keep` wrote; later ones count."""
    rows = defaultdict(dict)
    for path in map(Path, paths):
        file = path / "rows.jsonl" if path.is_dir() else path
        for row in map(json.loads, file.read_text(encoding="utf-8").splitlines()):
            if "error" not in row:
                rows[row["method"]][row["prompt"], row["seed"]] = row if "cpu" in row else short(row)
    return rows


def short(row) -> dict:
    """What the tables need of a row."""
    names = ("method", "prompt", "seed", *KEPT)
    made = {"last": row["trace"][-1]["mean"], "cpu": row["seconds"]["cpu"], "reference": row["reference_rewards"]}
    return {name: row[name] for name in names} | made


def figure(rows, method, name, key) -> float:
    row = rows[method][key]
    if name == "deviations":
        reference = rows[BON][key]["reference"]
        return (row["last"] - reference["mean"]) / reference["std"]
    return row[name] / 1024 if name == "state_bytes" else row[name]


def paired(rows, name, method, other) -> tuple[np.ndarray, np.ndarray]:
    """A figure of two methods on the prompts that both have, as best-of-n must, which has the reference's rewards."""
    seeds = defaultdict(list)
    for prompt, seed in sorted(rows[method].keys() & rows[other].keys() & rows[BON].keys()):
        seeds[prompt].append([figure(rows, each, name, (prompt, seed)) for each in (method, other)])
    pairs = np.array([np.mean(values, axis=0) for values in seeds.values()]).reshape(-1, 2)  # (prompts, 2)
    return pairs[:, 0], pairs[:, 1]


def difference(rows, name, method, other) -> str:
    ours, theirs = paired(rows, name, method, other)
    low, high = interval(lambda one, two: (one - two).mean(-1), ours, theirs)
    return f"{(ours - theirs).mean():+.3f} [{low:+.3f}, {high:+.3f}]"


def all_methods(rows) -> str:
    table = []
    for method in rows:
        means = {name: paired(rows, name, method, method)[0] for name in WORDS}
        table.append([method, str(len(means["reward"])), *(f"{mean.mean():.3g}" for mean in means.values())])
    return markdown(["method", "prompts", *WORDS.values()], table)


def side_by_side(rows, pairs) -> str:
    """Differences of pairs of methods, and the ratio of their times."""
    names, table = ["reward", "deviations", "held_out", "kl_per_token", "fluency"], []
    for method, other in pairs:
        if rows[method].keys() & rows[other].keys() & rows[BON].keys():
            seconds = [values.mean() for values in paired(rows, "cpu", method, other)]
            cells = [difference(rows, name, method, other) for name in names]
            table.append([f"{method} − {other}", *cells, f"{seconds[0] / seconds[1]:.2f}"])
    return markdown(["", *(WORDS[name] for name in names), "time, as a ratio"], table)


def draw(rows, path) -> None:
    """How far each method came, against the KL that it spent and the CPU time that it took: means over prompts and
    their standard errors. `lora` and `auto` are lines through their budgets."""
    from matplotlib.figure import Figure

    lines = {family: [f"{family}, {nats}" for nats in BUDGETS] for family in ("lora", "auto")}
    lines |= {method: [method] for method in rows if not method.startswith(tuple(lines)) or "equal time" in method}
    picture = Figure(figsize=(11, 4.4), layout="constrained")
    panels = picture.subplots(1, 2, sharey=True)
    for panel, name in zip(panels, ("kl_per_token", "cpu"), strict=True):
        for family, methods in lines.items():
            seen = [paired(rows, name, method, BON)[0] for method in methods if method in rows]
            came = [paired(rows, "deviations", method, BON)[0] for method in methods if method in rows]
            error = [values.std(ddof=1) / len(values) ** 0.5 if len(values) > 1 else 0.0 for values in came]
            where = [values.mean() for values in seen]
            panel.errorbar(where, [values.mean() for values in came], error, marker="o", lw=1.4, label=family)
        panel.grid(alpha=0.3)
    panels[0].set(xlabel="KL, nats a token", ylabel="mean of the last step, in reference SDs")
    panels[0].set_xscale("symlog", linthresh=0.02)
    panels[1].set(xlabel="CPU seconds of a prompt")
    panels[1].set_xscale("log")
    picture.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
    picture.savefig(path, dpi=130)


def winners(rows) -> str:
    """Of each method the setting whose last step has the highest mean, on prompts that all of its settings have."""
    families, table = defaultdict(list), []
    for method in rows:
        if method != BON:
            families[method.split(",")[0]].append(method)
    for family, settings in families.items():
        common = set.intersection(*(set(rows[each]) for each in (BON, *settings)))
        if common:
            means = {each: np.mean([figure(rows, each, "deviations", key) for key in common]) for each in settings}
            ranked = sorted(means, key=means.get, reverse=True)
            table.append([family, str(len(common)), "; ".join(f"{each} {means[each]:+.2f}" for each in ranked)])
    return markdown(["method", "prompts", "settings, the best first: last step's mean in reference SDs"], table)


def tables(rows) -> dict[str, str]:
    """What there is to say, each part by its name."""
    longer = [("lora, 0.1", "auto, 0.1, equal time"), ("lora, 0.1", "best-of-n, equal time")]
    return {
        "methods": all_methods(rows),
        "budgets": side_by_side(rows, [(f"lora, {nats}", f"auto, {nats}") for nats in BUDGETS]),
        "time": side_by_side(rows, [*longer, ("auto, 0.1, equal time", "best-of-n, equal time")]),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", help="folders of `misvo bench`, or files of kept rows")
    parser.add_argument("--tuning", action="store_true", help="rank the settings of each method")
    parser.add_argument("--keep", metavar="FILE", help="write there what the tables need of all rows")
    parser.add_argument("--into", metavar="PAGE", type=Path, help="put the tables behind their lines in this page")
    parser.add_argument("--picture", metavar="FILE", help="draw reward against KL and against seconds")
    arguments = parser.parse_args()
    rows = read(arguments.runs)
    if arguments.picture:
        draw(rows, arguments.picture)
        return
    if arguments.keep:
        kept = [row for by_prompt in rows.values() for row in by_prompt.values()]
        Path(arguments.keep).write_text("".join(json.dumps(row) + "\n" for row in kept), encoding="utf-8")
    if arguments.tuning:
        print(winners(rows))
        return
    made = tables(rows)
    if arguments.into:
        fill(arguments.into, {f"adapters: {name}": part for name, part in made.items()})
        return
    print(made["methods"])
    print(f"Paired differences [95 % interval]; of fewer than {FEWEST} prompts an interval is too narrow.\n")
    print(f"{made['budgets']}\n{made['time']}")


if __name__ == "__main__":
    main()
