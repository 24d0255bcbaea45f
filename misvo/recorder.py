"""What a run's result leaves out and some readers want: log-probabilities of every token, and the u behind an answer.

A `Recorder` is handed to `Session.add` and hears of every step. Log-probabilities are 8 bytes a token. Vectors are kept
of every step where they are few, and where there is one for each position only of the step that the best response
is of: they may be larger than everything else.
"""

from dataclasses import dataclass, field

import torch

from misvo.interventions import Vectors
from misvo.result import Result
from misvo.rollouts import Request, Rollouts

FEW = 65_536  # numbers


@dataclass(frozen=True)
class StepRecord:
    """Log-probabilities of a step's tokens, (K, T) each: under the steered law, and under the reference's."""

    logprobs: torch.Tensor
    ref_logprobs: torch.Tensor


@dataclass
class Recorder:
    steps: dict[int, StepRecord] = field(default_factory=dict)
    vectors: dict[int, Vectors] = field(default_factory=dict)  # step -> u

    def note(self, request: Request, rollouts: Rollouts, result: Result) -> None:
        self.steps[request.step] = StepRecord(rollouts.logprobs, rollouts.ref_logprobs)
        vectors = request.intervention
        if not isinstance(vectors, Vectors):
            return
        if vectors.free.numel() <= FEW:
            self.vectors[request.step] = vectors
        elif result.best.step == request.step:
            self.vectors = {request.step: vectors}

    def logprobs(self, step: int, rollout: int, length: int) -> tuple[list[float], list[float]]:
        """Of the first so many tokens of a response: under the law that it was sampled from, and the reference's."""
        record = self.steps[step]
        return record.logprobs[rollout, :length].tolist(), record.ref_logprobs[rollout, :length].tolist()
