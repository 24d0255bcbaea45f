"""Many prompts on one engine, each with its own reward and settings; prompts come and go while others decode.

    session = Session(policy)
    handle = session.add("Why?", reward, settings)
    while session.busy:
        for event in session.step(): ...        # one token for every row in flight
    handle.result

`misvo.steer` and `misvo.steer_many` are a few lines on it (`misvo.calls`).
"""

import warnings
from collections import deque
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field
from typing import Literal

from misvo.adapted import adapted_model
from misvo.draw import Draw
from misvo.engine import Engine, Ticket
from misvo.errors import RewardError
from misvo.policy import Policy, as_policy
from misvo.prompts import Prompt, shown
from misvo.recorder import Recorder
from misvo.rewards import AnyReward, Reward, TrainerState, as_reward, check_columns, insisting
from misvo.rollouts import Request, Rollouts
from misvo.run import Responses, Run
from misvo.scoring import Question, Scorer
from misvo.settings import SAMPLER, Settings
from misvo.steering import Steering

State = Literal["waiting", "running", "done", "failed", "cancelled"]
OnStep = Callable[[int, dict], None]  # (index of the prompt, the new trace row)


@dataclass(eq=False)
class Handle:
    """One prompt in a session. `result` grows as its run goes on, and is whole when `state` is "done"."""

    run: Run | Draw
    reward: Reward | None  # as it is called; None: samples that nobody scores
    owner: AnyReward | None  # the reward as the user gave it
    columns: dict
    held_out: Reward | None = None  # as it is called: scored beside the other, and not optimised
    state: State = "waiting"
    error: Exception | None = None
    _tickets: set[Ticket] = field(default_factory=set)

    def __repr__(self) -> str:
        return f"Handle({self.state}, {self.result!r})"

    @property
    def result(self):
        """A `Result`, or the `Samples` of a prompt that was only sampled."""
        return self.run.result

    @property
    def ended(self) -> bool:
        return self.state in ("done", "failed", "cancelled")


@dataclass(frozen=True)
class Event:
    """Something happened to a prompt: a step with its trace row, or, with none, its end."""

    handle: Handle
    row: dict | None = field(default=None, repr=False)


@dataclass
class _Scoring:
    """A step whose responses are with the reward."""

    handle: Handle
    request: Request
    rollouts: Rollouts
    responses: Responses
    future: Future


