"""The reward contract: adapt callables to it, call them, and refuse what is not a finite number or None.

A reward may declare `scores_prefixes = True`: it is cheap enough to be asked about the beginnings of responses too, and
makes sense of them (`misvo/credit.py`). It may be async (`loop.py`), and may take what TRL's trainers offer beside
columns (`trainer.py`). A reward that is made of others is a `Composite` (`combine.py`, `failures.py`); it hands back
`Scores`, a list that also carries the value of each part; the loop writes the means of the parts into the trace. What a
user types is no matter here: `specs.py` reads it.
"""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from misvo.errors import MisvoError, RewardError, short
from misvo.prompts import Prompt, as_text, to_reward
from misvo.rewards import loop, trainer
from misvo.rewards.rubric import OfRubric, is_rubric
from misvo.rewards.trainer import Log, TrainerState

Reward = Callable[..., list]  # as it is called
# As users give it: also a function of a text, what `specs.py` reads, or several of these, which are added up.
AnyReward = Callable[..., Any] | str | Sequence[Callable[..., Any] | str]

GIVEN = ("prompts", "completions", "completion_ids", *trainer.NAMES)  # what every reward can have; no names of columns


class Scores(list):
    """A value per response, and in `parts` the same for each part that it was made of (name -> values).

    `extra` has what a reward logged in words, `failure` what kept some responses from being scored (`failures.py`).
    """

    def __init__(
        self,
        values=(),
        parts: dict[str, list[float | None]] | None = None,
        extra: dict[str, list[str | None]] | None = None,
        failure: RewardError | None = None,
    ):
        super().__init__(values)
        self.parts, self.extra, self.failure = parts or {}, extra or {}, failure

    def means(self) -> dict[str, float | None]:
        """The mean of each part over the responses that it scored; None where it scored none."""
        known = {name: [value for value in values if value is not None] for name, values in self.parts.items()}
        return {name: sum(values) / len(values) if values else None for name, values in known.items()}

    @classmethod
    def joined(cls, pieces: "list[Scores]") -> "Scores":
        """The scores of several calls as those of one; None where a piece lacks a part."""

        def column(tables, name):
            rows = zip(pieces, tables, strict=True)
            return [value for piece, table in rows for value in table.get(name, [None] * len(piece))]

        def columns(tables):
            return {name: column(tables, name) for name in dict.fromkeys(name for table in tables for name in table)}

        failures = [piece.failure for piece in pieces if piece.failure is not None]
        values = [value for piece in pieces for value in piece]
        parts, extra = columns([piece.parts for piece in pieces]), columns([piece.extra for piece in pieces])
        return cls(values, parts, extra, failures[0] if failures else None)


class Composite:
    """A reward made of others: `begin` calls them all before it waits for any, `over` changes what it is made of."""

    def begin(self, prompts, completions, **columns) -> Callable[[], Scores]:
        raise NotImplementedError

    def over(self, change: Callable[[Reward], Reward]) -> Reward:
        raise NotImplementedError

    def __call__(self, prompts, completions, **columns) -> Scores:
        return self.begin(prompts, completions, **columns)()


def adapt(reward) -> Reward:
    """A callable as a reward: TRL's contract as it is, or a plain function of a text, or of a prompt and a text.

    A function of `completion` and columns, such as `verifiers` has, is handed all of them by name, and a rubric of that
    package is a reward too (`rubric.py`). A reward that learns as it goes (`Standardised`) has a method `fresh`, which
    this calls: each run starts anew.
    """
    if is_rubric(reward):
        return OfRubric(reward)
    if not callable(reward):
        raise MisvoError(f"a reward must be callable, or a name such as 'sentiment'; {reward!r} is neither.")
    if callable(getattr(reward, "fresh", None)):
        return reward.fresh()
    try:
        parameters = inspect.signature(reward).parameters.values()
    except (TypeError, ValueError):  # builtins such as len need not have a signature; they take one thing
        return _PerText(reward, ["text"], ())
    names = [parameter.name for parameter in parameters]
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    required = [p.name for p in positional if p.default is p.empty]
    of_one = "completion" in required or (len(required) in (1, 2) and not (takes_any and set(required) & {*GIVEN}))
    if "completions" in names or (takes_any and not of_one):
        return reward
    if not of_one:
        raise MisvoError("a reward takes (prompts, completions, **columns), or a text, or a prompt and a text.")
    return _PerText(reward, required, None if takes_any else [name for name in names if name not in required])


