"""`preference:FOLDER`: a learned preference, fitted by `misvo fit-reward` on pairs of a better and a worse response.

The reward is w·φ(prompt, response): the log-odds, under Bradley and Terry's model, that a response is preferred to one
of reward 0. φ is made of MiniLM sentence embeddings: r of the response, and p⊙r with p of what was asked last, so that
the same answer may be good to one prompt and bad to another. What depends on the prompt alone would cancel out.
"""

import json
import math
from pathlib import Path

import safetensors
import safetensors.torch
import torch

from misvo.errors import MisvoError
from misvo.prompts import as_text, is_chat
from misvo.rewards.similarity import SentenceEncoder

WEIGHTS, CONFIG = "model.safetensors", "config.json"
KIND = "misvo-preference-1"


def features(prompts: torch.Tensor, responses: torch.Tensor) -> torch.Tensor:
    """(n, d) and (n, d) -> (n, 2d). Entries of p⊙r are 1/√d of those of r: brought to the same size."""
    return torch.cat([responses, prompts * responses * math.sqrt(responses.shape[1])], dim=1)


def last_asked(prompt) -> str:
    """What a response answers: the last message of a chat, or the prompt itself."""
    return as_text(prompt[-1:]) if is_chat(prompt) else prompt


class Preference:
    scores_prefixes = True

    def __init__(self, folder: str):
        self.weight = read(Path(folder))
        self.encoder = SentenceEncoder()

    def __call__(self, prompts, completions, **columns):
        asked = [last_asked(prompt) for prompt in prompts]
        different = list(dict.fromkeys(asked))  # of a step's responses, all answer the same
        known = dict(zip(different, self.encoder(different), strict=True))
        responses = self.encoder([as_text(completion) for completion in completions])
        return (features(torch.stack([known[text] for text in asked]), responses) @ self.weight).tolist()


def write(folder: Path, weight: torch.Tensor, about: dict) -> None:
    """The weights and what is known of them."""
    folder.mkdir(parents=True, exist_ok=True)
    safetensors.torch.save_file({"weight": weight.float().contiguous()}, folder / WEIGHTS)
    (folder / CONFIG).write_text(json.dumps({"kind": KIND, **about}, indent=2) + "\n", encoding="utf-8")


def read(folder: Path) -> torch.Tensor:
    """(2d,) float32, as `write` kept it."""
    try:
        kind = json.loads((folder / CONFIG).read_text(encoding="utf-8")).get("kind")
        weight = safetensors.torch.load_file(folder / WEIGHTS)["weight"]
    except (OSError, ValueError, AttributeError, KeyError, safetensors.SafetensorError) as error:
        raise MisvoError(f"{folder} holds no preference reward: make one with `misvo fit-reward`.") from error
    if kind != KIND or weight.ndim != 1 or not torch.isfinite(weight).all():
        raise MisvoError(f"{folder} holds a reward of another kind or version: make it again with `misvo fit-reward`.")
    return weight