class Session:
    """Drives runs on an engine; where none is given, one is made at the first step that holds what was added so far."""

    def __init__(self, policy: Policy | str, engine: Engine | None = None, background: bool | None = None):
        self.policy, self._engine = as_policy(policy), engine
        self.background = background  # rewards in threads of their own; None: while there is more than one run
        self._scorer = Scorer()
        self._scoring: list[_Scoring] = []
        self._waiting: deque[Handle] = deque()
        self._running: list[Handle] = []
        self._decoding: dict[Ticket, tuple[Handle, Request]] = {}
        self._together = 1  # most runs that have decoded at once

    def __repr__(self) -> str:
        return f"Session({self.policy!r}, {len(self._waiting)} waiting, {len(self._running)} running)"

    def __enter__(self):
        return self

    def __exit__(self, kind, *_):
        self.close(wait=kind is not KeyboardInterrupt)  # who presses Ctrl-C does not wait for a slow reward

    def add(
        self,
        prompt: Prompt,
        reward: AnyReward,
        settings: Settings | None = None,
        columns: dict | None = None,
        recorder: Recorder | None = None,
        held_out: AnyReward | None = None,
    ) -> Handle:
        """Queue a prompt. What is wrong with it is said here, before any work. `recorder` hears of every step.

        `held_out` is a reward that scores every response and is not optimised; it is called in the thread of the other
        one, so it must bear that where other runs have it too.
        """
        settings, own = settings or Settings.from_preset(), self.policy.own_sampler
        if own.note is not None and any(getattr(settings, name) is None for name in SAMPLER):
            warnings.warn(own.note, stacklevel=4)
        settings = settings.for_model(own)
        tokens = self._read(prompt, settings)
        scorer = insisting(as_reward(reward), settings.on_reward_error, settings.reward_retries)
        scores_prefixes = getattr(scorer, "scores_prefixes", False)
        adapted = adapted_model(self.policy, self._engine, settings) if settings.method == "lora" else None
        asked = shown(prompt, self.policy.decode)
        run = Run(asked, tokens, self.policy.head, settings, self.policy, scores_prefixes, adapted, recorder)
        watched = None if held_out is None else as_reward(held_out)
        handle = Handle(run, scorer, reward, check_columns({} if columns is None else columns), watched)
        self._waiting.append(handle)
        return handle

    def draw(
        self, prompt: Prompt, settings: Settings, steering: Steering | None = None, greedy: bool = False
    ) -> Handle:
        """Queue samples of a prompt, perhaps under saved vectors, that nobody scores: `result` will be `Samples`."""
        if steering is not None:
            steering.check(self.policy)
        settings = settings.for_model(self.policy.own_sampler)
        draw = Draw(self._read(prompt, settings), settings, self.policy, steering, greedy)
        self._waiting.append(handle := Handle(draw, None, None, {}))
        return handle

    def _read(self, prompt: Prompt, settings: Settings) -> tuple[int, ...]:
        """The token ids of a prompt for which there is room in the model's context."""
        template = settings.chat_template_kwargs
        tokens = tuple(self.policy.encode(prompt, raw=settings.raw, chat_template_kwargs=template))
        self.policy.check_length(len(tokens), settings.max_new_tokens)
        return tokens

    @property
    def busy(self) -> bool:
        return bool(self._waiting or self._running)

    @property
    def engine(self) -> Engine:
        if self._engine is None:
            longest = max((len(handle.run.tokens) for handle in self._waiting), default=0)
            fits, wanted = self.policy.rows_that_fit, {handle.run.settings for handle in self._waiting}
            limits = [settings.max_rows or fits(None, settings, len(self._waiting), longest) for settings in wanted]
            self._engine = self.policy.engine(*([min(limits)] if limits else []))
        return self._engine

    def step(self, until: Future | None = None) -> list[Event]:
        """Begin what there is room for, decode a token for every row, hear what rewards have said.

        Where there is nothing to decode, this waits for a reward, or until `until` is done: whoever has more to add.
        """
        events: list[Event] = []
        engine = self.engine  # made before any prompt leaves the queue, so that its rows are for all of them
        self._begin_runs(events)
        for ticket, rollouts in engine.advance() if engine.busy else []:
            handle, request = self._decoding.pop(ticket)
            handle._tickets.discard(ticket)
            self._send_to_reward(handle, request, rollouts)
            del rollouts  # nothing of a step that is over may be held while the next one decodes
        self._hear_from_rewards(events, until)
        return events

    def written(self, handle: Handle) -> list[list[int]] | None:
        """The tokens so far of samples that are being drawn; None where they are not, or where nobody can tell."""
        if isinstance(handle.run, Draw) and handle._tickets:
            return self.engine.written(next(iter(handle._tickets)))  # it asks for all of them at once
        return None

    def cancel(self, handle: Handle) -> None:
        """Take a prompt out: its rows leave the batch before the next token, and its memory is given back."""
        if not handle.ended:
            self._end(handle, "cancelled")

    def close(self, wait: bool = True) -> None:
        """Cancel what is left and, with `wait`, let rewards end that are being called."""
        for handle in [*self._waiting, *self._running]:
            self.cancel(handle)
        self._scorer.close(wait)
        if self._engine is not None:
            self._engine.close()

    def _begin_runs(self, events):
        while self._may_begin():
            handle = self._waiting.popleft()
            handle.state = "running"
            self._running.append(handle)
            self._submit(handle, events)

    def _may_begin(self) -> bool:
        """Whether there is room for the first that waits."""
        if not self._waiting or not self._running:
            return bool(self._waiting)
        crowded = len(self._running) >= 2 * self._together  # those beyond what decodes at once wait for rewards
        return not crowded and self.engine.room(self._waiting[0].run.outline())

    def _submit(self, handle, events):
        """Let a run ask for its next step. What cannot be decoded, for want of memory or of numbers, ends it alone."""
        try:
            for request in handle.run.ask():
                if not request.rollouts:  # behind a pause, where all rows have ended: there is nothing to decode
                    self._send_to_reward(handle, request, None)
                    continue
                ticket = self.engine.submit(request)
                self._decoding[ticket] = (handle, request)
                handle._tickets.add(ticket)
        except Exception as error:
            self._fail(handle, error, events)
        self._together = max(self._together, sum(bool(other._tickets) for other in self._running))

    def _send_to_reward(self, handle, request, rollouts):
        run = handle.run
        rollouts = run.gather(request, rollouts)
        responses = run.responses(rollouts)
        if not run.is_scored(request):
            future: Future = Future()
            future.set_result(None)
            self._scoring.append(_Scoring(handle, request, rollouts, responses, future))
            return
        state = TrainerState(request.step, run.settings.steps)
        said = (handle.columns, responses.tokens, responses.texts)
        held_out = handle.held_out if run.is_whole(request) else None
        question = Question(handle.reward, run.result.prompt, *said, state, run.prefixes_up_to(request), held_out)
        alone = len(self._running) + len(self._waiting) == 1
        background = not alone if self.background is None else self.background
        future = self._scorer.submit(handle.owner, question, run.words.decode, background)
        self._scoring.append(_Scoring(handle, request, rollouts, responses, future))

    def _hear_from_rewards(self, events, until):
        """Take what is ready; where there is nothing to decode, to begin or to tell, wait for the first."""
        if self._scoring and not self.engine.busy and not events and not self._may_begin():
            futures = [scoring.future for scoring in self._scoring]
            wait(futures if until is None else [*futures, until], return_when=FIRST_COMPLETED)
        ready: list[_Scoring] = []
        asked, self._scoring = self._scoring, []
        for scoring in asked:  # each is looked at once: it may be done at any moment
            (ready if scoring.future.done() else self._scoring).append(scoring)
        while ready:
            scoring = ready.pop(0)
            handle = scoring.handle
            if not handle.ended:
                self._learn(scoring, events)
                self._go_on(handle, events)
            del scoring

    def _learn(self, scoring, events):
        handle = scoring.handle
        try:
            answer = scoring.future.result()
            row = handle.run.tell(scoring.request, scoring.rollouts, scoring.responses, answer)
        except Exception as error:  # of a reward or of a method: it is this run's alone
            self._fail(handle, error, events)
        else:
            events += [Event(handle, row)] if row is not None else []

    def _fail(self, handle, error, events):
        handle.run.settle()
        if isinstance(error, RewardError):
            error.result = handle.result
        handle.error = error
        self._end(handle, "failed")
        events.append(Event(handle))

    def _go_on(self, handle, events):
        """Let a run ask for its next step, or end."""
        if handle.ended:
            return
        if handle.run.finished:
            self._end(handle, "done")
            events.append(Event(handle))
        else:
            self._submit(handle, events)

    def _end(self, handle, state: State):
        for ticket in handle._tickets:
            self.engine.cancel(ticket)
            del self._decoding[ticket]
        handle._tickets.clear()
        handle.state = state
        self._waiting = deque(other for other in self._waiting if other is not handle)
        self._running = [other for other in self._running if other is not handle]
        others = [*self._waiting, *self._running]
        if handle.owner is not None and all(other.owner is not handle.owner for other in others):
            self._scorer.forget(handle.owner)
        if self._engine is not None and all(other.run.tokens != handle.run.tokens for other in others):
            self._engine.forget(handle.run.tokens)
