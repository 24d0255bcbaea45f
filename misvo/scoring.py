"""Rewards beside decoding: a queue and a thread for each reward, so that none is ever called twice at the same time.

What a reward raises comes out where its scores would have: in the hands of the run that asked.
"""

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch

from misvo import credit
from misvo.errors import RewardError
from misvo.prompts import Prompt
from misvo.rewards import Reward, Scores, TrainerState, score


@dataclass(frozen=True)
class Question:
    """The responses of a step, on their way to a reward."""

    reward: Reward  # as it is called
    prompt: Prompt
    columns: dict
    tokens: list[list[int]]
    texts: list[str]
    state: TrainerState = TrainerState()  # noqa: RUF009, frozen
    prefixes_up_to: int | None = None  # where beginnings are to be scored too: the longest response that there may be
    held_out: Reward | None = None  # another reward, which is watched and not optimised


@dataclass(frozen=True)
class Answer:
    rewards: Scores
    prefixes: torch.Tensor | None  # (K, cuts), see misvo.credit
    seconds: float
    held_out: Scores | None = None


def answer(question: Question, decode: Callable[[list[int]], str]) -> Answer:
    """Call the reward, on the responses and, where that is wanted, on their beginnings."""
    started, prefixes = time.perf_counter(), None

    def ask(texts, tokens, reward=question.reward):
        return score(reward, question.prompt, texts, tokens, question.columns, question.state)

    rewards = ask(question.texts, question.tokens)
    if question.prefixes_up_to is not None:

        def ask_beginnings(tokens):
            return ask([decode(row) for row in tokens], tokens)

        prefixes = credit.prefix_rewards(question.tokens, rewards, question.prefixes_up_to, ask_beginnings)
    seconds, held_out = time.perf_counter() - started, None
    if question.held_out is not None:
        try:
            held_out = ask(question.texts, question.tokens, question.held_out)
        except RewardError as error:  # it takes no part, so nothing ends with it
            held_out = Scores([None] * len(rewards), failure=error)
    return Answer(rewards, prefixes, seconds, held_out)


class Scorer:
    """Answers questions in threads of their own, or at once."""

    def __init__(self):
        self._queues: list[tuple[object, ThreadPoolExecutor]] = []

    def submit(self, owner, question: Question, decode, background: bool) -> Future:
        """Ask a reward. `owner` is the reward as the user gave it: its questions queue behind each other."""
        if background:
            return self._queue(owner).submit(answer, question, decode)
        future: Future = Future()
        try:
            future.set_result(answer(question, decode))
        except Exception as error:  # its owner hears of it when the future is asked, as it would from a thread
            future.set_exception(error)
        return future

    def forget(self, owner) -> None:
        """No more questions of this reward will come: its thread ends when it has answered those that it has."""
        for known, pool in self._queues:
            if known is owner:
                pool.shutdown(wait=False)
        self._queues = [(known, pool) for known, pool in self._queues if known is not owner]

    def close(self, wait: bool = True) -> None:
        for _, pool in self._queues:
            pool.shutdown(wait=wait, cancel_futures=True)
        self._queues.clear()

    def _queue(self, owner):
        for known, pool in self._queues:
            if known is owner:
                return pool
        self._queues.append((owner, ThreadPoolExecutor(1, "misvo-reward")))
        return self._queues[-1][1]
