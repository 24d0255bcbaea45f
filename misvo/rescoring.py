"""Score the candidates of a finished run again, with another reward and without generating again.

    held_out = misvo.rescore(result, "hf:another/reward-model")      # or the folder of `misvo steer --save`
    held_out.correlation, held_out.old_best, held_out.new_best, held_out.rank

Steering raises the reward that it is given. Whether the responses became better, or only better at that reward,
shows in one that took no part: the mean of both by step, how a second judge ranks the response that the first one
chose, and the rank correlation of the two. This file knows candidates; how they were made is no matter here.
"""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from misvo.errors import MisvoError
from misvo.numbers import mean_of
from misvo.prompts import Prompt
from misvo.result import Candidate, Result
from misvo.result_files import read_plain
from misvo.rewards import Scores, TrainerState, as_reward, score


class Judged(NamedTuple):
    """A candidate with its own, old reward in it, and the new one."""

    candidate: Candidate
    reward: float | None


@dataclass(frozen=True)
class Rescored:
    """All candidates of a run in order, and the new reward of each; iterating gives the pairs."""

    prompt: Prompt
    candidates: list[Candidate]
    rewards: Scores
    choice: tuple[int, int] | None = None  # step and rollout of the response that the run chose, where that is known

    def __len__(self) -> int:
        return len(self.candidates)

    def __iter__(self) -> Iterator[Judged]:
        return map(Judged, self.candidates, self.rewards)

    @property
    def old_best(self) -> Judged:
        """The response that the run chose (`result.best`), else the one with the highest old reward."""
        for judged in self:
            if (judged.candidate.step, judged.candidate.rollout) == self.choice:
                return judged
        return _best(self, lambda judged: judged.candidate.reward, "old")

    @property
    def new_best(self) -> Judged:
        """The response that the new reward would have chosen."""
        return _best(self, lambda judged: judged.reward, "new")

    @property
    def rank(self) -> int | None:
        """The place of the run's choice under the new reward, 1 for the first; None where it has no new reward."""
        own = self.old_best.reward
        return None if own is None else 1 + sum(value is not None and value > own for value in self.rewards)

    @property
    def correlation(self) -> float | None:
        """Spearman's rank correlation of both rewards over candidates that have both; None where undefined."""
        from scipy.stats import spearmanr

        pairs = [(c.reward, new) for c, new in self if c.reward is not None and new is not None]
        olds, news = {old for old, _ in pairs}, {new for _, new in pairs}
        if len(olds) < 2 or len(news) < 2:
            return None
        value = float(spearmanr(pairs).statistic)
        return value if math.isfinite(value) else None

    @property
    def steps(self) -> list[dict]:
        """A row per step: the means of both rewards, the best old reward so far, and the new one of that response."""
        rows, leader = [], Judged(None, None)
        for step, group in groupby(self, key=lambda judged: judged.candidate.step):
            group = list(group)
            for judged in group:
                old = judged.candidate.reward
                if old is not None and (leader.candidate is None or old > leader.candidate.reward):
                    leader = judged
            rows.append(
                {
                    "step": step,
                    "old": mean_of(judged.candidate.reward for judged in group),
                    "new": mean_of(judged.reward for judged in group),
                    "best_old": leader.candidate and leader.candidate.reward,
                    "best_new": leader.reward,
                }
            )
        return rows

    def to_dict(self) -> dict:
        """Plain data for JSON."""
        return {
            "prompt": self.prompt,
            "correlation": self.correlation,
            "rank": self.rank,
            "old_best": _plain(self.old_best),
            "new_best": _plain(self.new_best),
            "unscored": sum(value is None for value in self.rewards),
            "steps": self.steps,
            "parts": self.rewards.parts,
            "candidates": [{"step": c.step, "rollout": c.rollout, "old": c.reward, "new": new} for c, new in self],
        }


