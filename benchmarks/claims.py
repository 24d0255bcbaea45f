"""What the paper claims and whether it holds in a run, claim by claim: numpy on rows.jsonl, and nothing of misvo.

    misvo bench configs/claims.toml --data SHP_PROMPTS.jsonl
    python benchmarks/claims.py runs/claims
    python benchmarks/claims.py docs/claims.jsonl                              # of rows that are kept
    python benchmarks/claims.py docs/claims.jsonl runs/claims --keep docs/claims.jsonl   # which were kept so
    python benchmarks/claims.py docs/claims.jsonl --into docs/results.md       # the tables of a page, made anew

Every claim is one number: a ratio of two means, a difference of two means, or a change along a run. Means are over
prompts, each averaged over its seeds, and only of prompts and seeds that both methods have. The interval is a paired
bootstrap: prompts are drawn anew, pairs stay together, 95 % of the draws lie inside.

The rule. A claim has a side: below 1, above 0, within ±0.05. It **holds** where the whole interval lies on that side,
it **does not hold** where the whole interval lies on the other, and else it is **open**, as is everything of fewer than
eight prompts. Whether the paper's own figure lies in the interval is told beside it and decides nothing: model, reward
and length are others.
"""

import argparse
import json
from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path

import numpy as np

FEWEST = 8  # prompts; the bootstrap of fewer is too narrow to decide anything
RESAMPLES, SEED, LEVEL = 10_000, 0, 0.95
HOLDS, FAILS, OPEN = "holds", "does not hold", "open"
NAMES = {
    "frozen-fisher": "MISVO",
    "prefix-fisher": "prefix Fisher",
    "iterate-fisher": "iterate Fisher",
    "sequence-kl": "direct KL",
    "euclidean": "l2",
    "none": "unregularised",
    "aisp": "AISP",
    "re-control": "RE-Control",
    "best-of-n": "BoN",
}
MISVO, PREFIX, ITERATE, DIRECT, L2, NONE, AISP, CONTROL, BON = NAMES  # what a method is in the settings of its cell
KL, NORM, REWARD, DIVERSITY, COHERENCE = "kl_ref", "norm", "reward", "diversity", "coherence"
CPU, RISE, LATE = "seconds.cpu", "rise", "late"
WORDS = {
    KL: "KL_ref",
    NORM: "‖u‖",
    REWARD: "best reward",
    DIVERSITY: "diversity",
    COHERENCE: "coherence",
    CPU: "time",
    RISE: "mean of the last quarter of the steps less that of the first",
    LATE: "mean of the last quarter of the steps less that of the second",
}
SEEN = [REWARD, "held_out", "last", KL, NORM, DIVERSITY, COHERENCE, "fluency"]  # of the table of all methods


@dataclass(frozen=True)
class Claim:
    """`figure` of a method, over (ratio), less (difference) or without (change) that of another, lies on a side."""

    source: str
    figure: str
    method: str
    other: str | None
    side: str  # "below", "above" or "within"
    paper: float | str  # what the paper has: a figure, or a word where it shows a picture
    within: float = 0.0

    @property
    def ratio(self) -> bool:
        return self.other is not None and self.figure in (KL, NORM, CPU)

    @property
    def text(self) -> str:
        sign = "" if self.other is None else f" {'/' if self.ratio else '−'} {NAMES[self.other]}"
        bound = f"±{self.within:g}" if self.side == "within" else str(int(self.ratio))
        return f"{WORDS[self.figure]}: {NAMES[self.method]}{sign} {self.side} {bound}"

    def measure(self, ours: np.ndarray, theirs: np.ndarray) -> np.ndarray:
        """The number, of means along the last axis."""
        return ours.mean(-1) / theirs.mean(-1) if self.ratio else ours.mean(-1) - theirs.mean(-1)

    def verdict(self, low: float, high: float, prompts: int) -> str:
        if prompts < FEWEST:
            return OPEN
        if self.side == "within":
            inside, outside = -self.within <= low and high <= self.within, low > self.within or high < -self.within
        else:
            bound = float(self.ratio)
            inside, outside = high < bound, low > bound
            inside, outside = (inside, outside) if self.side == "below" else (outside, inside)
        return HOLDS if inside else FAILS if outside else OPEN


