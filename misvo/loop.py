"""The loop that all methods share: propose, decode, score, update, until the steps are done.

Many prompts run through one engine. Each has its own method, random stream and trace; a prompt's step begins as
soon as its own responses are scored, and new prompts enter as rows come free.
"""

import itertools
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace

import torch

from misvo import credit, meter
from misvo.decoding import Engine
from misvo.errors import MisvoError, RewardError
from misvo.footprint import most_open
from misvo.methods import METHODS
from misvo.policy import Policy
from misvo.prompts import Prompt
from misvo.result import Candidate, Result
from misvo.rewards import Reward, as_reward, score
from misvo.rollouts import Request, Rollouts
from misvo.sampling import RandomStream, Sampler
from misvo.settings import Settings
from misvo.steering import Steering

REFERENCE = -1  # the step of rollouts that only the meter wants
OnStep = Callable[[int, dict], None]  # (index of the prompt, the new trace row)


def steer(policy: Policy, prompt: Prompt, reward: Reward, *, columns=None, on_step=None, **settings) -> Result:
    """Optimise steering vectors for one prompt and return the best response seen.

    `preset` is "paper" (Algorithm 1 as printed, the default) or "auto" (no tuning: one vector for all positions,
    steps in nats, a KL budget). The other `settings` are the fields of `misvo.Settings`: method="misvo",
    cost="frozen-fisher", rollouts=16, steps=16, max_new_tokens=512, learning_rate=0.1, penalty (1.0 for misvo),
    temperature=1.0, top_p=1.0, seed=0, kl_ref=False, max_rows=None and more. `columns` is a dict handed to the
    reward beside prompts and completions; `on_step(index, row)` is called with each new trace row.

    A trace row has: step, mean, max and best reward, unscored (how many rewards were None), norm of u and sequence
    KL of the policy that was sampled (kl, kl_per_position), tokens, seconds by stage, a note where something was odd.

    Where a reward fails or somebody presses Ctrl-C, the RewardError or KeyboardInterrupt has a `result`: what the run
    had until then, with the vectors of its last update.
    """
    columns = None if columns is None else [columns]
    try:
        return steer_many(policy, [prompt], reward, columns=columns, on_step=on_step, **settings)[0]
    except KeyboardInterrupt as interrupt:
        interrupt.result = getattr(interrupt, "results", [None])[0]
        raise


def steer_many(
    policy: Policy,
    prompts: Sequence[Prompt],
    reward: Reward,
    *,
    columns: Sequence[dict] | None = None,
    on_step: OnStep | None = None,
    **settings,
) -> list[Result]:
    """Steer many prompts in one batch; each gets the result that `steer` would give it alone.

    A KeyboardInterrupt has their `results`, as far as they had come.
    """
    settings = Settings.from_preset(**settings)
    reward = as_reward(reward)
    if isinstance(prompts, str):
        raise MisvoError("steer_many takes a list of prompts: use steer for a single one.")
    if columns is not None and len(columns) != len(prompts):
        raise MisvoError(f"there are {len(prompts)} prompts but {len(columns)} rows of columns.")
    runs = [_Run(policy, prompt, settings) for prompt in prompts]  # refuses bad prompts before any work
    if not runs:
        return []
    with _Scoring(reward, background=len(runs) > 1) as scoring:
        try:
            _drive(policy, runs, scoring, columns, on_step, settings)
        except (RewardError, KeyboardInterrupt) as error:
            for run in runs:
                run.settle()
            failed = isinstance(error, RewardError)  # whose `result` is the prompt that failed; here are the others
            error.results = [run.result if run.complete or not failed else None for run in runs]
            raise
    return [run.result for run in runs]


def _drive(policy, runs, scoring, columns, on_step, settings):
    """Keep the engine busy: decode for some prompts while the responses of others are scored."""
    waiting, decoding, engine = deque(enumerate(runs)), {}, None
    longest = max(len(run.tokens) for run in runs)
    while waiting or decoding or scoring.pending:
        while waiting and (engine is None or _room(engine, decoding, scoring, settings)):
            index, run = waiting.popleft()  # a prompt is read when its turn comes, not before
            run.open()
            if engine is None:
                rows = settings.max_rows or policy.rows_that_fit(run.prefix, settings, len(runs), longest)
                engine = Engine(policy, rows, sampler(settings))
            decoding |= {id(rollouts): (index, run, rollouts) for rollouts in run.begin(engine)}
        for finished in engine.advance() if engine.busy else []:
            index, run = decoding.pop(id(finished))[:2]
            scoring.submit(index, run, run.responses(finished), columns[index] if columns else {})
            del finished  # nothing of a step that is over may be held while the next one decodes
        for index, run, responses, rewards in scoring.ready(wait=not engine.busy):
            row = run.learn(responses, rewards)
            del responses
            if on_step is not None and row is not None:
                on_step(index, row)
            decoding |= {id(rollouts): (index, run, rollouts) for rollouts in run.next_step(engine)}


