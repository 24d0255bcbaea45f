"""Samples of one prompt that nobody scores, as a session decodes them beside its runs: what `Policy.sample` gives.

A session drives a `Draw` as it drives a `Run`: it asks once, is told once, and is finished.
"""

from dataclasses import replace

from misvo.interventions import Vectors
from misvo.policy import Policy
from misvo.rollouts import Request, Rollouts
from misvo.run import Responses
from misvo.sampling import sampler_of
from misvo.settings import Settings
from misvo.steering import Steering
from misvo.text import before_stop
from misvo.text_policy import Samples


class Draw:
    """`settings.rollouts` samples under a steering; `result` is there once it is finished."""

    def __init__(
        self,
        tokens: tuple[int, ...],
        settings: Settings,
        words: Policy,
        steering: Steering | None = None,
        greedy: bool = False,
    ):
        self.tokens, self.settings, self.words, self.steering = tokens, settings, words, steering
        self.sampler = replace(sampler_of(settings, words.ends), greedy=greedy)
        self.result: Samples | None = None

    @property
    def finished(self) -> bool:
        return self.result is not None

    def ask(self) -> list[Request]:
        return [replace(self.outline(), intervention=self._intervention(), stop=self.settings.stop or ())]

    def outline(self) -> Request:
        """A request of this size, to ask an engine for room."""
        settings = self.settings
        return Request(self.tokens, settings.seed, 0, range(settings.rollouts), settings.max_new_tokens, self.sampler)

    def gather(self, request: Request, rollouts: Rollouts) -> Rollouts:
        """They have no pauses."""
        return rollouts

    def responses(self, rollouts: Rollouts) -> Responses:
        tokens = rollouts.responses()
        return Responses(tokens, [before_stop(self.words.decode(row), self.settings.stop or ()) for row in tokens])

    def is_scored(self, request: Request) -> bool:
        return False

    def tell(self, request: Request, rollouts: Rollouts, responses: Responses, answer: None) -> None:
        self.result = Samples(responses.texts, rollouts)

    def settle(self) -> None:
        """There is nothing to put in order."""

    def _intervention(self):
        return None if self.steering is None else Vectors.by_position(self.steering.at(self.settings.max_new_tokens))