def rescore(source, reward, *, prompt: Prompt | None = None, columns: dict | None = None, progress=None) -> Rescored:
    """Score a result, what `misvo steer --save` or `Result.to_dict` wrote of one, or candidates with their `prompt`.

    Steps are scored one after the other, as the run did, and `progress(step)` is called after each. `columns` is
    the dict that `misvo.steer` takes.
    """
    known, choice, candidates = _read(source)
    prompt = known if prompt is None else prompt
    if prompt is None:
        raise MisvoError("candidates alone do not know their prompt: give prompt=.")
    if not candidates:
        raise MisvoError("there are no candidates to score again.")
    candidates = sorted(candidates, key=lambda candidate: (candidate.step, candidate.rollout))
    reward, columns, scores = as_reward(reward), {} if columns is None else columns, []
    for step, group in groupby(candidates, key=lambda candidate: candidate.step):
        group = list(group)
        texts, tokens = [c.text for c in group], [c.tokens for c in group]
        scores.append(score(reward, prompt, texts, tokens, columns, TrainerState(step, candidates[-1].step + 1)))
        if progress is not None:
            progress(step)
    return Rescored(prompt, candidates, Scores.joined(scores), choice)


def read_columns(path: Path | None) -> dict:
    """The columns in a JSON file; none where there is no file."""
    if path is None:
        return {}
    try:
        columns = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise MisvoError(f"{path} could not be read: {error}") from error
    if not isinstance(columns, dict):
        raise MisvoError(f'{path} must hold a JSON object of columns, such as {{"answer": 4}}.')
    return columns


def _read(source):
    """The prompt and the place of the run's choice, where the source knows them, and the candidates."""
    if isinstance(source, Result):
        scored = any(candidate.reward is not None for candidate in source.candidates)
        best = source.best if scored else None
        return source.prompt, best and (best.step, best.rollout), source.candidates
    if isinstance(source, str | Path):
        where = f"{source} holds"
        source = read_plain(Path(source))
    else:
        where = "the source is"
    if isinstance(source, dict):
        try:
            rows, best = [Candidate.from_dict(row) for row in source["candidates"]], source.get("best")
            return source["prompt"], best and (best["step"], best["rollout"]), rows
        except (KeyError, TypeError) as error:
            raise MisvoError(f"{where} no result of a run: {error} is missing or wrong.") from error
    if isinstance(source, list) and all(isinstance(candidate, Candidate) for candidate in source):
        return None, None, source
    raise MisvoError(f"{where} no result of a run, no folder of one and no list of candidates.")


def _best(rescored, value_of, which):
    scored = [judged for judged in rescored if value_of(judged) is not None]
    if not scored:
        raise MisvoError(f"no response has a reward of the {which} kind.")
    return max(scored, key=value_of)


def _plain(judged):
    candidate = judged.candidate
    place = {"step": candidate.step, "rollout": candidate.rollout}
    return {**place, "text": candidate.text, "old": candidate.reward, "new": judged.reward}


def show(rescored: Rescored, reward: str) -> None:
    """Both choices side by side, the two rewards step by step, and how far they agree, on standard output."""
    from rich.console import Console
    from rich.markup import escape
    from rich.panel import Panel
    from rich.table import Table

    def number(value):
        return "—" if value is None else f"{value:.3f}"

    console = Console(highlight=False)
    pair = Table.grid(expand=True, padding=(0, 1))
    panels = []
    for title, (candidate, new) in (
        ("choice of the run", rescored.old_best),
        ("best by the new reward", rescored.new_best),
    ):
        pair.add_column(ratio=1)
        values = f"old {number(candidate.reward)}, new {number(new)}"
        panels.append(Panel(escape(candidate.text.strip()) or "(empty)", title=title, subtitle=values))
    pair.add_row(*panels)
    console.print(pair)
    table = Table(title=escape(f"old reward, and new reward {reward}"), title_justify="left", box=None)
    for heading in ("step", "mean old", "mean new", "best old so far", "its new reward"):
        table.add_column(heading, justify="right")
    for row in rescored.steps:
        table.add_row(*(str(value) if name == "step" else number(value) for name, value in row.items()))
    console.print(table)
    place = "was not scored" if rescored.rank is None else f"takes place {rescored.rank} of {len(rescored)}"
    correlation = number(rescored.correlation)
    console.print(f"The choice of the run {place} by the new reward. Rank correlation of the rewards: {correlation}.")
