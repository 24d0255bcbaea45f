"""Prompts that come and go: each with its own reward and settings, none in the way of another."""

import gc
import pickle
import time
import weakref
from concurrent.futures import Future

import pytest
import torch
from conftest import letter_reward, make_policy
from fakes import FakePolicy
from literal import replay
from tolerances import assert_near, room

import misvo
from misvo.interventions import Climb, Noise, Vectors
from misvo.law_step import LawStep
from misvo.rollouts import Keep, Request
from misvo.sampling import Sampler
from misvo.scoring import Scorer, answer
from misvo.session import Session
from misvo.tie import shared
from misvo.value import ValueNetwork


def settings(**options):
    return misvo.Settings.from_preset("paper", **{"rollouts": 4, "steps": 3, "max_new_tokens": 9, **options})


def length(completions, **_):
    return [float(len(text)) for text in completions]


def vowels(completions, **_):
    return [sum(text.count(vowel) for vowel in "aeiou") + 0.01 * len(text) for text in completions]


def drive(session, until=None):
    """Steps until nothing is left, or until something holds; gives the events."""
    events = []
    while session.busy and not (until and until()):
        events += session.step()
    return events


def same(policy, one, other):
    """Equal but for the order of sums, which a batch decides: vectors of misvo are as near as rounding lets them be."""
    assert [c.tokens for c in one.candidates] == [c.tokens for c in other.candidates]
    assert [c.reward for c in one.candidates] == [c.reward for c in other.candidates]
    if one.settings.method == "misvo":
        allowed = room(lambda model: replay(model, policy.encode(one.prompt), one), policy.model, copies=1)
        assert allowed < 1e-4 * one.steering.norm
        assert_near(other.steering.vectors, one.steering.vectors, allowed)
    elif one.steering is not None:  # of aisp: noise and rewards, in which no batch has a part
        assert torch.equal(one.steering.vectors, other.steering.vectors)


CASES = [
    ("a b c", letter_reward, settings(learning_rate=0.3, temperature=0.8)),
    ("q w e r t y u i o p", length, settings(method="aisp", rollouts=6, max_new_tokens=5)),
    ("m n", vowels, settings(method="best-of-n", top_p=0.9, steps=4, seed=7)),
]


@pytest.mark.parametrize("background", [None, True, False])
def test_three_prompts_with_three_rewards_and_three_settings_end_as_they_do_alone(background):
    policy = make_policy("llama")
    with Session(policy, background=background) as session:
        handles = [session.add(*case) for case in CASES]
        drive(session)
    for handle, (prompt, reward, own) in zip(handles, CASES, strict=True):
        assert handle.state == "done"
        same(policy, handle.result, misvo.steer(policy, prompt, reward, settings=own))


def test_one_joins_one_leaves_and_one_fails_while_the_others_decode():
    policy = make_policy("llama")

    def broken(completions, **_):
        raise RuntimeError("not this one")

    with Session(policy) as session:
        first = session.add(*CASES[0])
        leaving = session.add("z x c v", letter_reward, settings(rollouts=5, max_new_tokens=30))
        failing = session.add("f g h", broken, settings(rollouts=3))
        drive(session, until=lambda: len(first.result.trace) == 1)
        joining = session.add(*CASES[1])
        drive(session, until=lambda: joining.state == "running")
        batch, rows = session.engine._batch, len(session.engine._batch)
        session.cancel(leaving)  # in the middle of a step
        assert all(group.job.request.prompt != leaving.run.tokens for group in batch.groups)
        assert len(batch) < rows and len(batch.hidden) == len(batch)
        drive(session)
    assert (leaving.state, failing.state, first.state, joining.state) == ("cancelled", "failed", "done", "done")
    assert "not this one" in str(failing.error) and failing.error.result is failing.result
    same(policy, first.result, misvo.steer(policy, CASES[0][0], CASES[0][1], settings=CASES[0][2]))
    same(policy, joining.result, misvo.steer(policy, CASES[1][0], CASES[1][1], settings=CASES[1][2]))


def test_whatever_goes_wrong_in_one_run_is_its_own(monkeypatch):
    """A reward that ends the process, a method that breaks: the others go on, and the first error is raised then."""

    def exits(text):
        raise SystemExit(3)

    policy = FakePolicy()
    with Session(policy) as session:
        good, bad, broken = (session.add(text, length, settings(steps=2)) for text in ("one", "two", "three"))
        bad.reward = misvo.rewards.as_reward(exits)
        monkeypatch.setattr(broken.run.method, "update", lambda *_: 1 / 0)
        drive(session)
    assert (good.state, bad.state, broken.state) == ("done", "failed", "failed")
    assert "SystemExit" in str(bad.error) and isinstance(broken.error, ZeroDivisionError)
    with pytest.raises(misvo.RewardError, match="SystemExit") as caught:
        misvo.steer_many(policy, ["one", "two"], exits, settings=settings(steps=1))
    assert caught.value.results == [None, None]