def _room(engine, decoding, scoring, settings):
    """Whether another prompt may begin: its rows fit, and no more prompts are open than twice what fits at once."""
    open_prompts = len({id(run) for _, run, _ in decoding.values()} | {id(job[1]) for job in scoring.pending})
    fits = engine.load + settings.rollouts <= engine.max_rows or not engine.busy
    return fits and open_prompts < most_open(engine.max_rows, settings.rollouts)


@dataclass
class _Responses:
    """The responses of one step, on their way to be scored."""

    step: int
    rollouts: Rollouts
    tokens: list[list[int]]
    texts: list[str]


class _Scoring:
    """Calls the reward, one step after the other: in a thread beside decoding where there are other prompts to decode,
    at once where there are none. One thread, so that a reward is never called twice at the same time."""

    def __init__(self, reward, background):
        self.reward, self.pending = reward, deque()
        self.pool = ThreadPoolExecutor(1, "misvo-reward") if background else None

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.pool is not None:
            self.pool.shutdown(wait=True, cancel_futures=True)

    def submit(self, index, run, responses, columns):
        if self.pool is None or responses.step == REFERENCE:
            future = Future()
            future.set_result(None if responses.step == REFERENCE else self._score(run, responses, columns))
        else:
            future = self.pool.submit(self._score, run, responses, columns)
        self.pending.append((index, run, responses, future))

    def ready(self, wait):
        """The steps whose rewards are known, in order; waits for the first of them if there is nothing else to do."""
        while self.pending and (wait or self.pending[0][3].done()):
            *known, future = self.pending.popleft()
            wait = False
            yield *known, future.result()
            del known, future

    def _score(self, run, responses, columns):
        started = time.perf_counter()
        try:
            rewards = score(self.reward, run.result.prompt, responses.texts, responses.tokens, columns)
            if run.scores_prefixes(self.reward):
                responses.rollouts.prefix_rewards = run.prefix_rewards(self.reward, responses, rewards, columns)
        except RewardError as error:
            error.result = run.result
            raise
        return rewards, time.perf_counter() - started


