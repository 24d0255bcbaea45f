"""How a saved steering acts at several strengths: the same prompt and the same noise, u times each of them.

    run = read("run")                                            # what `misvo steer --save` wrote, or a steering
    for row in at_strengths(policy, run, [0, 0.5, 1], samples=8): ...

Reward, distance and changed tokens side by side: `misvo sample`. At strength 0 the model is as it was.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.table import Table
from rich.text import Text

from misvo import result_files
from misvo.errors import MisvoError
from misvo.policy import Policy
from misvo.prompts import Prompt, shown
from misvo.result import Result
from misvo.rewards import Reward, score
from misvo.steering import Steering, as_steering
from misvo.text import one_line


@dataclass(frozen=True)
class Saved:
    """A steering, and the prompt that it was made for, where that is known."""

    steering: Steering
    prompt: Prompt | None = None  # as people and rewards see it
    prompt_ids: list[int] = field(default_factory=list)  # as the model read it

    @property
    def model(self) -> str | None:
        return self.steering.metadata.get("model")

    @property
    def template(self) -> dict:
        """How prompts become token ids, as in the run."""
        settings = self.steering.metadata.get("settings", {})
        return {name: settings[name] for name in ("raw", "chat_template_kwargs") if name in settings}


@dataclass(frozen=True)
class AtStrength:
    """What was sampled with u times `strength`."""

    strength: float
    reward: float | None  # the mean of `rewards`; None without a reward, or where it scored nothing
    kl_per_token: float  # nats, measured at the prefixes that were visited
    changed: float  # share of tokens that the model would have drawn otherwise, with the same noise
    texts: list[str]
    rewards: list[float | None]


def read(folder: Path) -> Saved:
    """What a folder of `misvo steer --save`, or of `Steering.save_pretrained`, holds."""
    if (folder / result_files.RESULT).exists() or (folder / result_files.COMMITTED).exists():
        result = Result.load(folder)
        return Saved(as_steering(result), result.prompt, result.prompt_ids)
    steering = Steering.from_pretrained(folder)
    return Saved(steering, steering.metadata.get("prompt"))


def at_strengths(
    policy: Policy,
    saved: Saved,
    strengths: Sequence[float],
    *,
    prompt: Prompt | None = None,
    samples: int = 8,
    max_new_tokens: int | None = None,
    seed: int = 0,
    reward: Reward | None = None,
    columns: dict | None = None,
    progress: Callable[[float], object] | None = None,
) -> list[AtStrength]:
    """Sample at each strength; without a prompt, with that of the run. `progress(strength)` is called after each."""
    asked = saved.prompt if prompt is None else prompt
    if asked is None:
        raise MisvoError("this steering does not say which prompt it was made for: give a prompt.")
    ids = saved.prompt_ids if prompt is None else []
    how = {} if ids else saved.template
    rows = []
    for strength in strengths:
        sampled = policy.sample(
            ids or asked,
            saved.steering,
            strength=strength,
            samples=samples,
            max_new_tokens=max_new_tokens,
            seed=seed,
            **how,
        )
        rollouts, rewards = sampled.rollouts, []
        if reward is not None:
            told = shown(asked, policy.decode)
            rewards = list(score(reward, told, sampled.texts, rollouts.responses(), columns or {}))
        known, tokens = [value for value in rewards if value is not None], rollouts.lengths.sum().item()
        mean = statistics.fmean(known) if known else None
        nats, changed = rollouts.kl.sum().item() / tokens, (rollouts.changed & rollouts.alive).sum().item() / tokens
        rows.append(AtStrength(strength, mean, nats, changed, sampled.texts, rewards))
        if progress is not None:
            progress(strength)
    return rows


def table(rows: list[AtStrength], reward: str | None) -> Table:
    """A row for each strength, with its first text: the same noise made them all."""
    made = Table()
    for heading in ("strength", *([reward] if reward else []), "KL per token", "changed tokens"):
        made.add_column(Text(heading), justify="right")
    made.add_column("the first sample")
    for row in rows:
        figures = [f"{row.strength:g}", f"{row.kl_per_token:.3f}", f"{row.changed:.0%}"]
        if reward:
            figures.insert(1, "—" if row.reward is None else f"{row.reward:.3f}")
        made.add_row(*figures, Text(one_line(row.texts[0].strip(), 160) or "(empty)"))
    return made
