"""A rubric of the package `verifiers` as a reward: its functions, called as it calls them, and their weighted sum.

    misvo steer "What is 2 + 2?" --reward my_env.py:rubric --column answer=4

A rubric's functions see a chat, whatever the prompt was: `prompt` and `completion` are lists of messages, and columns
are fields of its `state`. A function of one response takes any of what `Rubric.score_objects` offers by name, one of
all responses (`completions`, `states`, …) any of `group_score_objects`. Each is a part of the reward; one of weight 0
is shown and not counted. Where a function raises, the reward fails: `verifiers` itself logs that and takes 0, which
steering would learn from. Rubrics are objects of verifiers' releases up to 0.3; nothing of the package is imported.
"""

import asyncio
import inspect
import operator

from misvo.errors import MisvoError
from misvo.prompts import as_messages, as_text

OF_ALL = {"states", "prompts", "completions", "answers", "tasks", "infos"}  # what only functions of all responses take


def is_rubric(thing) -> bool:
    return all(hasattr(thing, name) for name in ("funcs", "weights", "score_objects", "group_score_objects"))


class OfRubric:
    """The weighted sum of the functions of a rubric, or of a group of rubrics."""

    def __init__(self, rubric):
        rubrics = [rubric, *getattr(rubric, "rubrics", [])]
        self.terms = [
            (one, function, weight) for one in rubrics for function, weight in zip(one.funcs, one.weights, strict=True)
        ]
        if not self.terms:
            raise MisvoError("this rubric has no functions: give it some, as in vf.Rubric(funcs=[right]).")

    async def __call__(
        self, prompts, completions, log_extra, completion_ids=None, trainer_state=None, log_metric=None, **columns
    ):
        states = []
        for index, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
            fields = {name: values[index] for name, values in columns.items()}
            chat = {
                "prompt": as_messages(prompt),
                "completion": [{"role": "assistant", "content": as_text(completion)}],
                "trajectory": [],
            }
            states.append({**fields, **chat, "input": fields})
        values = await asyncio.gather(*(_scores(rubric, function, states) for rubric, function, _ in self.terms))
        for (_, function, _), scores in zip(self.terms, values, strict=True):
            log_extra(getattr(function, "__name__", type(function).__name__), scores)
        weights = [weight for *_, weight in self.terms]
        return [sum(map(operator.mul, weights, scores)) for scores in zip(*values, strict=True)]


async def _scores(rubric, function, states) -> list[float]:
    """What one function says of each response."""
    if OF_ALL & inspect.signature(function).parameters.keys():
        return [float(value) for value in await _called(function, rubric.group_score_objects(states))]
    return [float(v) for v in await asyncio.gather(*(_called(function, rubric.score_objects(s)) for s in states))]


async def _called(function, offered: dict):
    """Call a function with what it takes by name, and wait for it where it is async."""
    parameters = inspect.signature(function).parameters
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        offered = {name: value for name, value in offered.items() if name in parameters}
    value = function(**offered)
    return await value if inspect.isawaitable(value) else value