class _Run:
    """One prompt on its way through the loop."""

    def __init__(self, policy, prompt, settings):
        self.policy, self.settings = policy, settings
        self.tokens = policy.encode(prompt)
        policy.check_length(len(self.tokens), settings.max_new_tokens)
        self.result = Result(prompt, settings)
        self.method = None  # until its turn comes
        self.complete = False
        self.step_of = {}  # id of the rollouts in flight -> their step

    def open(self):
        """Read the prompt and set the method up."""
        self.started = started = time.perf_counter()
        self.prefix = self.policy.prefill(self.tokens, self.settings.max_new_tokens)
        self.result.prefill_seconds = time.perf_counter() - started
        self.stream = RandomStream(self.settings.seed, self.tokens)
        method = METHODS[self.settings.method]
        self.method = method(self.policy.head, self.stream, sampler(self.settings), self.settings)
        # Where a step may be the last one, the next is not begun before it is scored, whatever the method allows.
        self.sequential = self.method.sequential or self.settings.may_stop
        self.reference = None  # the first step's rollouts, kept for KL_ref
        self.steps_left = deque(range(self.settings.steps))

    def begin(self, engine) -> list[Rollouts]:
        """Submit the first step, or every step where none waits for another.

        KL_ref wants rollouts of the reference policy: where the first step gives none, some are sampled beside it.
        """
        count = 1 if self.sequential else self.settings.steps
        steps = [self._submit(engine, self.steps_left.popleft()) for _ in range(count)]
        if self.settings.kl_ref and not self.method.starts_at_reference:
            steps.append(self._submit(engine, REFERENCE))
        return steps

    def next_step(self, engine) -> list[Rollouts]:
        if self.steps_left and self.sequential and all(step == REFERENCE for step in self.step_of.values()):
            return [self._submit(engine, self.steps_left.popleft())]
        if not self.step_of:
            self._close()
        return []

    def responses(self, rollouts) -> _Responses:
        """What the rollouts of a step say."""
        tokens = rollouts.responses()
        return _Responses(self.step_of[id(rollouts)], rollouts, tokens, [self.policy.decode(row) for row in tokens])

    def scores_prefixes(self, reward) -> bool:
        """Whether the method wants to know what the reward says of the beginnings of responses, see misvo.credit."""
        cheap = self.settings.credit == "cheap" and getattr(reward, "scores_prefixes", False)
        return self.settings.method == "misvo" and (self.settings.credit == "prefix" or cheap)

    def prefix_rewards(self, reward, responses, rewards, columns) -> torch.Tensor:
        """What the reward says of the beginnings of a step's responses, (K, cuts)."""

        def ask(prefixes):
            return score(reward, self.result.prompt, [self.policy.decode(row) for row in prefixes], prefixes, columns)

        return credit.prefix_rewards(responses.tokens, rewards, self.settings.max_new_tokens, ask)

    def learn(self, responses, scored):
        """Let the method learn from a step's rewards; write and return the trace row."""
        step, rollouts, tokens, texts = responses.step, responses.rollouts, responses.tokens, responses.texts
        result = self.result
        del self.step_of[id(rollouts)]
        if step == REFERENCE:
            self.reference = rollouts
            result.reference = Candidate(step, 0, tokens[0], texts[0], None)
            return None
        rewards, reward_seconds = scored
        started = time.perf_counter()
        likely = (rollouts.ref_logprobs.sum(1) / rollouts.lengths).tolist()
        for index, value in enumerate(rewards):
            result.candidates.append(Candidate(step, index, tokens[index], texts[index], value, likely[index]))
        if step == 0 and self.method.starts_at_reference:
            result.reference = result.candidates[0]
            if self.settings.kl_ref and rollouts.hidden is not None:  # of which the meter wants no more than the states
                self.reference = replace(rollouts, score_rows=None, fisher_rows=None, mean_probs=None)
        known = [value for value in rewards if value is not None]
        if not known:
            error = RewardError(f"the reward scored none of the {len(texts)} responses of step {step}: all were None.")
            error.result = result
            raise error
        norm = 0.0 if self.method.vectors is None else self.method.vectors.norm().item()
        values = torch.tensor([math.nan if value is None else value for value in rewards], dtype=torch.float64)
        extra = self.method.update(step, rollouts, values)
        if min(known) == max(known) and self.method.vectors is not None:
            extra.setdefault("note", "all rewards are equal: no advantage, u only decays")
        stop = extra.pop("stop", None) or self._enough(step)
        if stop is not None:
            self.steps_left.clear()
            extra["note"] = stop
        kl = (rollouts.kl.sum(0) / len(texts)).tolist()
        seconds = {"decode": rollouts.seconds, "reward": reward_seconds, "update": time.perf_counter() - started}
        row = {
            "step": step,
            "mean": sum(known) / len(known),
            "max": max(known),
            "best": max([max(known), *(row["best"] for row in result.trace[-1:])]),
            "unscored": len(rewards) - len(known),
            "norm": norm,
            "kl": sum(kl),
            "kl_per_position": kl,
            "tokens": int(rollouts.lengths.sum()),
            "seconds": seconds,
            **extra,
        }
        if rewards.parts:
            row["parts"] = rewards.means()
        result.trace.append(row)
        return row

    def _enough(self, step) -> str | None:
        """Why the run may stop before its last step, if it may."""
        settings, result = self.settings, self.result
        if not self.steps_left:
            return None
        if settings.stop_reward is not None and result.reward >= settings.stop_reward:
            return f"stopped: the best reward has reached {settings.stop_reward:g}"
        if settings.patience is not None and step - result.best.step >= settings.patience:
            return f"stopped: no better response for {settings.patience} steps"
        spent = sum(len(candidate.tokens) for candidate in result.candidates)
        if settings.token_budget is not None and spent >= settings.token_budget:
            return f"stopped: {spent} tokens were sampled"
        seconds = time.perf_counter() - self.started
        if settings.seconds_budget is not None and seconds >= settings.seconds_budget:
            return f"stopped after {seconds:.1f} s"
        return None

    def _submit(self, engine, step):
        options = {"keep_scores": False} if step == REFERENCE else self.method.propose(step)
        measured = 0 if self.method.starts_at_reference else REFERENCE
        if self.settings.kl_ref and step == measured and self.settings.method != "best-of-n":
            options["keep_hidden"] = True  # the method may want them too
        request = Request(
            prefix=self.prefix,
            stream=self.stream,
            step=self.settings.steps if step == REFERENCE else step,  # the address of its random numbers
            rollouts=range(self.settings.rollouts),
            max_new_tokens=self.settings.max_new_tokens,
            **options,
        )
        rollouts = engine.submit(request)
        self.step_of[id(rollouts)] = step
        return rollouts

    def settle(self):
        """Put in order what was done so far, and make the steering of the last vectors."""
        result, u = self.result, None if self.method is None else self.method.vectors
        result.candidates.sort(key=lambda candidate: (candidate.step, candidate.rollout))
        result.trace.sort(key=lambda row: row["step"])
        highest = itertools.accumulate((row["max"] for row in result.trace), max)
        for row, best in zip(result.trace, highest, strict=True):  # steps of best-of-n may end in any order
            row["best"] = best
        if u is not None:
            head, settings = self.policy.head.fingerprint, self.settings
            metadata = {"model": self.policy.name, "prompt": result.prompt, "settings": settings.to_dict()}
            result.steering = Steering(u.float().cpu().contiguous(), head, settings.tie, metadata)

    def _close(self):
        """Settle, measure the steering where that was asked for, and let the rest go."""
        self.settle()
        settings, result, steering = self.settings, self.result, self.method.intervention()
        result.value = getattr(self.method, "value", None)
        self.method = self.prefix = None  # what they hold is as large as what the meter needs
        if self.reference is not None and steering is not None:
            result.kl_ref = meter.kl_ref(self.policy.head, self.reference, steering, settings.temperature)
            result.moved = meter.most_moved(self.policy, self.reference, steering, result.kl_ref, settings.temperature)
        self.reference = None
        self.complete = True


def sampler(settings: Settings) -> Sampler:
    return Sampler(settings.temperature, settings.top_p, settings.greedy)
