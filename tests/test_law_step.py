"""What prompts of a batch do together is what each does alone. States, W and u are multiples of 1/8, so that products
are exact whatever order they sum in, and what is recorded has to agree in every bit."""

from dataclasses import dataclass

import pytest
import torch
from memory import allocated_bytes

from misvo.head import Head, Shift
from misvo.interventions import Vectors
from misvo.law_step import Group, LawStep
from misvo.rollouts import Keep, Request
from misvo.sampling import Sampler
from misvo.tie import TIES, Tie

V, D, LENGTH = 300, 6, 2 * Shift.POSITIONS + 2
RECORDS = ("tokens", "kl", "logprobs", "ref_logprobs", "changed", "log_ratios", "squares")


def eighths(*shape, seed=0):
    return torch.randint(-8, 9, shape, generator=torch.Generator().manual_seed(seed)) / 8


@dataclass
class OfEachRow:
    """A vector for each rollout and position, up to a position."""

    seed: int
    until: int = LENGTH

    def at(self, rows, position, hidden):
        if position >= self.until:
            return None
        return torch.cat([eighths(1, D, seed=self.seed + 100 * int(row) + position) for row in rows])


NUCLEUS, WHOLE, GREEDY = Sampler(0.5, 0.8), Sampler(0.5), Sampler(greedy=True)
REQUESTS = {  # name -> sampler, intervention, anchored, rollouts, the turn in which it comes in
    "vectors": (NUCLEUS, Vectors(eighths(LENGTH, D, seed=1), Tie(LENGTH)), True, 3, 0),
    "more vectors": (NUCLEUS, Vectors(eighths(LENGTH, D, seed=2), Tie(LENGTH)), False, 2, 2),
    "reference": (NUCLEUS, None, False, 2, 1),
    "rows": (NUCLEUS, OfEachRow(3), True, 4, 0),
    "rows up to a position": (NUCLEUS, OfEachRow(4, until=5), False, 3, 1),
    "shared": (NUCLEUS, Vectors(eighths(1, D, seed=5), TIES["shared"](LENGTH)), True, 2, 3),
    "whole law": (WHOLE, Vectors(eighths(4, D, seed=6), Tie(4)), False, 3, 0),  # fewer vectors than positions
    "rows, whole law": (WHOLE, OfEachRow(7), True, 2, 2),
    "greedy": (GREEDY, Vectors(eighths(LENGTH, D, seed=8), Tie(LENGTH)), True, 2, 1),
}


def decode(names):
    """Rollouts by name, of prompts that come in one after another, each with states of its own."""
    step = LawStep(Head(eighths(V, D, seed=9)))
    jobs, begin = {}, {}
    for name in names:
        sampler, intervention, anchored, rollouts, begin[name] = REQUESTS[name]
        number = list(REQUESTS).index(name)
        keep = Keep(scores=True)
        request = Request((number,), 1, 0, range(rollouts), LENGTH, sampler, intervention, keep=keep, anchored=anchored)
        jobs[name] = step.open(request)
    for turn in range(LENGTH + max(begin.values())):
        groups, hidden = [], []
        for name, job in jobs.items():
            position, rows = turn - begin[name], len(job.rollouts.tokens)
            if 0 <= position < LENGTH:
                groups.append(Group(job, torch.arange(rows), position))
                hidden.append(eighths(rows, D, seed=1000 * list(REQUESTS).index(name) + position))
        if groups:
            step.draw(groups, torch.cat(hidden))
    step.flush()
    return {name: job.rollouts for name, job in jobs.items()}


def test_prompts_together_have_the_records_of_each_alone():
    together = decode(REQUESTS)
    for name in REQUESTS:
        alone = decode([name])[name]
        for record in RECORDS:
            ours, theirs = getattr(together[name], record), getattr(alone, record)
            assert (ours is None) == (theirs is None)
            assert ours is None or torch.equal(ours, theirs), (name, record)
    assert together["vectors"].changed.any() and together["rows"].log_ratios.any()


def test_the_reference_draws_where_something_is_added_and_nowhere_else(monkeypatch):
    drawn, draw = [], Sampler.draw
    monkeypatch.setattr(
        Sampler, "draw", lambda self, probs, *rest: drawn.append(len(probs)) or draw(self, probs, *rest)
    )
    decode(["rows up to a position"])
    assert sum(drawn) == 3 * LENGTH + 3 * 5


@pytest.mark.parametrize("prompts", [1, 3])
def test_shifts_that_were_used_make_room_for_those_that_come(prompts):
    """Going on to positions whose shifts are not there yet takes no more memory than coming so far did."""
    wide, vectors = 20_000, Vectors(eighths(LENGTH, D, seed=1), Tie(LENGTH))
    head = Head(eighths(wide, D))

    def run(turns):
        step = LawStep(head)
        jobs = [step.open(Request((n,), 1, 0, range(4), LENGTH, Sampler(), vectors)) for n in range(prompts)]
        for position in range(turns):
            groups = [Group(job, torch.arange(4), position) for job in jobs]
            step.draw(groups, eighths(4 * prompts, D, seed=position))

    before = allocated_bytes(lambda: run(Shift.POSITIONS))
    beyond = allocated_bytes(lambda: run(Shift.POSITIONS + 1))
    assert beyond < before + prompts * wide * 4  # of 8 rows that are made, less than one


def test_rows_at_many_places_of_a_prompt_hold_no_more_shifts_than_rows_at_one():
    head = Head(eighths(V, D))
    shift = Shift(head, eighths(4 * Shift.POSITIONS, D, seed=1))
    for places in ([0], [0, 7], [1, 8], [5, 20, 30], range(0, 32, 4), range(3, 32)):
        Shift.make([(shift, place) for place in places])
        assert len(shift._made) <= max(Shift.POSITIONS, len(places))
        for place in places:
            assert torch.equal(shift[place], head.weight @ shift.free[place])


def test_vectors_may_stand_on_different_devices():
    """A saved steering stands on the CPU; the vectors of a run stand where the head does. `meta` stands for a GPU."""
    head = Head(torch.empty(V, D, device="meta"))
    saved, running = Shift(head, torch.zeros(5, D)), Shift(head, torch.zeros(5, D, device="meta"))
    Shift.make([(saved, 0), (running, 0)])
    assert saved[0].device.type == running[0].device.type == "meta"