CLAIMS = [
    Claim("Table 3", KL, MISVO, NONE, "below", 47.5 / 162.2),
    Claim("Table 3", NORM, MISVO, NONE, "below", 339.9 / 474.6),
    Claim("Table 3", KL, DIRECT, NONE, "below", 120.1 / 162.2),
    Claim("Table 3", NORM, DIRECT, NONE, "below", 459.3 / 474.6),
    Claim("Table 3", KL, L2, NONE, "below", 0.92 / 162.2),
    Claim("Table 3", NORM, L2, NONE, "below", 48.3 / 474.6),
    Claim("Table 3", KL, AISP, NONE, "above", 303.9 / 162.2),
    Claim("Table 3", NORM, AISP, NONE, "above", 2631.7 / 474.6),
    Claim("Table 3", KL, AISP, MISVO, "above", 303.9 / 47.5),
    Claim("Table 3", KL, DIRECT, MISVO, "above", 120.1 / 47.5),
    Claim("Table 1", REWARD, MISVO, BON, "above", 9.29 - 8.70),
    Claim("Table 1", REWARD, MISVO, AISP, "above", 9.29 - 9.09),
    Claim("Table 1", REWARD, AISP, BON, "above", 9.09 - 8.70),
    Claim("Table 3", REWARD, MISVO, NONE, "above", 9.60 - 9.31),
    Claim("Table 3", REWARD, MISVO, DIRECT, "above", 9.60 - 8.49),
    Claim("Table 3", REWARD, MISVO, L2, "above", 9.60 - 8.39),
    Claim("Table 3", REWARD, NONE, BON, "above", 9.31 - 8.89),
    Claim("Table 3", REWARD, DIRECT, BON, "below", 8.49 - 8.89),
    Claim("Table 3", REWARD, L2, BON, "below", 8.39 - 8.89),
    Claim("Section 5.1", REWARD, CONTROL, MISVO, "below", "inferior"),
    Claim("Table 4", REWARD, MISVO, PREFIX, "above", 9.26 - 9.06),
    Claim("Table 4", REWARD, MISVO, ITERATE, "above", 9.26 - 8.92),
    Claim("Table 4", REWARD, MISVO, PREFIX, "within", 9.26 - 9.06, 0.34),
    Claim("Table 4", REWARD, MISVO, ITERATE, "within", 9.26 - 8.92, 0.34),
    Claim("Table 4", DIVERSITY, MISVO, ITERATE, "within", 0.723 - 0.710, 0.013),
    Claim("Table 4", COHERENCE, MISVO, ITERATE, "within", 0.661 - 0.656, 0.013),
    Claim("Table 1", DIVERSITY, MISVO, BON, "within", 0.719 - 0.688, 0.05),
    Claim("Table 1", COHERENCE, MISVO, BON, "within", 0.654 - 0.671, 0.05),
    Claim("Figure 2", RISE, MISVO, None, "above", "rises"),
    Claim("Figure 2", RISE, AISP, None, "below", "falls"),
    Claim("Figure 2", LATE, AISP, None, "below", "falls at later steps"),
    Claim("Table 5", CPU, MISVO, BON, "above", 49.3 / 24.4),
    Claim("Table 5", CPU, AISP, BON, "above", 43.3 / 24.4),
]


def labels_of(folder: Path) -> dict[tuple[str, str], str]:
    """Which of the methods of `NAMES` the labels of a run stand for on each of its tasks."""
    labels = {}
    for cell in json.loads((folder / "config.json").read_text(encoding="utf-8"))["cells"].values():
        settings = cell["settings"]
        method = settings["cost"] if settings["method"] == "misvo" else settings["method"]
        if method in NAMES:
            known = labels.setdefault((cell["task"], method), cell["method"])
            if known != cell["method"]:
                raise SystemExit(f"both {known!r} and {cell['method']!r} are {NAMES[method]} on {cell['task']}.")
    return {(task, label): method for (task, method), label in labels.items()}


