"""Fit a preference reward on pairs: Bradley and Terry's model on fixed features, by Newton's method.

P(chosen is preferred) = σ(w·x) with x = φ(prompt, chosen) − φ(prompt, rejected), so w minimises

    Σ_i log(1 + exp(−w·x_i)) + (l2/2)·‖w‖²

which is convex. l2 is chosen by cross-validation among those that were fitted; the held-out pairs choose nothing and
tell how good the reward is. A prompt is never on both sides of a split.
"""

import math
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from misvo import preference_pairs
from misvo.errors import MisvoError
from misvo.preference_pairs import Pair, Pairs
from misvo.rewards import preference
from misvo.rewards.similarity import SentenceEncoder

GRID = (0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
FOLDS = 5
LEAST = 50  # pairs, below which a split says nothing
BINS = 5
BATCH = 256  # texts


@dataclass(frozen=True)
class Quality:
    """How well margins w·x tell which response is preferred."""

    pairs: int
    accuracy: float
    standard_error: float  # of the accuracy
    log_loss: float  # nats; log 2 = 0.693 is a coin
    calibration_error: float  # mean distance of confidence and accuracy, over bins of equal size


@dataclass(frozen=True)
class Fitted:
    weight: torch.Tensor  # (2d,)
    l2: float
    fitted: Quality
    held_out: Quality
    spread: float  # standard deviation of the reward over held-out responses: its unit
    left_out: int  # lines without a preference

    def about(self) -> dict:
        return {name: value for name, value in asdict(self).items() if name != "weight"}


def newton(x: torch.Tensor, l2: float, steps: int = 100) -> torch.Tensor:
    """The w that minimises the loss above, (n, f) -> (f,), in float64."""
    w = torch.zeros(x.shape[1], dtype=torch.float64)
    for _ in range(steps):
        wrong = torch.sigmoid(-(x @ w))  # (n,) P(rejected is preferred)
        gradient = l2 * w - x.T @ wrong
        hessian = (x * (wrong * (1 - wrong))[:, None]).T @ x
        hessian.diagonal().add_(l2)
        step = torch.linalg.solve(hessian, gradient)
        size = 1.0
        while loss(x, w - size * step, l2) > loss(x, w, l2) and size > 1e-9:  # a whole step may be too far
            size /= 2
        w = w - size * step
        if gradient @ step <= 1e-16 * (1 + loss(x, w, l2)):  # twice the distance to the minimum, to second order
            break
    return w


def loss(x: torch.Tensor, w: torch.Tensor, l2: float) -> float:
    return float(torch.nn.functional.softplus(-(x @ w)).sum() + l2 / 2 * w @ w)


def choose_l2(x: torch.Tensor, folds: list[int], grid=GRID) -> float:
    """The l2 whose fits on all folds but one lose least on that one."""
    fold = torch.tensor(folds)

    def lost(l2):
        parts = [(fold != out, fold == out) for out in range(FOLDS) if (fold == out).any()]
        return sum(float(torch.nn.functional.softplus(-(x[out] @ newton(x[rest], l2))).sum()) for rest, out in parts)

    return min(grid, key=lost)


def quality(margins: torch.Tensor) -> Quality:
    count, accuracy = len(margins), float((margins > 0).double().mean() + (margins == 0).double().mean() / 2)
    confidence, order = torch.sigmoid(margins.abs()).sort()
    right = (margins > 0).double()[order]
    bins = zip(confidence.tensor_split(BINS), right.tensor_split(BINS), strict=True)
    off = sum(abs(float(sure.mean() - true.mean())) * len(sure) for sure, true in bins if len(sure))
    return Quality(
        count,
        accuracy,
        math.sqrt(accuracy * (1 - accuracy) / count),
        float(torch.nn.functional.softplus(-margins).mean()),
        off / count,
    )


def texts_of(rows: list[Pair]) -> list[str]:
    """Every different text of some pairs, once."""
    return list(dict.fromkeys(text for one in rows for text in (one.prompt, one.chosen, one.rejected)))


def fit(pairs: Pairs, held_out: float = 0.2, encoder=None, progress=lambda batch: None) -> Fitted:
    """Fit on most pairs, and measure on the share that is held out. `progress` hears of every BATCH of texts."""
    ours, theirs = pairs.split(held_out)
    if min(len(ours), len(theirs)) < LEAST:
        raise MisvoError(
            f"there are {len(ours)} pairs to fit and {len(theirs)} to measure on: {LEAST} of each are needed."
        )
    encode, rows, known = encoder or SentenceEncoder(), [*ours, *theirs], {}
    texts = texts_of(rows)
    for start in range(0, len(texts), BATCH):
        known |= zip(texts[start : start + BATCH], encode(texts[start : start + BATCH]), strict=True)
        progress(start // BATCH)
    prompts = torch.stack([known[one.prompt] for one in rows])
    chosen, rejected = (torch.stack([known[getattr(one, side)] for one in rows]) for side in ("chosen", "rejected"))
    better, worse = (preference.features(prompts, side).double() for side in (chosen, rejected))
    x, count = better - worse, len(ours)
    l2 = choose_l2(x[:count], [int(preference_pairs.place(one, "fold") * FOLDS) for one in ours])
    weight = newton(x[:count], l2)
    spread = float(torch.cat([better[count:] @ weight, worse[count:] @ weight]).std())
    margins = x @ weight
    return Fitted(weight, l2, quality(margins[:count]), quality(margins[count:]), spread, pairs.left_out)


def save(fitted: Fitted, folder: Path, source: str, part: str) -> None:
    """Weights, figures and a card that people read."""
    about = {"encoder": "minilm", "source": source, "part": part, **fitted.about()}
    preference.write(folder, fitted.weight, about)
    (folder / "README.md").write_text(card(fitted, folder.name, source, part), encoding="utf-8")


def card(fitted: Fitted, name: str, source: str, part: str) -> str:
    held, ours = fitted.held_out, fitted.fitted
    which = "" if part == "all" else f", part {part}"
    return f"""---
library_name: misvo
tags: [reward-model, preference, bradley-terry]
---

# {name}

A preference reward for `misvo`: `--reward preference:{name}`.

- **What it is**: a linear Bradley–Terry head on MiniLM sentence embeddings of the last prompt and the response, with
  {len(fitted.weight)} weights. The reward is a log-odds; over held-out responses its standard deviation is
  {fitted.spread:.3g}.
- **Fitted on** {ours.pairs} pairs of `{source}`{which}; {fitted.left_out} lines without a preference were left out.
  l2 = {fitted.l2:g}, by {FOLDS}-fold cross-validation.
- **On {held.pairs} held-out pairs** (other prompts): accuracy {held.accuracy:.3f} ± {held.standard_error:.3f} (one
  standard error; a coin has 0.5), log loss {held.log_loss:.3f} nats (a coin: 0.693), calibration error
  {held.calibration_error:.3f}. On the fitted pairs: accuracy {ours.accuracy:.3f}.
- **Limits**: an embedding of at most 256 tokens, a linear head, and whatever the people who made the pairs preferred.
  Optimising it hard finds its mistakes: watch a second head that was fitted on other pairs (`--part 2/2`).
"""
