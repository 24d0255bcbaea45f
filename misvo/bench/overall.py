"""All tasks of a sweep together: each method beside best-of-n, rewards of different scale in one unit.

The unit is the standard deviation of the rewards that the reference policy earns on the same prompt; a prompt on which
all of its responses earn the same has none, and is left out of what is told in it. Pairs are those of a task, a prompt
and a seed's average that both methods have.
"""

from dataclasses import dataclass

import numpy as np

from misvo import metrics
from misvo.bench.results import GAIN, Cell, Results

CHOOSING = ("kl_target", "kl_bound")  # columns of a trace: nats a response by which rows were chosen, not moved
Place = tuple[str, str]  # task, prompt


@dataclass(frozen=True)
class Standing:
    """One method over all tasks; None where nothing is known."""

    method: str
    tasks: int
    prompts: int  # pairs of a task and a prompt
    best: metrics.Difference | None  # highest reward seen, less best-of-n's, in reference SDs
    returned: metrics.Difference | None  # reward of what is returned, likewise
    gain: float | None  # the last step's mean above the reference, in reference SDs
    fluency: metrics.Difference | None  # of what is returned, less best-of-n's
    kl_per_token: float | None
    choosing: float | None  # nats a response, where a method chooses among rows
    cpu: float | None  # CPU seconds, as a multiple of best-of-n's on the same prompts


def standings(results: Results, model: str, baseline: str) -> list[Standing]:
    """Every method that a model ran, in the order of the sweep."""
    cells: dict[str, list[Cell]] = {}
    for cell in results.cells:
        if cell.model == model and cell.rows and results.baseline(model, cell.task, baseline):
            cells.setdefault(cell.method, []).append(cell)
    theirs = cells.get(baseline, [])
    return [_standing(results, method, mine, theirs) for method, mine in cells.items()]


def _standing(results, method, mine, theirs) -> Standing:
    def against(name, values):
        return (
            None
            if mine is theirs
            else metrics.paired_bootstrap(values(results, mine, name), values(results, theirs, name))
        )

    cpu, base = plain(results, mine, "seconds.cpu"), plain(results, theirs, "seconds.cpu")
    shared = cpu.keys() & base.keys()
    return Standing(
        method,
        len(mine),
        len(plain(results, mine, "reward")),
        against("raw_best.reward", in_deviations),
        against("reward", in_deviations),
        _mean(plain(results, mine, GAIN).values()),
        against("fluency", plain),
        _mean(plain(results, mine, "kl_per_token").values()),
        _mean(nats for cell in mine for row in cell.rows for nats in _chosen(row)),
        sum(cpu[place] for place in shared) / sum(base[place] for place in shared) if shared else None,
    )


def plain(results: Results, cells: list[Cell], name: str) -> dict[Place, float]:
    """A reading of some cells as it is."""
    return {
        (cell.task, prompt): value for cell in cells for prompt, value in results.readings(cell).get(name, {}).items()
    }


def in_deviations(results: Results, cells: list[Cell], name: str) -> dict[Place, float]:
    """A reward of some cells in standard deviations of the reference's rewards on the same prompt."""
    found = {}
    for cell in cells:
        units: dict[str, list[float]] = {}
        baseline = results.baseline(cell.model, cell.task)
        for row in baseline.rows if baseline else []:
            if row.get("reference_rewards") and row["reference_rewards"]["std"]:
                units.setdefault(row["prompt"], []).append(row["reference_rewards"]["std"])
        for prompt, value in cell.by_prompt(name).items():
            if prompt in units:
                found[cell.task, prompt] = value / float(np.mean(units[prompt]))
    return found


def _chosen(row) -> list[float]:
    return [step[name] for step in row["trace"] for name in CHOOSING if step.get(name) is not None]


def _mean(values) -> float | None:
    values = list(values)
    return float(np.mean(values)) if values else None
