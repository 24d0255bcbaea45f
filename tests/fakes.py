"""A policy and an engine without a model: tokens are random numbers with addresses, as everywhere."""

import torch

from misvo.head import Head
from misvo.own_sampler import OwnSampler
from misvo.rollouts import Rollouts
from misvo.sampling import RandomStream

WORDS, WIDTH = 13, 4


class FakeEngine:
    """Takes `turns` turns for every request, and remembers what was asked of it."""

    def __init__(self, head, turns=3, rows=8):
        self.head, self.turns, self.rows = head, turns, rows
        self.flying, self.asked, self.cancelled, self.forgotten = {}, [], [], []

    busy = property(lambda self: bool(self.flying))

    def submit(self, request):
        self.asked.append(request)
        self.flying[len(self.asked)] = [self.turns, request]
        return len(self.asked)

    def room(self, request):
        return sum(len(r.rollouts) for _, r in self.flying.values()) + len(request.rollouts) <= self.rows

    def cancel(self, ticket):
        self.cancelled.append(ticket)
        self.flying.pop(ticket, None)

    def forget(self, prompt):
        self.forgotten.append(prompt)

    def close(self):
        self.flying.clear()

    def advance(self):
        for waiting in self.flying.values():
            waiting[0] -= 1
        done = [(ticket, rollouts_of(request)) for ticket, (left, request) in self.flying.items() if not left]
        for ticket, _ in done:
            del self.flying[ticket]
        return done


def rollouts_of(request):
    """Rows that never end, under laws that nobody looks at."""
    K, T = len(request.rollouts), request.max_new_tokens
    keys = RandomStream(request.seed, request.prompt).keys(request.step, request.rollouts, T)
    zeros, states = torch.zeros(K, T), torch.zeros(K, T, WIDTH)
    kept = {"score_rows": states, "fisher_rows": states, "mean_probs": torch.full((T, WORDS), 1 / WORDS)}
    return Rollouts(keys % WORDS, torch.full((K,), T), zeros, zeros, zeros, **kept, hidden=states)


class FakePolicy:
    name, ends, own_sampler = "fake", (), OwnSampler()

    def __init__(self, **engine):
        self.head = Head(torch.randn(WORDS, WIDTH, generator=torch.Generator().manual_seed(0)))
        self.made, self.options = None, engine

    def engine(self, *_):
        self.made = FakeEngine(self.head, **self.options)
        return self.made

    def rows_that_fit(self, *_):
        return 8

    def check_length(self, *_):
        pass

    def encode(self, prompt, **_):
        return [ord(letter) % WORDS for letter in prompt]

    def decode(self, tokens):
        return " ".join(map(str, tokens))

    def spell(self, token):
        return str(token)
