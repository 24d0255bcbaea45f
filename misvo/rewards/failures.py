"""Rewards that fail now and then: asked again, and then either the run's error or responses without a score.

Each reward of a sum is wrapped by itself, so that only the one that failed is called again, and one that learns from
its first responses (`combine.Standardised`) sees all of them at once. Where a call on many responses fails, they are
tried one by one: only the guilty ones have no score. The first error goes along in the `Scores`; the run notes it, and
ends with it where nothing of a step was scored.
"""

from collections.abc import Callable

from misvo.errors import RewardError
from misvo.rewards import trainer
from misvo.rewards.contract import Composite, Reward, Scores, begin


def insisting(reward: Reward, on_error: str = "raise", retries: int = 0) -> Reward:
    """The same reward with another way to fail; `on_error` is "raise" or "none", as in misvo.Settings."""
    if on_error == "raise" and not retries:
        return reward
    if isinstance(reward, Composite):
        return reward.over(lambda part: insisting(part, on_error, retries))
    return Insisting(reward, on_error, retries)


class Insisting(Composite):
    """A reward that is called up to `retries` times more where it fails."""

    def __init__(self, reward: Reward, on_error: str, retries: int):
        self.reward, self.on_error, self.retries = reward, on_error, retries

    @property
    def scores_prefixes(self) -> bool:
        return getattr(self.reward, "scores_prefixes", False)

    def over(self, change) -> Reward:
        return change(self.reward)

    def begin(self, prompts, completions, **columns) -> Callable[[], Scores]:
        def ask():
            return begin(self.reward, prompts, completions, **columns)

        try:
            first = ask()
        except RewardError as error:
            first = _raising(error)  # where an async reward would raise it, too
        return lambda: self._scores(first, ask, prompts, completions, columns)

    def _scores(self, first, ask, prompts, completions, columns) -> Scores:
        try:
            return self._insist(first, ask)
        except RewardError as error:
            if self.on_error == "raise":
                raise
            if len(completions) == 1:
                return Scores([None], failure=error)
            rows = range(len(completions))
            pending = [self.begin(**_row(i, {"prompts": prompts, "completions": completions, **columns})) for i in rows]
            scores = Scores.joined([finish() for finish in pending])
            scores.failure = scores.failure or error
            return scores

    def _insist(self, first, ask):
        for left in range(self.retries, -1, -1):
            try:
                return first() if left == self.retries else ask()()
            except RewardError:
                if not left:
                    raise


def _row(index, arguments):
    """The arguments of a call on one response alone."""
    return {name: values if name in trainer.NAMES else values[index : index + 1] for name, values in arguments.items()}


def _raising(error):
    def finish():
        raise error

    return finish
