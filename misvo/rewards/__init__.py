"""Rewards: any callable that scores responses. The contract is TRL's, so rewards written for GRPO work unchanged:

    reward(prompts=[...], completions=[...], **columns) -> list[float | None]

None means "could not score". A plain function of one text, `reward(text) -> float`, serves too, and each may be async.
`contract` adapts, calls and checks rewards; `specs` reads what a user types; `combine` makes one of several. Each
kind of reward is a file of its own that loads its model or word list on first use, and the classes below load it too.
"""

import importlib

from misvo.rewards.combine import Clipped, Combined, Standardised, as_reward, load
from misvo.rewards.contract import AnyReward, Reward, Scores, check_columns, evaluate, score
from misvo.rewards.failures import insisting
from misvo.rewards.specs import EMBEDDED
from misvo.rewards.trainer import TrainerState

_HOMES = {
    "RewardModel": "misvo.rewards.reward_model",
    "Remote": "misvo.rewards.remote",
    "Overlength": "misvo.rewards.penalties",
    "Repetition": "misvo.rewards.penalties",
    "Words": "misvo.rewards.words",
    "Length": "misvo.rewards.words",
    "Contains": "misvo.rewards.contains",
    "Avoids": "misvo.rewards.contains",
    "Starts": "misvo.rewards.starts",
    "Pattern": "misvo.rewards.pattern",
    "JsonShape": "misvo.rewards.json_shape",
    "ReadingEase": "misvo.rewards.reading",
    "ReadingGrade": "misvo.rewards.reading",
}

__all__ = [
    "EMBEDDED",
    "AnyReward",
    "Clipped",
    "Combined",
    "Reward",
    "Scores",
    "Standardised",
    "TrainerState",
    "as_reward",
    "check_columns",
    "evaluate",
    "insisting",
    "load",
    "score",
    *_HOMES,
]


def __getattr__(name):
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'misvo.rewards' has no attribute {name!r}")


def __dir__():
    return sorted(__all__)