class _PerText:
    """A plain function of (text) or (prompt, text), called once for each response, with what else it takes by name.

    With a parameter `completion` all go by name, so that (completion, answer) is a text and a column; (anything,
    completion) is a prompt and a text, unless there is such a column.
    """

    def __init__(self, function, required, others):
        self.function, self.required, self.others = function, required, others  # others: None is any
        self.scores_prefixes = getattr(function, "scores_prefixes", False)

    def __call__(self, prompts, completions, **columns):
        if self.others is None and columns.keys() >= {*self.required}:  # what looked like a text is a column
            return self.function(prompts=prompts, completions=completions, **columns)
        named = "completion" in self.required and (
            len(self.required) > 2 or self.required[0] in ("prompt", "completion", *columns)
        )
        for name in self.required if named else ():
            if name not in ("prompt", "completion", *columns):
                raise RewardError(f"the reward takes {name!r}, and there is no such column.")
        taken = [*(self.others or ()), *(self.required if named else ())]
        wanted = {name: values for name, values in columns.items() if self.others is None or name in taken}
        values = []
        for index, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
            text = as_text(completion)
            own = {name: value if name in trainer.NAMES else value[index] for name, value in wanted.items()}
            if named:
                given = {"prompt": prompt, "completion": text}
                own |= {name: given[name] for name in self.required if name in given}
                values.append(self.function(**own))
            else:
                values.append(self.function(*((text,) if len(self.required) == 1 else (prompt, text)), **own))
        return loop.gathered(values) if values and all(map(inspect.isawaitable, values)) else values


def check_columns(columns) -> dict:
    """Columns are a dict, and none has the name of something else that rewards are given."""
    if not isinstance(columns, Mapping):
        raise MisvoError(f"columns must be a dict such as {{'answer': 4}}, not {short(columns)!r}.")
    for name in columns:
        if not isinstance(name, str) or name in GIVEN:
            raise MisvoError(f"a column cannot be called {name!r}: rewards are given something else by that name.")
    return dict(columns)


def score(
    reward: Reward,
    prompt: Prompt,
    texts: list[str],
    tokens: list[list[int]],
    columns: dict,
    state: TrainerState = TrainerState(),  # noqa: B008, frozen
) -> Scores:
    """Score the responses of a step to one prompt; `columns` holds one value of each column for all of them."""
    count = len(texts)
    columns = {name: [value] * count for name, value in check_columns(columns).items()}
    prompt, completions = to_reward(prompt, texts)
    return evaluate(reward, [prompt] * count, completions, completion_ids=tokens, trainer_state=state, **columns)


def evaluate(reward: Reward, prompts: list[Prompt], completions: list, **columns) -> Scores:
    """Call a reward with what it takes and check what it gives; every failure is a RewardError that names a prompt."""
    return begin(reward, prompts, completions, **columns)()


def begin(reward: Reward, prompts: list[Prompt], completions: list, **columns) -> Callable[[], Scores]:
    """Call a reward; what this gives waits for it, where it is async, and checks what came of it."""
    log = Log(len(completions))
    with _failures_named(prompts, completions):
        if isinstance(reward, Composite):
            later = reward.begin(prompts, completions, **columns)
        else:
            logs = {"log_metric": log.metric, "log_extra": log.extra}
            given = {"prompts": prompts, "completions": completions, **columns, **logs}
            later = _called(reward, _accepted(reward, given))

    def finish():
        with _failures_named(prompts, completions):
            values = later()
            parts, extra = log.parts(), log.texts()
        numbers = _numbers(values, prompts, completions)
        if not isinstance(values, Scores):
            return Scores(numbers, parts, extra)
        return Scores(numbers, {**values.parts, **parts}, {**values.extra, **extra}, values.failure)

    return finish


def _called(reward, arguments):
    """What calling a reward gives, as something to ask for it: an async one is at work until then."""
    values = reward(**arguments)
    if not inspect.isawaitable(values):
        return lambda: values
    future = loop.start(values)
    return lambda: loop.wait(future)


@contextmanager
def _failures_named(prompts, completions):
    """Whatever is raised becomes a RewardError that names the prompt."""
    try:
        yield
    except MisvoError as error:  # the reward has its own sentence, lacking at most the prompt
        where = repr(short(prompts[0]))
        if isinstance(error, RewardError) and where in str(error):
            raise
        raise RewardError(f"{str(error).rstrip('.')} (on the responses to {where}).") from error
    except (Exception, SystemExit) as error:  # a reward that calls sys.exit ends its own run, not all others
        raise RewardError(
            f"the reward raised {type(error).__name__} ({short(error)}) on the responses to {short(prompts[0])!r}, "
            f"the first of which is {short(as_text(completions[0]))!r}."
        ) from error


def _numbers(values, prompts, completions):
    count = len(completions)
    if isinstance(values, str | bytes | dict) or not hasattr(values, "__len__"):
        raise RewardError(f"the reward must return a list of {count} numbers, not {short(values)!r}.")
    if len(values) != count:
        raise RewardError(f"the reward returned {len(values)} values for {count} responses to {short(prompts[0])!r}.")
    return [_number(*row) for row in zip(values, prompts, completions, strict=True)]


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
    number = trainer.as_number(value)
    if number is None:
        what = f"{short(value)!r}, which is not a number,"
    elif not math.isfinite(number):
        what = f"{number}"
    else:
        return number
    raise RewardError(f"the reward gave {what} for the response {short(as_text(completion))!r} to {short(prompt)!r}.")
