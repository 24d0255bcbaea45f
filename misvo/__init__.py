"""misvo steers a frozen language model toward any reward at test time, and changes it as little as possible.

    import misvo
    policy = misvo.Policy.from_pretrained("smollm2-135m")
    result = misvo.steer(policy, "Give me one tip for sleeping better.", reward=len)

The names below load on first use, so that `import misvo` and `misvo --help` never wait for torch.
"""

import importlib
from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:  # what an IDE reads in the place of `__getattr__`
    from misvo import bench as bench
    from misvo import methods as methods
    from misvo import metrics as metrics
    from misvo import rewards as rewards
    from misvo import tasks as tasks
    from misvo import theory as theory
    from misvo.calls import steer as steer
    from misvo.calls import steer_many as steer_many
    from misvo.errors import MisvoError as MisvoError
    from misvo.errors import RewardError as RewardError
    from misvo.invasiveness import panel as panel
    from misvo.judge import Judge as Judge
    from misvo.policy import Policy as Policy
    from misvo.rescoring import rescore as rescore
    from misvo.result import Result as Result
    from misvo.session import Session as Session
    from misvo.settings import Settings as Settings
    from misvo.steering import Steering as Steering
    from misvo.value import ValueNetwork as ValueNetwork
    from misvo.value_training import train_value as train_value

_HOMES = {
    "Policy": "misvo.policy",
    "Steering": "misvo.steering",
    "steer": "misvo.calls",
    "steer_many": "misvo.calls",
    "Session": "misvo.session",
    "train_value": "misvo.value_training",
    "rescore": "misvo.rescoring",
    "Judge": "misvo.judge",
    "panel": "misvo.invasiveness",
    "ValueNetwork": "misvo.value",
    "Settings": "misvo.settings",
    "Result": "misvo.result",
    "MisvoError": "misvo.errors",
    "RewardError": "misvo.errors",
}
_ROOMS = ("rewards", "methods", "theory", "tasks", "metrics", "bench")

__all__ = [*_HOMES, *_ROOMS]


if not TYPE_CHECKING:  # a checker that saw this would believe in every name

    def __getattr__(name):
        if name in _HOMES:
            return getattr(importlib.import_module(_HOMES[name]), name)
        if name in _ROOMS:
            return importlib.import_module(f"misvo.{name}")
        raise AttributeError(f"module 'misvo' has no attribute {name!r}")


def __dir__():
    return sorted(__all__)
