"""Rewards: any callable that scores responses. The contract is TRL's, so rewards written for GRPO work unchanged:

    reward(prompts=[...], completions=[...], **columns) -> list[float | None]

None means "could not score". A plain function of one text, `reward(text) -> float`, serves too. This file adapts
callables, turns specs of the command line into rewards, and checks what rewards return; each embedded reward is a
file of its own that loads its model or word list on first use.
"""

import importlib
import importlib.util
import inspect
import math
import sys
from collections.abc import Callable
from pathlib import Path

from misvo.errors import MisvoError, RewardError
from misvo.prompts import Prompt, as_completion, as_text

Reward = Callable[..., list]

# name -> (module, class, argument, what it rewards)
EMBEDDED = {
    "sentiment": (
        "misvo.rewards.sentiment",
        "Sentiment",
        None,
        "how positive the response is, −1 to 1 (VADER)",
    ),
    "similarity": (
        "misvo.rewards.similarity",
        "Similarity",
        "TEXT",
        "cosine of its meaning to TEXT, −1 to 1 (MiniLM)",
    ),
    "length": ("misvo.rewards.length", "Length", "WORDS", "minus its distance from WORDS words"),
}


def load(spec: str) -> Reward:
    """A reward from a name (`sentiment`, `similarity:TEXT`, `length:WORDS`), `file.py:function`, `module:function`."""
    name, colon, rest = spec.partition(":")
    if name in EMBEDDED:
        module, kind, argument, _ = EMBEDDED[name]
        if bool(colon and rest) != bool(argument):
            usage = f"{name}:{argument}" if argument else name
            raise MisvoError(f"write this reward as {usage!r}, not {spec!r}.")
        make = getattr(importlib.import_module(module), kind)
        return make(rest) if argument else make()
    if not colon:
        raise MisvoError(f"unknown reward {spec!r}: give {', '.join(EMBEDDED)}, file.py:function or module:function.")
    source, _, attribute = spec.rpartition(":")
    module = _load_file(source) if source.endswith(".py") else _load_module(source)
    reward = getattr(module, attribute, None)
    if not callable(reward):
        raise MisvoError(f"{source} has no function {attribute!r} to use as a reward.")
    return as_reward(reward)


def as_reward(reward) -> Reward:
    """Adapt a callable: TRL's contract as it is, or a plain function of a text, or of a prompt and a text."""
    if isinstance(reward, str):
        return load(reward)
    if not callable(reward):
        raise MisvoError(f"a reward must be callable, or a name such as 'sentiment'; {reward!r} is neither.")
    try:
        parameters = inspect.signature(reward).parameters.values()
    except (TypeError, ValueError):  # builtins such as len need not have a signature; they take one thing
        return _PerText(reward, 1)
    names = {parameter.name for parameter in parameters}
    if "completions" in names or any(p.kind is p.VAR_KEYWORD for p in parameters):
        return reward
    required = [
        p for p in parameters if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    if len(required) not in (1, 2):
        raise MisvoError("a reward takes (prompts, completions, **columns), or a text, or a prompt and a text.")
    return _PerText(reward, len(required))


class _PerText:
    """A plain function of (text) or (prompt, text), called once for each response."""

    def __init__(self, function, arity):
        self.function, self.arity = function, arity

    def __call__(self, prompts, completions, **_):
        texts = [as_text(completion) for completion in completions]
        if self.arity == 1:
            return [self.function(text) for text in texts]
        return [self.function(prompt, text) for prompt, text in zip(prompts, texts, strict=True)]


def score(
    reward: Reward, prompt: Prompt, texts: list[str], tokens: list[list[int]], columns: dict
) -> list[float | None]:
    """Call the reward for all responses of a step and refuse what is not a finite number or None."""
    count = len(texts)
    arguments = {
        "prompts": [prompt] * count,
        "completions": [as_completion(prompt, text) for text in texts],
        "completion_ids": tokens,
        **{name: [value] * count for name, value in columns.items()},
    }
    try:
        values = reward(**_accepted(reward, arguments))
    except Exception as error:
        raise RewardError(
            f"the reward raised {type(error).__name__} ({_short(error)}) on the responses to {_short(prompt)!r}, "
            f"the first of which is {_short(texts[0])!r}."
        ) from error
    if isinstance(values, str | bytes | dict) or not hasattr(values, "__len__"):
        raise RewardError(f"the reward must return a list of {count} numbers, not {_short(values)!r}.")
    if len(values) != count:
        raise RewardError(f"the reward returned {len(values)} values for {count} responses to {_short(prompt)!r}.")
    return [_number(value, prompt, text) for value, text in zip(values, texts, strict=True)]


def _accepted(reward, arguments):
    """The arguments that a reward takes by name; all of them where it takes any."""
    try:
        parameters = inspect.signature(reward).parameters
    except (TypeError, ValueError):
        return arguments
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return arguments
    return {name: value for name, value in arguments.items() if name in parameters}


def _number(value, prompt, text):
    if value is None:
        return None
    try:
        number = math.nan if isinstance(value, str | bytes) else float(value)
    except (TypeError, ValueError):
        number = None
    if number is None or isinstance(value, str | bytes):
        what = f"{_short(value)!r}, which is not a number,"
    elif not math.isfinite(number):
        what = f"{number}"
    else:
        return number
    raise RewardError(f"the reward gave {what} for the response {_short(text)!r} to {_short(prompt)!r}.")


def _short(thing, width=80):
    text = " ".join(str(thing).split())
    return text if len(text) <= width else text[: width - 1] + "…"


def _load_file(source):
    path = Path(source)
    if not path.is_file():
        raise MisvoError(f"there is no file {source} to take a reward from.")
    spec = importlib.util.spec_from_file_location(f"misvo_reward_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pickle look a module up by its name
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise MisvoError(f"{source} could not be loaded: {type(error).__name__}: {_short(error)}") from error
    return module


def _load_module(source):
    try:
        return importlib.import_module(source)
    except ImportError as error:
        raise MisvoError(
            f"unknown reward {source!r}: it is no embedded reward ({', '.join(EMBEDDED)}), no module ({_short(error)})."
        ) from error
