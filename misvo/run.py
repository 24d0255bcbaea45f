"""One prompt on its way: what it wants decoded, what it learns of scores, when it is done. No model, no threads.

for request in run.ask(): ...                                # decode them, in any order, on any engine
rollouts = run.gather(request, rollouts)                     # with what its rows said before, where a step has pauses
row = run.tell(request, rollouts, responses, answer)         # the new trace row; then ask again
run.result                                                   # at any time; whole once run.finished
"""

import itertools
import time
from dataclasses import dataclass, replace
from typing import Protocol, cast

import torch

from misvo import meter
from misvo.adapted import AdaptedModel
from misvo.errors import RewardError
from misvo.head import Head
from misvo.methods import METHODS
from misvo.methods.base import Context, Method, PausingMethod, Proposal, Scores, Update
from misvo.numbers import as_numbers, mean_of
from misvo.prompts import Prompt
from misvo.recorder import Recorder
from misvo.result import Candidate, Result
from misvo.rollouts import Request, Rollouts
from misvo.rounds import Round
from misvo.sampling import sampler_of
from misvo.scoring import Answer
from misvo.settings import Settings
from misvo.steering import Steering
from misvo.text import before_stop, pieces

AHEAD = 1024  # rows that a run without order asks for at once: more than decode together, however many steps it has


@dataclass(frozen=True)
class Responses:
    """The rollouts of a request as token ids and as texts."""

    tokens: list[list[int]]
    texts: list[str]


class Words(Protocol):
    """What a run needs to know of a model beside its head: how it is called, and what its tokens mean."""

    name: str
    ends: tuple[int, ...]  # the tokens that end its responses

    def decode(self, tokens: list[int]) -> str: ...

    def spell(self, token: int) -> str: ...


