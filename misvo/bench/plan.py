"""From a config to work: the prompts of every task, the chunks to run, and the resolved config that a run is held to.

A chunk is a few prompts of one cell and one seed that share a batch. Its make-up follows from the config alone, so a
resumed run or another number of workers computes each prompt among the same batch mates. Tokens and rewards are then
the same; with `prompts_per_batch = 1` and as many threads, so is every last bit of the vectors.
"""

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from misvo import tasks
from misvo.bench.config import Cell, Config, Model, TaskEntry
from misvo.prompts import render
from misvo.settings import deciding

FORMAT = "misvo-run-1"
Key = tuple[str, str, str, str, int]  # model, task, prompt, method, seed
KEY = ("model", "task", "prompt", "method", "seed")


@dataclass(frozen=True)
class Chunk:
    cell: Cell
    seed: int
    rows: tuple[tasks.Row, ...]
    reward: str  # its spec: workers load it for themselves

    @property
    def keys(self) -> list[Key]:
        cell = self.cell
        return [(cell.model.label, cell.task.label, row.id, cell.method.label, self.seed) for row in self.rows]

    @property
    def budget(self) -> int:
        """Tokens at most: what an estimate of time scales with until the cell has been measured."""
        settings = self.cell.settings
        return len(self.rows) * settings.rollouts * settings.steps * settings.max_new_tokens


@dataclass(frozen=True)
class Plan:
    config: Config
    tasks: dict[str, tasks.Task]  # by label, already sampled
    chunks: list[Chunk]
    notes: list[str]

    def resolved(self, encoder: str) -> dict:
        """Everything that decides the rows, as plain data; what only decides speed stays out."""
        config = self.config
        return {
            "format": FORMAT,
            "name": config.name,
            "models": {model.label: _plain(model, drop=("label", "settings")) for model in config.models},
            "tasks": {
                label: {
                    "name": task.name,
                    "source": task.source,
                    "reward": task.reward_spec,
                    "digest": task.digest,
                    "prompts": [row.id for row in task.rows],
                }
                for label, task in self.tasks.items()
            },
            "cells": {
                " × ".join((cell.model.label, cell.task.label, cell.method.label)): {
                    "model": cell.model.label,
                    "task": cell.task.label,
                    "method": cell.method.label,
                    "settings": {k: v for k, v in deciding(cell.settings.to_dict()).items() if k != "seed"},
                    **({"first_prompts": cell.method.prompts} if cell.method.prompts else {}),
                }
                for cell in config.cells()
            },
            "seeds": list(config.seeds),
            "encoder": encoder,
            "judge": config.judge,
            "held_out": config.held_out,
            "save_vectors": config.save_vectors,
        }


def expected_rows(resolved: dict, cell: dict) -> set[tuple[str, int]]:
    """The rows of a cell of a resolved config when it is finished: (prompt, seed)."""
    prompts = resolved["tasks"][cell["task"]]["prompts"][: cell.get("first_prompts")]
    return {(prompt, seed) for prompt in prompts for seed in resolved["seeds"]}


def make_plan(config: Config) -> Plan:
    """Load and sample the tasks, and cut every cell and seed into chunks.

    Models are outside, then seeds, then batches of prompts: a sweep that is cut short has all methods on some prompts.
    """
    loaded, notes = {}, []
    for entry in config.tasks:
        loaded[entry.label], note = load_task(entry, config.models[0])
        notes += [note] if note else []
    size, chunks, cells = config.prompts_per_batch, [], config.cells()
    for model in config.models:
        for seed in config.seeds:
            for start in range(0, max(len(task.rows) for task in loaded.values()), size):
                for cell in [cell for cell in cells if cell.model is model]:
                    task = loaded[cell.task.label]
                    if rows := tuple(task.rows[: cell.method.prompts][start : start + size]):
                        chunks.append(Chunk(cell, seed, rows, task.reward_spec))
    return Plan(config, loaded, chunks, notes)


def load_task(entry: TaskEntry, model: Model) -> tuple[tasks.Task, str | None]:
    """The prompts that an entry asks for, and a note where they are others; `model` counts their tokens."""
    note, count = None, entry.prompts
    if entry.own_prompts and (entry.data is None or not Path(entry.data).is_file()):
        task = tasks.load("prompts", None, entry.reward)
        note = f"{entry.data or 'its file'} is not there: the task {entry.label} uses {task.source} in its place."
        count = count and min(count, len(task.rows))
    else:
        task = tasks.load(entry.name, entry.data, entry.reward).since(entry.first)
        if entry.longest is not None:
            tokenizer = model.tokenizer()
            task = task.no_longer_than(entry.longest, lambda prompt: len(render(tokenizer, prompt)))
    task = task.sample(count, entry.sample_seed)
    if entry.more_data is not None:
        task = task.after(tasks.load(entry.name, entry.more_data, entry.reward).sample(entry.more_prompts))
    return task, note


def _plain(thing, drop=()):
    return {key: value for key, value in dataclasses.asdict(thing).items() if key not in drop}
