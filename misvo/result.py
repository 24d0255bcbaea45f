"""What a steering run hands back: every response, a trace row per step, the vectors, and how far they moved."""

import json
import statistics
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from misvo.errors import MisvoError
from misvo.prompts import Prompt
from misvo.settings import Settings
from misvo.steering import Steering


@dataclass(frozen=True)
class Candidate:
    """One sampled response."""

    step: int  # from 0
    rollout: int
    tokens: list[int]  # up to and with EOS
    text: str
    reward: float | None  # None where the reward could not score it
    ref_logprob: float | None = None  # mean log-probability per token under the reference policy

    @property
    def distinct(self) -> float:
        """The share of its pairs of neighbouring tokens that are not repeated; 1 for a response of one token."""
        pairs = list(pairwise(self.tokens))
        return len(set(pairs)) / len(pairs) if pairs else 1.0

    @property
    def stutter(self) -> float:
        """The share of its tokens that repeat the one before them; a single one ("very very", "100") is none."""
        repeats = sum(first == second for first, second in pairwise(self.tokens))
        return max(0, repeats - 1) / max(1, len(self.tokens))


def ordinary(candidates: list[Candidate], reference: list[Candidate]) -> list[Candidate]:
    """Those whose likelihood and repetition lie within two standard deviations of the reference's own responses.

    Likelihood counts on both sides: babble is less likely than the model's own words, a loop is more so. Where nothing
    is ordinary, all candidates are returned.
    """
    kept = candidates
    for measure in (lambda c: c.ref_logprob, lambda c: c.distinct, lambda c: c.stutter):
        own = [measure(candidate) for candidate in reference]
        middle, reach = statistics.mean(own), 2 * statistics.pstdev(own)
        kept = [candidate for candidate in kept if abs(measure(candidate) - middle) <= reach + 1e-9]
    return kept or candidates


@dataclass(frozen=True)
class Divergence:
    """A KL to the reference in nats: for each position, and in total."""

    per_position: list[float]

    @property
    def total(self) -> float:
        return sum(self.per_position)


@dataclass(frozen=True)
class Moved:
    """A position that steering moved: its KL_ref, and the tokens whose mean probability rose most there."""

    position: int
    kl: float
    tokens: list[tuple[str, float, float]]  # text, probability before, probability after


@dataclass
class Result:
    """The outcome for one prompt. `trace` has a dict per step; see docs in `misvo.steer`."""

    prompt: Prompt
    settings: Settings
    candidates: list[Candidate] = field(default_factory=list)
    trace: list[dict] = field(default_factory=list)
    steering: Steering | None = None
    kl_ref: Divergence | None = None  # eq:kl-estimator, where it was asked for
    moved: list[Moved] = field(default_factory=list)  # with kl_ref: the positions that moved most
    reference: Candidate | None = None  # what the model said before any steering, where that was sampled
    value: object = None  # re-control: the value network, ready for save_pretrained
    prefill_seconds: float = 0.0

    @property
    def best(self) -> Candidate:
        """The candidate with the highest reward, the first of equals; with select="ordinary" among those that could
        have come from the reference policy, so that a reward hack is passed over."""
        scored = [candidate for candidate in self.candidates if candidate.reward is not None]
        if not scored:
            raise MisvoError("no response of this run has a reward.")
        reference = [candidate for candidate in self.candidates if candidate.step == 0]
        if self.settings.select == "ordinary" and reference:  # a run that was cut short may lack it
            scored = ordinary(scored, reference)
        return max(scored, key=lambda candidate: candidate.reward)

    @property
    def text(self) -> str:
        return self.best.text

    @property
    def reward(self) -> float:
        return self.best.reward

    def to_dict(self) -> dict:
        """Plain data for JSON; the vectors stay out (`save` keeps them too)."""
        best = self.best if any(candidate.reward is not None for candidate in self.candidates) else None
        return {
            "prompt": self.prompt,
            "text": best and best.text,
            "reward": best and best.reward,
            "best": best and {"step": best.step, "rollout": best.rollout},
            "reference": self.reference and {"text": self.reference.text, "reward": self.reference.reward},
            "norm": None if self.steering is None else self.steering.norm,
            "kl_ref": None if self.kl_ref is None else self.kl_ref.total,
            "kl_ref_per_position": None if self.kl_ref is None else self.kl_ref.per_position,
            "moved": [vars(moved) for moved in self.moved],
            "settings": self.settings.to_dict(),
            "trace": self.trace,
            "candidates": [vars(candidate) for candidate in self.candidates],
        }

    def save(self, folder: Path) -> None:
        """Keep everything in a folder: `result.json`, and the vectors where there are some."""
        folder.mkdir(parents=True, exist_ok=True)
        if self.steering is not None:
            self.steering.save_pretrained(folder)
        (folder / "result.json").write_text(json.dumps(self.to_dict()) + "\n", encoding="utf-8")
