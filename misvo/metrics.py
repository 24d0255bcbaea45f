"""Metrics of responses and of runs: diversity, coherence, means over seeds, paired bootstrap over prompts.

Diversity is Π_{n=2..4}(1 − rep_n) with rep_n = 1 − unique/total n-grams of the words between blanks. The public code
of a baseline divides by total + 1; this one is exact. A text with fewer than n words has no n-gram, so it repeats
none: rep_n = 0 (a one-word answer scores 1, so read diversity beside the length).

Coherence is the cosine of sentence embeddings of prompt and response. `simcse` is supervised SimCSE with its CLS
pooler (the hub), `minilm` the embedded encoder; figures of the two are not comparable.
"""

import math
from dataclasses import dataclass

import numpy as np

from misvo.errors import MisvoError
from misvo.prompts import Prompt, as_text

SIMCSE = "princeton-nlp/sup-simcse-bert-base-uncased"


def repetition(text: str, n: int) -> float:
    """rep_n: the fraction of word n-grams that are repeats of others; 0 where there are none."""
    words = text.split()
    grams = list(zip(*(words[start:] for start in range(n)), strict=False))
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def diversity(text: str) -> float:
    return math.prod(1 - repetition(text, n) for n in (2, 3, 4))


class ClsEncoder:
    """Texts to unit vectors by the pooled CLS state, as supervised SimCSE was trained; any id or folder of such."""

    def __init__(self, name: str = SIMCSE):
        import torch
        from transformers import AutoModel, AutoTokenizer

        from misvo import hub

        source = hub.find(name)
        local = {"local_files_only": source.local_files_only}
        try:
            with source.reading():
                self.tokenizer = AutoTokenizer.from_pretrained(name, **local)
                self.model = AutoModel.from_pretrained(name, dtype=torch.float32, **local).eval()
        except (OSError, ValueError) as error:
            reason = source.explain(error)
            raise MisvoError(
                f"no sentence encoder could be loaded from {name!r}: {reason}; give 'minilm', an id or a folder."
            ) from error

    def __call__(self, texts: list[str]):
        import torch

        batch = self.tokenizer(texts, padding=True, truncation=True, max_length=512, return_tensors="pt")
        with torch.no_grad():
            return torch.nn.functional.normalize(self.model(**batch).pooler_output, dim=-1)


def load_encoder(name: str):
    """(the name that was used, an encoder or None). `auto` is SimCSE where it can be loaded, else MiniLM, else none."""
    if name == "none":
        return "none", None
    if name == "minilm":
        from misvo.rewards.similarity import SentenceEncoder

        return "minilm", SentenceEncoder()
    if name != "auto":
        return name, ClsEncoder(SIMCSE if name == "simcse" else name)
    for choice in ("simcse", "minilm"):
        try:
            return load_encoder(choice)
        except MisvoError:
            continue
    return "none", None


def coherence(encoder, prompt: Prompt, response: str) -> float:
    """Cosine of the meanings of a prompt and a response, −1 to 1."""
    one = encoder([as_text(prompt, "\n")])  # one by one: padding would change the last digits
    return float((one * encoder([response])).sum())


@dataclass(frozen=True)
class Spread:
    """A mean and a sample standard deviation (None where there is only one value)."""

    mean: float
    std: float | None
    count: int


def spread(values) -> Spread:
    values = [float(value) for value in values]
    if not values:
        raise MisvoError("there is nothing to average.")
    return Spread(float(np.mean(values)), float(np.std(values, ddof=1)) if len(values) > 1 else None, len(values))


def over_seeds(by_seed: dict[int, list[float]]) -> Spread:
    """Mean over prompts for each seed, then mean ± standard deviation over the seeds (the paper's ±)."""
    return spread(np.mean(values) for _, values in sorted(by_seed.items()) if len(values))


@dataclass(frozen=True)
class Difference:
    """A mean paired difference with its bootstrap interval over prompts."""

    mean: float
    low: float
    high: float
    prompts: int


def paired_bootstrap(ours: dict, theirs: dict, level=0.95, resamples=10_000, seed=0) -> Difference | None:
    """Mean of ours − theirs over the prompts that both have, with a percentile interval; None where there are none.

    `ours` and `theirs` map a prompt to its value (averaged over seeds). Prompts are resampled, pairs stay together.
    """
    shared = sorted(set(ours) & set(theirs))
    if not shared:
        return None
    differences = np.array([ours[prompt] - theirs[prompt] for prompt in shared], dtype=np.float64)
    picks = np.random.default_rng(seed).integers(len(shared), size=(resamples, len(shared)))
    means = differences[picks].mean(1)
    tail = (1 - level) / 2
    low, high = np.quantile(means, [tail, 1 - tail])
    return Difference(float(differences.mean()), float(low), float(high), len(shared))
