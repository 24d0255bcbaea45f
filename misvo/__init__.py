"""misvo steers a frozen language model toward any reward at test time, and changes it as little as possible.

    import misvo
    policy = misvo.Policy.from_pretrained("smollm2-135m")
    result = misvo.steer(policy, "Give me one tip for sleeping better.", reward=len)

The names below load on first use, so that `import misvo` and `misvo --help` never wait for torch.
"""

import importlib

__version__ = "0.1.0"

_HOMES = {
    "Policy": "misvo.policy",
    "Steering": "misvo.steering",
    "steer": "misvo.session",
    "steer_many": "misvo.session",
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


def __getattr__(name):
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    if name in _ROOMS:
        return importlib.import_module(f"misvo.{name}")
    raise AttributeError(f"module 'misvo' has no attribute {name!r}")


def __dir__():
    return sorted(__all__)