class Run:
    """Rows by task, method and (prompt, seed), of folders and of files that `keep` wrote; later ones count."""

    def __init__(self, *paths):
        self.rows = defaultdict(dict)
        for path in map(Path, paths):
            labels, file = (labels_of(path), path / "rows.jsonl") if path.is_dir() else (None, path)
            for row in map(json.loads, file.read_text(encoding="utf-8").splitlines()):
                method = row["method"] if labels is None else labels.get((row["task"], row["method"]))
                if method is not None:
                    self.rows[row["task"], method][row["prompt"], row["seed"]] = row
        self.tasks = list(dict.fromkeys(task for task, _ in self.rows))

    def keep(self, path):
        """Write what the tables need of every row, one a line."""
        kept = []
        for (task, method), rows in sorted(self.rows.items()):
            for (prompt, seed), row in sorted(rows.items()):
                short = {"task": task, "method": method, "prompt": prompt, "seed": seed}
                short |= {name: row[name] for name in (*SEEN, "error") if name in row}
                short |= {"seconds": {"cpu": row["seconds"]["cpu"]}} if "seconds" in row else {}
                kept.append(short | {"trace": [{"mean": step["mean"]} for step in row.get("trace", [])]})
        Path(path).write_text("".join(json.dumps(row) + "\n" for row in kept), encoding="utf-8")

    def methods(self, task) -> list[str]:
        return [method for method in NAMES if self.values(task, method, REWARD)]

    def values(self, task, method, figure) -> dict[tuple[str, int], float]:
        found = {key: figure_of(row, figure) for key, row in self.rows[task, method].items() if "error" not in row}
        return {key: value for key, value in found.items() if value is not None}

    def seeds(self, task, method) -> list[int]:
        """How many of each prompt."""
        return list(Counter(prompt for prompt, _ in self.values(task, method, REWARD)).values())

    def paired(self, task, figure, method, other) -> tuple[np.ndarray, np.ndarray]:
        """Two methods' means over seeds on the prompts that both have; zeros in the place of no other."""
        ours = self.values(task, method, figure)
        theirs = dict.fromkeys(ours, 0.0) if other is None else self.values(task, other, figure)
        seeds = defaultdict(list)
        for prompt, seed in sorted(ours.keys() & theirs.keys()):
            seeds[prompt].append((ours[prompt, seed], theirs[prompt, seed]))
        pairs = np.array([np.mean(values, axis=0) for values in seeds.values()]).reshape(-1, 2)  # (prompts, 2)
        return pairs[:, 0], pairs[:, 1]


