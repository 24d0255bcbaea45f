"""What a report is made from: the rows of one or more run folders, averaged in the ways that the paper averages.

Every figure of a report comes from here; tables and pictures only lay it out. The mean over seeds is a mean over
prompts for each seed, then mean and sample standard deviation over seeds; deviations are over prompts, each averaged
over its seeds.
"""

import math
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from misvo import metrics
from misvo.bench.folder import CONFIG, ENVIRONMENT, read_config, whole_rows
from misvo.bench.plan import expected_rows
from misvo.bench.sweep import latest
from misvo.errors import MisvoError
from misvo.lines import read_json

GAIN = "gain"
# What a reader sees: figure of a row -> heading
READINGS = {
    "reward": "Reward returned ↑",
    "raw_best.reward": "Best reward seen ↑",
    GAIN: "Last step's mean, reference SDs ↑",
    "kl_per_token": "KL per token ↓",
    "fluency": "Fluency ↑",
    "coherence": "Coherence ↑",
    "diversity": "Diversity ↑",
    "held_out": "Held-out reward ↑",
    "seconds.wall": "Seconds ↓",
    "seconds.cpu": "CPU seconds ↓",
}


@dataclass
class Cell:
    """The finished rows of one model, task and method, over prompts and seeds."""

    model: str
    task: str
    method: str
    settings: dict
    rows: list[dict] = field(default_factory=list)

    @property
    def is_baseline(self) -> bool:
        return self.settings["method"] == "best-of-n"

    @property
    def generations(self) -> int:
        return self.settings["rollouts"] * self.settings["steps"]

    def over_seeds(self, name: str) -> metrics.Spread | None:
        """Mean ± standard deviation over seeds of a row's figure; None where no row has it."""
        by_seed = defaultdict(list)
        for row in self.rows:
            if figure(row, name) is not None:
                by_seed[row["seed"]].append(figure(row, name))
        return metrics.over_seeds(by_seed) if by_seed else None

    def by_prompt(self, name: str) -> dict[str, float]:
        """A row's figure for each prompt, averaged over seeds."""
        return _averaged((row["prompt"], figure(row, name)) for row in self.rows)

    def over_prompts(self, name: str) -> metrics.Spread | None:
        values = self.by_prompt(name)
        return metrics.spread(values.values()) if values else None

    def trajectory(self, name: str) -> tuple[list[int], list[float], list[float]]:
        """Generations so far, mean and standard deviation over seeds, of a figure of the trace at each step."""
        steps = min(len(row["trace"]) for row in self.rows)
        by_seed = defaultdict(list)
        for row in self.rows:
            by_seed[row["seed"]].append([step[name] for step in row["trace"][:steps]])
        curves = np.array([np.mean(curves, axis=0) for _, curves in sorted(by_seed.items())])  # (seeds, steps)
        deviation = curves.std(0, ddof=1) if len(curves) > 1 else np.zeros(steps)
        generations = [(step + 1) * self.settings["rollouts"] for step in range(steps)]
        return generations, curves.mean(0).tolist(), deviation.tolist()

    def clock(self) -> list[float] | None:
        """Seconds of a prompt until the end of each step, averaged over rows; None where runs of old have none."""
        if not all("steps" in row.get("seconds", {}) for row in self.rows):
            return None
        steps = min(len(row["trace"]) for row in self.rows)
        each = [[row["seconds"]["prefill"], *row["seconds"]["steps"][:steps]] for row in self.rows]
        return np.cumsum(np.mean(each, axis=0))[1:].tolist()

    def positions(self, name: str) -> list[float] | None:
        """A figure by position, averaged over rows."""
        found = [row[name] for row in self.rows if row.get(name)]
        return np.mean(found, axis=0).tolist() if found else None


@dataclass
class Results:
    """All that the given folders hold."""

    cells: list[Cell]
    tasks: dict[str, dict]  # label -> name, source, reward, prompts
    profiles: list[dict]
    missing: list[str]  # sentences on what is not there
    errors: list[tuple[str, str]]  # where, message
    environments: list[dict]
    encoders: set[str]
    judges: set[str]
    held_out: set[str]  # specs of rewards that no method saw

    def models(self, task: str) -> list[str]:
        return list(dict.fromkeys(cell.model for cell in self.cells if cell.task == task and cell.rows))

    def of(self, model: str, task: str) -> list[Cell]:
        return [cell for cell in self.cells if cell.model == model and cell.task == task and cell.rows]

    def baselines(self, cells: list[Cell]) -> list[str]:
        """Labels of the best-of-n among cells: the one without a label of its own first."""
        labels = dict.fromkeys(cell.method for cell in cells if cell.is_baseline and cell.rows)
        return sorted(labels, key=lambda label: label != "best-of-n")

    def baseline(self, model: str, task: str, label: str | None = None) -> Cell | None:
        """The best-of-n of a label, or the first one."""
        cells = self.of(model, task)
        wanted = self.baselines(cells)[:1] if label is None else [label]
        return next((cell for cell in cells if cell.method in wanted), None)

    def gains(self, cell: Cell) -> dict[str, float]:
        """The last step's mean reward above the reference, in the reference's standard deviations, for each prompt.

        The reference are the responses of best-of-n to the same prompt and seed, else those of the cell's own first
        step. A prompt whose reference responses all earn the same has no such unit, and is left out.
        """
        baseline = self.baseline(cell.model, cell.task)
        known = {(row["prompt"], row["seed"]): row.get("reference_rewards") for row in (baseline or cell).rows}
        found = []
        for row in cell.rows:
            reference = known.get((row["prompt"], row["seed"])) or row.get("reference_rewards")
            if reference is not None and reference["std"]:
                found.append((row["prompt"], (row["trace"][-1]["mean"] - reference["mean"]) / reference["std"]))
        return _averaged(found)

    def readings(self, cell: Cell) -> dict[str, dict[str, float]]:
        """Each figure of the table of what a reader sees, by prompt."""
        found = {name: self.gains(cell) if name == GAIN else cell.by_prompt(name) for name in READINGS}
        return {name: values for name, values in found.items() if values}


