"""What `benchmarks/claims.py` tells in tables, in one picture: a column for each reward.

    python benchmarks/claims_picture.py docs/claims.jsonl --out docs/results/claims.png

Above is the mean reward of each step; below, how much more the best response earned than best-of-n's, against how far
the policy was moved. Shades and bars are standard errors over prompts, each averaged over its seeds.
"""

import argparse
from collections import defaultdict

import numpy as np
from claims import AISP, BON, KL, MISVO, NAMES, REWARD, Run
from matplotlib.figure import Figure


def trajectories(run: Run, task: str, method: str) -> np.ndarray:
    """The mean reward of each step above the mean of all that best-of-n drew for the prompt, (prompts, steps)."""
    seeds = defaultdict(list)
    for key in sorted(run.values(task, method, REWARD).keys() & run.values(task, BON, REWARD).keys()):
        ours, own = (np.array([step["mean"] for step in run.rows[task, one][key]["trace"]]) for one in (method, BON))
        seeds[key[0]].append(ours - own.mean())
    return np.array([np.mean(values, axis=0) for values in seeds.values()])


def draw_steps(panel, run: Run, task: str) -> None:
    for method in run.methods(task):
        paths = trajectories(run, task, method)
        if len(paths) < 2:  # beside best-of-n there is nothing to show yet, and of one no error
            continue
        middle, error = paths.mean(0), standard_error(paths)
        steps, wide = np.arange(1, len(middle) + 1), 2 if method in (MISVO, AISP, BON) else 1
        panel.plot(steps, middle, color=color(method), lw=wide, label=NAMES[method])
        panel.fill_between(steps, middle - error, middle + error, color=color(method), alpha=0.12, lw=0)
    panel.set(title=task, xlabel="step")
    panel.grid(alpha=0.3)


def draw_ends(panel, run: Run, task: str) -> None:
    panel.axhline(0, color=color(BON), lw=2)
    for method in run.methods(task):
        ours, theirs = run.paired(task, REWARD, method, BON)
        kl, _ = run.paired(task, KL, method, None)
        if method == BON or len(ours) < 2 or not len(kl):
            continue
        gain = ours - theirs
        panel.errorbar(kl.mean(), gain.mean(), standard_error(gain), color=color(method), marker="o", capsize=3)
    panel.set(xscale="log", xlabel="KL at prefixes of the unsteered model, nats a response")
    panel.grid(alpha=0.3)


def standard_error(values: np.ndarray) -> np.ndarray:
    """Of the mean along the first axis."""
    return values.std(0, ddof=1) / len(values) ** 0.5


def color(method: str) -> str:
    return f"C{list(NAMES).index(method)}"


def draw(run: Run, path: str) -> None:
    picture = Figure(figsize=(1 + 5 * len(run.tasks), 8.6), layout="constrained")
    above, below = picture.subplots(2, len(run.tasks), squeeze=False)
    for upper, lower, task in zip(above, below, run.tasks, strict=True):
        draw_steps(upper, run, task)
        draw_ends(lower, run, task)
    above[0].set_ylabel("mean reward above the model's own")
    below[0].set_ylabel("best reward above best-of-n's")
    lines = {line.get_label(): line for panel in above for line in panel.get_lines()}
    picture.legend(lines.values(), lines.keys(), loc="outside lower center", ncols=5, frameon=False)
    picture.savefig(path, dpi=110)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", help="folders of `misvo bench configs/claims.toml`, or files of kept rows")
    parser.add_argument("--out", metavar="FILE", required=True)
    arguments = parser.parse_args()
    draw(Run(*arguments.runs), arguments.out)


if __name__ == "__main__":
    main()
