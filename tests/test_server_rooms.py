"""How many rows decode at once: as many as `steer_many` has for the same prompts, and anew when prompts come and go."""

import threading
import time
import warnings
from types import SimpleNamespace

import httpx2
import pytest
from conftest import letter_reward, make_policy
from serving import served

from misvo import Settings, footprint
from misvo.server import Config
from misvo.server.rooms import Rooms

MEMORY = 3_000_000  # bytes: a few rows of the tiny model
gate = threading.Event()


def waits(completions, **_):
    gate.wait(20)
    return [float(len(completion)) for completion in completions]


def run(length, **options):
    settings = Settings.from_preset(rollouts=4, steps=2, **{"max_new_tokens": 8, **options})
    return SimpleNamespace(tokens=tuple(range(length)), settings=settings)


@pytest.fixture
def rooms():
    rooms = Rooms(make_policy(), None)
    rooms.memory = MEMORY
    return rooms


def fits(policy, runs):
    """As a session reckons for what was added before its first step."""
    longest = max(len(one.tokens) for one in runs)
    shape = footprint.Shape.of(policy)
    return min(footprint.rows_that_fit(shape, one.settings, longest, len(runs), MEMORY) for one in runs)


def test_rows_are_those_of_the_prompts_that_are_there(rooms):
    short, long = [run(5, seed=seed) for seed in range(6)], run(100)
    for runs in (short, [long], [*short, long], [run(5), run(5, method="best-of-n"), run(5, max_new_tokens=60)]):
        assert rooms.rows(runs) == fits(make_policy(), runs)
    assert 1 < rooms.rows([*short, long]) < rooms.rows(short) <= rooms.most
    assert rooms.rows([]) == rooms.most


def test_a_search_by_halves_finds_what_a_walk_finds():
    shape = footprint.Shape.of(make_policy())
    for memory in (1, 10**5, 10**6, 3 * 10**6, 10**7, 10**9):
        for settings in (run(1).settings, run(1, method="best-of-n").settings, run(1, preset="paper").settings):
            found = footprint.rows_that_fit(shape, settings, 20, 5, memory)

            def needed(rows, settings=settings):
                open_at_once = min(5, footprint.most_open(rows, settings.rollouts))
                return sum(footprint.run_bytes(shape, settings, 20, open_at_once, rows).values())

            walked = (rows for rows in range(footprint.MOST_ROWS, 1, -1) if needed(rows) <= memory)
            assert found == next(walked, 1)


def test_the_operators_limit_and_memory_that_ran_out(rooms):
    assert Rooms(make_policy(), 7).rows([run(5)]) == 7
    rooms.ran_out(3)
    assert rooms.rows([run(5)]) == 3


def test_a_long_prompt_takes_rows_and_gives_them_back():
    """In a real server: while it is open, the engine has fewer rows; behind it as many as before."""
    with served(make_policy(), {"waits": waits}, Config(name="tiny")) as server, server.http() as http:
        server.core.engine.rooms.memory = MEMORY
        engine = server.core.engine._session.engine
        gate.clear()
        short = {"prompt": "a", "reward": "waits", "rollouts": 2, "steps": 1, "max_new_tokens": 4, "raw": True}
        assert http.post("/misvo/v1/runs", json=short).status_code == 202
        before = engine.max_rows
        long = http.post("/misvo/v1/runs", json={**short, "prompt": "a " * 100}).json()["id"]
        assert engine.max_rows < before
        http.post(f"/misvo/v1/runs/{long}/cancel")
        assert engine.max_rows == before
        gate.set()
        server.idle()


def test_rows_that_memory_had_no_room_for_stay_away():
    """The engine halves its rows where memory runs out; what is reckoned later does not undo that."""
    with served(make_policy(), {"letters": letter_reward}, Config(name="tiny")) as server, server.http() as http:
        engine = server.core.engine._session.engine
        sample = {"model": "tiny", "prompt": "a b", "max_tokens": 4, "n": 8, "misvo": {"min_new_tokens": 4}}
        expected = http.post("/v1/completions", json={**sample, "seed": 1}).json()["choices"]
        step, failures = engine._batch.model.body_step, iter([True])

        def once(*given):
            if next(failures, False):
                raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes")
            return step(*given)

        engine.model.body_step = once
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                told = http.post("/v1/completions", json={**sample, "seed": 1}).json()["choices"]
        finally:
            del engine.model.body_step
        assert told == expected and engine.max_rows == 4
        http.post("/v1/completions", json=sample)
        assert engine.max_rows == 4


def test_who_leaves_while_waiting_for_rows_is_forgotten():
    """All rows are another's: the one that waits goes, and the other goes on."""
    config = Config(name="tiny", max_rows=4)
    with served(make_policy(), {"letters": letter_reward}, config) as server, server.http() as http:
        session = server.core.engine._session
        step = session.engine.model.body_step

        def slow(*given):  # a step of two seconds: between two of them rows would be free for a moment
            time.sleep(0.02)
            return step(*given)

        session.engine.model.body_step = slow
        busy = {"prompt": "a", "reward": "letters", "rollouts": 4, "steps": 4, "max_new_tokens": 100}
        other = http.post("/misvo/v1/runs", json={**busy, "min_new_tokens": 100}).json()["id"]
        with pytest.raises(httpx2.ReadTimeout):
            http.post("/v1/completions", json={"model": "tiny", "prompt": "b", "max_tokens": 40, "n": 4}, timeout=0.5)
        server.wait_until(lambda: server.core.places.taken == 1 and not session._waiting)
        assert http.get(f"/misvo/v1/runs/{other}").json()["state"] == "in_progress"
        http.delete(f"/misvo/v1/runs/{other}")
        del session.engine.model.body_step
        server.idle()