def against_baseline(results: Results, cell: Cell, label: str, name: str = "reward") -> metrics.Difference | None:
    """Paired bootstrap of a reading against the best-of-n of a label on the same prompts."""
    baseline = results.baseline(cell.model, cell.task, label)
    if baseline is None or baseline is cell:
        return None
    ours, theirs = results.readings(cell).get(name, {}), results.readings(baseline).get(name, {})
    return metrics.paired_bootstrap(ours, theirs)


def figure(row: dict, name: str) -> float | None:
    """A figure of a row, `raw_best.reward` for one inside another; None where it has none, as runs of old."""
    for part in name.split("."):
        row = (row or {}).get(part)
    return row


def _averaged(pairs) -> dict[str, float]:
    """The mean of the values of each prompt that are known."""
    values = defaultdict(list)
    for prompt, value in pairs:
        if value is not None:
            values[prompt].append(value)
    return {prompt: float(np.mean(found)) for prompt, found in values.items()}


def best_of_n_kl(n: int) -> float:
    """The KL of best-of-n from the reference is at most log n − (n − 1)/n nats (and near it where rewards differ)."""
    return math.log(n) - (n - 1) / n


def load(folders: list[Path]) -> Results:
    """Read run folders, finished or not, and profiles."""
    results = Results([], {}, [], [], [], [], set(), set(), set())
    wanted: dict[str, set] = {}  # rows of each cell that some folder is to have
    done: dict[str, set] = {}  # and those that some folder has
    for folder in map(Path, folders):
        if not folder.is_dir():
            raise MisvoError(f"there is no run folder {folder}.")
        profile = folder / "profile.json"
        if profile.exists():
            results.profiles.append(read_json(profile))
        if (folder / CONFIG).exists():
            _add_run(results, folder, wanted, done)
        elif not profile.exists():
            raise MisvoError(f"{folder} is no run of misvo: it has neither {CONFIG} nor profile.json.")
    for where, rows in wanted.items():
        if missing := len(rows - done[where]):
            results.missing.append(f"{where}: {missing} of {len(rows)} prompts are not done yet")
    return results


def _add_run(results, folder, wanted, done):
    resolved = read_config(folder)
    if (folder / ENVIRONMENT).exists():
        results.environments += read_json(folder / ENVIRONMENT)[-1:]
    results.encoders.add(resolved["encoder"])
    results.judges |= {resolved["judge"]} - {None}
    results.held_out |= {resolved["held_out"]} - {None}
    rows = latest(whole_rows(folder)[0]).values()
    for label, task in resolved["tasks"].items():
        known = results.tasks.setdefault(label, task)
        if (known["reward"], known["source"]) != (task["reward"], task["source"]):
            raise MisvoError(f"the runs have two different tasks called {label!r}: report them one by one.")
    for cell in resolved["cells"].values():
        mine = [row for row in rows if all(row[part] == cell[part] for part in ("model", "task", "method"))]
        well = [row for row in mine if "error" not in row]
        where = f"{cell['model']} × {cell['task']} × {cell['method']}"
        results.errors += [(f"{where} × {r['prompt']} × seed {r['seed']}", r["error"]) for r in mine if "error" in r]
        wanted.setdefault(where, set()).update(expected_rows(resolved, cell))
        done.setdefault(where, set()).update((row["prompt"], row["seed"]) for row in mine)
        failed = len(mine) - len(well)
        if failed:
            results.missing.append(f"{where}: {failed} prompts failed and are left out")
        same = next((c for c in results.cells if (c.model, c.task, c.method) == _name(cell)), None)
        if same is None:
            results.cells.append(Cell(cell["model"], cell["task"], cell["method"], cell["settings"], well))
        elif same.settings == cell["settings"]:
            same.rows += well  # more seeds or prompts of the same cell
        else:
            raise MisvoError(f"the runs have {where} with different settings: report them one by one.")


def _name(cell):
    return cell["model"], cell["task"], cell["method"]