def test_what_is_cancelled_gives_its_memory_back(monkeypatch):
    opened, begin = [], LawStep.open

    def watched(step, request):
        job = begin(step, request)
        opened.append((request.prompt, weakref.ref(job.rollouts.score_rows)))
        return job

    monkeypatch.setattr(LawStep, "open", watched)
    policy = make_policy("llama")
    with Session(policy) as session:
        stays, leaves = (session.add(text, letter_reward, settings(max_new_tokens=20)) for text in ("a b", "c d e"))
        for _ in range(4):
            session.step()
        session.cancel(leaves)
        gc.collect()
        held = {prompt for prompt, rows in opened if rows() is not None}
        assert stays.run.tokens in held and leaves.run.tokens not in held
        assert set(session.engine._prefixes) == {stays.run.tokens}
        drive(session)


def test_events_tell_every_step_and_every_end_in_order():
    policy = FakePolicy()
    with Session(policy) as session:
        handles = [session.add(text, length, settings(steps=2, max_new_tokens=4)) for text in ("one", "two")]
        events = drive(session)
    for handle in handles:
        own = [event.row and event.row["step"] for event in events if event.handle is handle]
        assert own == [0, 1, None] and handle.ended
    assert set(policy.made.forgotten) == {handle.run.tokens for handle in handles}


class DoneOnceLookedAt(Future):
    """An answer that comes just after somebody looked whether it was there."""

    looks = 0

    def done(self):
        self.looks += 1
        return self.looks > 1


def test_an_answer_that_comes_while_the_session_looks_is_not_lost(monkeypatch):
    def submit(self, owner, question, decode, background):
        future = DoneOnceLookedAt()
        future.set_result(answer(question, decode))
        return future

    monkeypatch.setattr(Scorer, "submit", submit)
    with Session(FakePolicy()) as session:
        handle = session.add("one", length, settings(steps=2, max_new_tokens=4))
        for _ in range(50):
            session.step()
        assert handle.ended and handle.error is None


def test_a_prompt_waits_until_there_is_room_and_no_more_are_open_than_twice_what_decodes():
    policy = FakePolicy(rows=8)
    with Session(policy) as session:
        handles = [session.add(f"prompt {index}", length, settings(steps=1)) for index in range(9)]
        session.step()
        assert [handle.state for handle in handles].count("running") == 2  # four rows each
        most = 0
        while session.busy:
            session.step()
            most = max(most, [handle.state for handle in handles].count("running"))
    assert most <= 4 and all(handle.state == "done" for handle in handles)


def test_a_reward_is_never_called_twice_at_once_and_two_rewards_may_be():
    inside, overlaps = [], []

    def slow(name):
        def reward(completions, **_):
            assert name not in inside
            inside.append(name)
            overlaps.append(len(inside))
            time.sleep(0.02)
            inside.remove(name)
            return length(completions)

        return reward

    one, two = slow("one"), slow("two")
    with Session(FakePolicy(rows=100, turns=1), background=True) as session:
        for index in range(4):
            session.add(f"p{index}", one if index % 2 else two, settings(steps=3))
        drive(session)
    assert max(overlaps) == 2


def test_closing_a_session_cancels_what_is_left():
    policy = FakePolicy()
    session = Session(policy)
    running, waiting = (session.add(text, length, settings(rollouts=8)) for text in ("a", "b"))
    session.step()
    session.close()
    assert (running.state, waiting.state) == ("cancelled", "cancelled") and not session.busy
    assert policy.made.cancelled == [1] and not policy.made.flying


def test_requests_can_be_sent_to_another_process():
    """With any intervention, also in the middle of a step: a worker begins its rows at their beginning."""
    noise = Noise(torch.zeros(3, 4), shared(3), 1, (1, 2), 0, 0.5, 3)
    noise.at(torch.arange(2), 0, torch.zeros(2, 4))
    for intervention in (Vectors.by_position(torch.ones(3, 4)), noise, Climb(ValueNetwork(4), 2, 0.1)):
        request = Request((1, 2), 1, 0, range(2), 3, Sampler(0.7, 0.9), intervention, Keep(scores=True))
        copy = pickle.loads(pickle.dumps(request))
        rows, hidden = torch.arange(2), torch.ones(2, 4)
        assert torch.equal(copy.intervention.at(rows, 0, hidden), request.intervention.at(rows, 0, hidden))
        assert (copy.prompt, copy.sampler, copy.rollouts) == (request.prompt, request.sampler, request.rollouts)