class Run:
    """A prompt, its method and what came of it so far."""

    def __init__(
        self,
        prompt: Prompt,
        tokens: tuple[int, ...],
        head: Head,
        settings: Settings,
        words: Words,
        scores_prefixes: bool = False,  # whether the reward has a word on beginnings of responses
        adapted: AdaptedModel | None = None,
        recorder: Recorder | None = None,
    ):
        self.tokens, self.head, self.settings, self.words = tokens, head, settings, words
        self.recorder = recorder
        self.sampler, self.scores_prefixes = sampler_of(settings, words.ends), scores_prefixes
        context = Context(head, tokens, self.sampler, settings, scores_prefixes, adapted)
        self._method: Method | None = METHODS[settings.method](context)
        # Where a step may be the last one, the next is not begun before it is scored, whatever the method allows.
        self.sequential = self.method.sequential or settings.may_stop
        self.result = Result(prompt, settings, prompt_ids=list(tokens))
        self.finished = False
        self._steps_left = range(settings.steps)
        self._asked: set[int] = set()  # steps that are being decoded or scored
        self._rounds: dict[int, Round] = {}  # those among them that are not the meter's
        self._blocks: list[Request] = []  # of steps that go on behind a pause
        self._reference: Rollouts | None = None  # rollouts of the reference policy, kept for KL_ref
        self._measures = settings.kl_ref and not self.method.starts_at_reference  # wants rollouts for nothing else
        self._failure_told = False  # that a reward failed on some responses is noted once
        self._held_out_failure_told = False
        self._started = 0.0  # when the first step was asked for

    @property
    def method(self) -> Method:
        """The method, until the run has finished."""
        assert self._method is not None
        return self._method

    @property
    def extra(self) -> int:
        """The step of the rollouts that only the meter wants: behind all others."""
        return self.settings.steps

    def ask(self) -> list[Request]:
        """What can be decoded now and was not asked for before."""
        self._started = self._started or time.perf_counter()
        count = 1 if self._asked <= {self.extra} else 0
        if not self.sequential:
            count = max(0, max(1, AHEAD // self.settings.rollouts) - len(self._asked - {self.extra}))
        steps = list(self._steps_left[:count])
        self._steps_left = self._steps_left[len(steps) :]
        if self._measures:
            self._measures = False
            steps.append(self.extra)
        self._asked.update(steps)
        blocks, self._blocks = self._blocks, []
        return blocks + [self._begin(step) for step in steps]

    def outline(self) -> Request:
        """A request of the size of a step, to ask an engine for room."""
        return Request(self.tokens, 0, 0, range(self.settings.rollouts), self.settings.max_new_tokens, self.sampler)

    def gather(self, request: Request, rollouts: Rollouts | None) -> Rollouts:
        """All rows of a step from their first token on, now that a request was decoded; None: it had no rows."""
        if request.step == self.extra:
            assert rollouts is not None
            return rollouts
        return self._rounds[request.step].gather(rollouts)

    def responses(self, rollouts: Rollouts) -> Responses:
        """What rollouts say."""
        tokens = rollouts.responses()
        texts = [before_stop(self.words.decode(row), self.settings.stop or ()) for row in tokens]
        return Responses(tokens, texts)

    def is_scored(self, request: Request) -> bool:
        """Whether what was gathered has to be scored before it is told."""
        if request.step == self.extra:
            return False
        return self._rounds[request.step].over or self._rounds[request.step].scores_pauses

    def is_whole(self, request: Request) -> bool:
        """Whether what was gathered are whole responses, and not their beginnings at a pause."""
        return self._rounds[request.step].over

    def prefixes_up_to(self, request: Request) -> int | None:
        """Where beginnings of whole responses are to be scored too: the longest response that there may be."""
        wants = self.method.wants_prefixes
        if not self.is_whole(request) or not (wants == "always" or (wants == "cheap" and self.scores_prefixes)):
            return None
        return self.settings.max_new_tokens

    def tell(self, request: Request, rollouts: Rollouts, responses: Responses, answer: Answer | None) -> dict | None:
        """Learn from what was gathered; gives a step's trace row, or None at a pause and for what the meter wants."""
        if request.step != self.extra and not self._rounds[request.step].over:
            self._pause(self._rounds[request.step], rollouts, answer)
            return None
        self._asked.discard(request.step)
        self.result.prefill_seconds += rollouts.prefill_seconds
        if answer is None:
            self._reference = rollouts
            self.result.reference = Candidate(request.step, 0, responses.tokens[0], responses.texts[0], None)
            row = None
        else:
            row = self._learn(request.step, rollouts, responses, answer)
            if self.recorder is not None:
                self.recorder.note(request, rollouts, self.result)
        if not self._asked and not self._steps_left:
            self._finish()
        return row

    def stop(self, why: str) -> None:
        """Ask for no further step. What is decoding may still be told."""
        self._steps_left = range(0)
        if self.result.trace:
            self.result.trace[-1]["note"] = why

    def settle(self) -> None:
        """Put in order what was done so far, and make the steering of the last vectors."""
        if self._method is None:  # it is in order, even where somebody ended the measurement that follows
            return
        result, u = self.result, self.method.vectors
        result.candidates.sort(key=lambda candidate: (candidate.step, candidate.rollout))
        result.trace.sort(key=lambda row: row["step"])
        highest = itertools.accumulate((row["max"] for row in result.trace), max)
        for row, best in zip(result.trace, highest, strict=True):  # steps of best-of-n may end in any order
            row["best"] = best
        if any(candidate.reward is not None for candidate in result.candidates):
            result.pieces = pieces(result.best.tokens, self.words.decode)
        if u is not None:
            metadata = {"model": self.words.name, "prompt": result.prompt, "settings": self.settings.to_dict()}
            result.steering = Steering(u.float().cpu().contiguous(), self.head.fingerprint, self.settings.tie, metadata)

    def _begin(self, step) -> Request:
        """The first request of a step."""
        if step == self.extra:
            return self._request(step, Proposal())
        proposal = self.method.propose(step)
        request = self._request(step, proposal)
        self._rounds[step] = Round(request, proposal.pauses, proposal.scores_pauses)
        return self._rounds[step].ask()

    def _pause(self, under_way: Round, rollouts, answer: Answer | None) -> None:
        """Let the method say which rows go on, and how."""
        started, step = time.perf_counter(), under_way.request.step
        scores = None if answer is None else Scores(as_numbers(answer.rewards))
        under_way.go_on(cast(PausingMethod, self.method).regroup(step, rollouts, scores))
        under_way.seconds["reward"] += 0.0 if answer is None else answer.seconds
        under_way.seconds["update"] += time.perf_counter() - started
        self._blocks.append(under_way.ask())

    def _request(self, step, proposal: Proposal) -> Request:
        """The whole of a step."""
        settings, method = self.settings, self.method
        intervention, keep = proposal.intervention, proposal.keep
        measured = 0 if method.starts_at_reference else self.extra
        if settings.kl_ref and step == measured and method.steers:
            keep = replace(keep, hidden=True)  # the method may want them too
        rollouts = range(settings.rollouts)
        return Request(
            self.tokens,
            settings.seed,
            step,
            rollouts,
            settings.max_new_tokens,
            self.sampler,
            intervention,
            keep,
            settings.stop or (),
            proposal.anchored,
            adapter=proposal.adapter,
        )

    def _learn(self, step, rollouts, responses, answer) -> dict:
        started, result, method = time.perf_counter(), self.result, self.method
        rewards, count = answer.rewards, len(responses.texts)
        likely = (rollouts.ref_logprobs.sum(1) / rollouts.lengths).tolist()
        nats = [row[:length] for row, length in zip(rollouts.kl.tolist(), rollouts.lengths.tolist(), strict=True)]
        ended = [None] * count if rollouts.ended is None else rollouts.ended.tolist()
        changed = torch.zeros(count, 1) if rollouts.changed is None else rollouts.changed
        held_out = [None] * count if answer.held_out is None else answer.held_out
        for index, value in enumerate(rewards):
            tokens, text = responses.tokens[index], responses.texts[index]
            known_of_it = (likely[index], nats[index], ended[index], torch.nonzero(changed[index])[:, 0].tolist())
            parts = {name: values[index] for name, values in rewards.parts.items()}
            result.candidates.append(
                Candidate(step, index, tokens, text, value, *known_of_it, parts=parts, held_out=held_out[index])
            )
        if step == 0 and method.starts_at_reference:
            result.reference = result.candidates[-count]
            if self.settings.kl_ref and rollouts.hidden is not None:  # of which the meter wants no more than the states
                self._reference = replace(rollouts, score_rows=None, fisher_rows=None, mean_probs=None)
        known = [value for value in rewards if value is not None]
        if not known:
            raise rewards.failure or RewardError(
                f"the reward scored none of the {count} responses of step {step}: all were None."
            )
        norm = 0.0 if method.vectors is None else method.vectors.norm().item()
        update = method.update(step, rollouts, Scores(as_numbers(rewards), answer.prefixes))
        stop = update.stop or self._enough(step, rollouts.drawn)
        if stop is not None:
            self._steps_left = range(0)
        kl = (rollouts.kl.sum(0) / count).tolist()
        paused = self._rounds.pop(step).seconds
        seconds = {
            "decode": rollouts.seconds,
            "reward": answer.seconds + paused["reward"],
            "update": time.perf_counter() - started + paused["update"],
        }
        row = {
            "step": step,
            "mean": sum(known) / len(known),
            "max": max(known),
            "spread": max(known) - min(known),
            "best": max([max(known), *(row["best"] for row in result.trace[-1:])]),
            "unscored": count - len(known),
            "norm": norm,
            "kl": sum(kl),
            "kl_per_position": kl,
            "tokens": rollouts.drawn,
            "seconds": seconds,
            **update.columns,
        }
        if answer.held_out is not None:
            row["held_out"] = mean_of(answer.held_out)
        failures = (self._failure(rewards), self._held_out_failure(answer.held_out))
        if notes := [note for note in (*failures, stop or self._note(known, update)) if note]:
            row["note"] = "; ".join(notes)
        if rewards.parts:
            row["parts"] = rewards.means()
        if rewards.extra:
            row["extra"] = rewards.extra
        result.trace.append(row)
        return row

    def _failure(self, rewards) -> str | None:
        if rewards.failure is None or self._failure_told:
            return None
        self._failure_told = True
        return str(rewards.failure).rstrip(".")

    def _held_out_failure(self, held_out) -> str | None:
        if held_out is None or held_out.failure is None or self._held_out_failure_told:
            return None
        self._held_out_failure_told = True
        return "the held-out reward failed, so it has no score of these responses"

    def _note(self, known, update: Update) -> str | None:
        if update.note is None and min(known) == max(known) and self.method.vectors is not None:
            return f"all rewards are equal ({known[0]:.3g}): no response is better than another, so nothing is learned"
        return update.note

    def _enough(self, step, drawn) -> str | None:
        """Why the run may stop before its last step, if it may; `drawn` tokens were sampled in this one."""
        settings, result = self.settings, self.result
        if not self._steps_left:
            return None
        if settings.stop_reward is not None and result.reward >= settings.stop_reward:
            return f"stopped: the best reward has reached {settings.stop_reward:g}"
        if settings.patience is not None and step - result.best.step >= settings.patience:
            return f"stopped: no better response for {settings.patience} steps"
        spent = sum(row["tokens"] for row in result.trace) + drawn
        if settings.token_budget is not None and spent >= settings.token_budget:
            return f"stopped: {spent} tokens were sampled"
        seconds = time.perf_counter() - self._started
        if settings.seconds_budget is not None and seconds >= settings.seconds_budget:
            return f"stopped after {seconds:.1f} s"
        return None

    @torch.no_grad()
    def _finish(self) -> None:
        """Settle, measure the steering where that was asked for, and let the rest go."""
        self.settle()
        result, method, reference = self.result, self.method, self._reference
        steering, sampler = method.intervention, self.sampler
        result.value = getattr(method, "value", None)
        self._method = self._reference = None
        del method  # what these hold is as large as what the meter needs
        if reference is not None and steering is not None:
            result.kl_ref = meter.kl_ref(self.head, reference, steering, sampler)
            result.moved = meter.most_moved(self.head, reference, steering, result.kl_ref, self.words.spell, sampler)
        self.finished = True
