"""The reward contract: adapt callables to it, call them, and refuse what is not a finite number or None.

A reward may declare `scores_prefixes = True`: it is cheap enough to be asked about the beginnings of responses too, and
makes sense of them (`misvo/credit.py`). A reward that is made of others (`combine.py`) hands back `Scores`, a list that
also carries the value of each part; the loop writes the means of the parts into the trace. What a user types is no
matter here: `specs.py` reads it.
"""

import inspect
import math
from collections.abc import Callable

from misvo.errors import MisvoError, RewardError, short
from misvo.prompts import Prompt, as_text, to_reward

Reward = Callable[..., list]


class Scores(list):
    """A value per response, and in `parts` the same for each part that it was made of (name -> values)."""

    def __init__(self, values=(), parts: dict[str, list[float | None]] | None = None):
        super().__init__(values)
        self.parts = parts or {}

    def means(self) -> dict[str, float | None]:
        """The mean of each part over the responses that it scored; None where it scored none."""
        known = {name: [value for value in values if value is not None] for name, values in self.parts.items()}
        return {name: sum(values) / len(values) if values else None for name, values in known.items()}


def adapt(reward) -> Reward:
    """A callable as a reward: TRL's contract as it is, or a plain function of a text, or of a prompt and a text.

    A reward that learns as it goes (`Standardised`) has a method `fresh`, which this calls: each run starts anew.
    """
    if not callable(reward):
        raise MisvoError(f"a reward must be callable, or a name such as 'sentiment'; {reward!r} is neither.")
    if callable(getattr(reward, "fresh", None)):
        return reward.fresh()
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
        self.scores_prefixes = getattr(function, "scores_prefixes", False)

    def __call__(self, prompts, completions, **_):
        texts = [as_text(completion) for completion in completions]
        if self.arity == 1:
            return [self.function(text) for text in texts]
        return [self.function(prompt, text) for prompt, text in zip(prompts, texts, strict=True)]


def score(reward: Reward, prompt: Prompt, texts: list[str], tokens: list[list[int]], columns: dict) -> Scores:
    """Score the responses of a step to one prompt; `columns` holds one value of each column for all of them."""
    count = len(texts)
    columns = {name: [value] * count for name, value in columns.items()}
    prompt, completions = to_reward(prompt, texts)
    return evaluate(reward, [prompt] * count, completions, completion_ids=tokens, **columns)


def evaluate(reward: Reward, prompts: list[Prompt], completions: list, **columns) -> Scores:
    """Call a reward with what it takes and check what it gives; every failure is a RewardError that names a prompt."""
    count = len(completions)
    try:
        values = reward(**_accepted(reward, {"prompts": prompts, "completions": completions, **columns}))
    except MisvoError as error:  # the reward has its own sentence, lacking at most the prompt
        where = repr(short(prompts[0]))
        if isinstance(error, RewardError) and where in str(error):
            raise
        raise RewardError(f"{str(error).rstrip('.')} (on the responses to {where}).") from error
    except Exception as error:
        raise RewardError(
            f"the reward raised {type(error).__name__} ({short(error)}) on the responses to {short(prompts[0])!r}, "
            f"the first of which is {short(as_text(completions[0]))!r}."
        ) from error
    if isinstance(values, str | bytes | dict) or not hasattr(values, "__len__"):
        raise RewardError(f"the reward must return a list of {count} numbers, not {short(values)!r}.")
    if len(values) != count:
        raise RewardError(f"the reward returned {len(values)} values for {count} responses to {short(prompts[0])!r}.")
    numbers = [_number(*row) for row in zip(values, prompts, completions, strict=True)]
    return Scores(numbers, getattr(values, "parts", None) if isinstance(values, Scores) else None)


def _accepted(reward, arguments):
    """The arguments that a reward takes by name; all of them where it takes any."""
    try:
        parameters = inspect.signature(reward).parameters
    except (TypeError, ValueError):
        return arguments
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return arguments
    return {name: value for name, value in arguments.items() if name in parameters}


def _number(value, prompt, completion):
    if value is None:
        return None
    try:
        number = math.nan if isinstance(value, str | bytes) else float(value)
    except (TypeError, ValueError):
        number = None
    if number is None or isinstance(value, str | bytes):
        what = f"{short(value)!r}, which is not a number,"
    elif not math.isfinite(number):
        what = f"{number}"
    else:
        return number
    raise RewardError(f"the reward gave {what} for the response {short(as_text(completion))!r} to {short(prompt)!r}.")