def figure_of(row: dict, figure: str) -> float | None:
    """A figure of a row; quarters of a run are of its steps' mean rewards."""
    if figure in (RISE, LATE, "last"):
        means = [step["mean"] for step in row["trace"]]
        size = max(1, len(means) // 4)
        last, first = np.mean(means[-size:]), 0 if figure == RISE else size
        return means[-1] if figure == "last" else float(last - np.mean(means[first : first + size]))
    value = row
    for part in figure.split("."):
        value = value[part]
    return value


def interval(measure, *columns: np.ndarray) -> tuple[float, float]:
    """Where 95 % of the values lie that a measure of means has on prompts drawn anew."""
    picks = np.random.default_rng(SEED).integers(len(columns[0]), size=(RESAMPLES, len(columns[0])))
    draws = measure(*(column[picks] for column in columns))  # (RESAMPLES,)
    low, high = np.quantile(draws, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


def judged(run: Run, task: str, claim: Claim) -> tuple[float, float, float, int] | None:
    """The number of a claim, its interval and the prompts; None where nothing of it was run."""
    ours, theirs = run.paired(task, claim.figure, claim.method, claim.other)
    if not len(ours) or (claim.ratio and not theirs.all()):
        return None
    return float(claim.measure(ours, theirs)), *interval(claim.measure, ours, theirs), len(ours)


def number(value: float, signed: bool) -> str:
    return f"{value:+.3f}" if signed else f"{value:.3g}"


def claims_table(run: Run, task: str) -> list[list[str]]:
    rows = []
    for claim in CLAIMS:
        signed, found = not claim.ratio, judged(run, task, claim)
        paper = claim.paper if isinstance(claim.paper, str) else number(claim.paper, signed)
        if found is None:
            rows.append([claim.source, claim.text, paper, "not run", "", OPEN, ""])
            continue
        value, low, high, prompts = found
        inside = "" if isinstance(claim.paper, str) else "yes" if low <= claim.paper <= high else "no"
        here = f"{number(value, signed)} [{number(low, signed)}, {number(high, signed)}]"
        rows.append([claim.source, claim.text, paper, here, str(prompts), claim.verdict(low, high, prompts), inside])
    return rows


def methods_table(run: Run, task: str) -> list[list[str]]:
    """Every figure of every method, for rewards the difference to best-of-n, and how many runs it is of."""
    rows = []
    for method in run.methods(task):
        cells = [NAMES[method]]
        for figure in SEEN:
            mine, _ = run.paired(task, figure, method, None)
            cell = f"{mine.mean():.3f}" if len(mine) else ""
            if figure in (REWARD, "held_out") and method != BON:
                pair = run.paired(task, figure, method, BON)
                if len(pair[0]):
                    low, high = interval(lambda ours, theirs: (ours - theirs).mean(-1), *pair)
                    cell += f": {(pair[0] - pair[1]).mean():+.3f} [{low:+.3f}, {high:+.3f}]"
            cells.append(cell)
        rows.append([*cells, str(sum(run.seeds(task, method)))])
    return rows


def markdown(columns: list[str], rows: list[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in [columns, ["---"] * len(columns), *rows]) + "\n"


def tables(run: Run, task: str) -> dict[str, str]:
    """What there is to say of a task, each part by its name."""
    rows = claims_table(run, task)
    verdicts = [row[5] for row in rows]
    counts = [count for method in run.methods(task) for count in run.seeds(task, method)]
    least, most = min(counts), max(counts)
    seeds = f"{most} {'seed' if most == 1 else 'seeds'}" if least == most else f"{least} to {most} seeds"
    columns = ["in the paper", "claim", "paper", "here [95 % interval]", "prompts", "verdict", "paper's inside"]
    names = {**WORDS, "held_out": "held-out reward", "last": "mean, last step", "fluency": "fluency"}
    return {
        "verdicts": f"{verdicts.count(HOLDS)} hold, {verdicts.count(FAILS)} do not, {verdicts.count(OPEN)} are open"
        f" ({seeds} of each prompt).",
        "claims": markdown(columns, rows),
        "methods": markdown(["method", *(names[figure] for figure in SEEN), "runs"], methods_table(run, task)),
    }


def side_by_side(run: Run) -> str:
    """What became of every claim on each task, in one table."""
    found = zip(*(claims_table(run, task) for task in run.tasks), strict=True)
    rows = [[*lines[0][:3], *(f"{line[3]} **{line[5]}**" for line in lines)] for lines in found]
    return markdown(["in the paper", "claim", "paper", *(f"here, {task}" for task in run.tasks)], rows)


def fill(page: Path, parts: dict[str, str]) -> None:
    """Put every part behind its line `<!-- name -->`, in the place of what stands there up to an empty line."""
    text = page.read_text(encoding="utf-8")
    for name, part in parts.items():
        before, line, after = text.partition(f"<!-- {name} -->\n")
        if not line:
            raise SystemExit(f"{page} has no line <!-- {name} -->.")
        text = before + line + part.strip() + after[after.index("\n\n") :]
    page.write_text(text, encoding="utf-8")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", help="folders of `misvo bench configs/claims.toml`, or files of kept rows")
    parser.add_argument("--keep", metavar="FILE", help="write there what the tables need of all rows")
    parser.add_argument("--into", metavar="PAGE", type=Path, help="put the tables behind their lines in this page")
    arguments = parser.parse_args()
    run = Run(*arguments.runs)
    if arguments.keep:
        run.keep(arguments.keep)
    found = {task: tables(run, task) for task in run.tasks}
    if arguments.into:
        parts = {f"{task}: {name}": found[task][name] for task in found for name in ("verdicts", "methods")}
        fill(arguments.into, {"claims": side_by_side(run), **parts})
        return
    for task, parts in found.items():
        print(f"## {task}\n\n{parts['verdicts']}\n\n{parts['claims']}")
        print(f"Means over prompts; rewards also less best-of-n's [95 % interval].\n\n{parts['methods']}")


if __name__ == "__main__":
    main()
