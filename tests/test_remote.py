"""Remote rewards against real servers on loopback: what is sent, what is tried again, what ends a run, and when."""

import json
import re
import socket
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from conftest import make_policy

import misvo
from misvo import rewards
from misvo.rewards import Remote

SCORER = Path(__file__).parent.parent / "examples" / "scorer.py"


class Server(ThreadingHTTPServer):
    """Answers each request with `answer(body, number)`: (status, headers, bytes), or a list of rewards."""

    def __init__(self, answer):
        self.answer, self.bodies, self.headers, self.times = answer, [], [], []
        self.lock, self.now, self.most = threading.Lock(), 0, 0
        super().__init__(("127.0.0.1", 0), Handler)

    def __enter__(self):
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *_):
        self.shutdown()
        self.server_close()

    daemon_threads = True
    block_on_close = False

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_port}/score"


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        server = self.server
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with server.lock:
            server.bodies.append(body)
            server.headers.append(self.headers)
            server.times.append(time.monotonic())
            server.now += 1
            server.most, number = max(server.most, server.now), len(server.bodies)
        try:
            answer = server.answer(body, number)
        finally:
            with server.lock:
                server.now -= 1
        if isinstance(answer, list):
            answer = (200, {}, json.dumps({"rewards": answer}).encode())
        status, headers, content = answer
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(content))} | headers).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_):
        pass


def lengths(body, _=None):
    return [float(len(c)) for c in body["completions"]]


def call(reward, texts, prompt="p", **columns):
    return rewards.score(rewards.as_reward(reward), prompt, texts, [[1]] * len(texts), columns)


def refusal(reward, texts=("a",)):
    with pytest.raises(misvo.RewardError) as caught:
        call(reward, list(texts), "the prompt")
    assert "'the prompt'" in str(caught.value) and "\n" not in str(caught.value)
    return str(caught.value)


def test_what_is_sent_and_what_comes_back():
    with Server(lambda body, _: [1.5, None, 2]) as server:
        got = call(Remote(server.url, headers={"Authorization": "Bearer x"}), ["a", "b", "ü"], answer={"k": [1]})
    assert got == [1.5, None, 2.0]
    assert server.bodies == [{"prompts": ["p"] * 3, "completions": ["a", "b", "ü"], "answer": [{"k": [1]}] * 3}]
    assert server.headers[0]["Content-Type"] == "application/json" and server.headers[0]["Authorization"] == "Bearer x"


def test_chats_are_sent_as_messages():
    prompt = [{"role": "user", "content": "p"}]
    with Server(lambda body, _: [0.0]) as server:
        call(Remote(server.url), ["a"], prompt)
    assert server.bodies[0]["prompts"] == [prompt]
    assert server.bodies[0]["completions"] == [[{"role": "assistant", "content": "a"}]]


def test_chunks_keep_their_order_and_a_bound_on_how_many_are_under_way():
    def slower_first(body, _):
        time.sleep(0.02 if "x" in body["completions"] else 0.05)
        return lengths(body)

    texts = ["x" * (i % 5) + "y" * i for i in range(11)]
    with Server(slower_first) as server:
        got = call(Remote(server.url, batch_size=2, concurrency=3), texts, column="c")
        assert got == [float(len(text)) for text in texts]
        assert sorted(len(body["completions"]) for body in server.bodies) == [1, 2, 2, 2, 2, 2]
        assert all(len(body["column"]) == len(body["completions"]) for body in server.bodies)
        assert 2 <= server.most <= 3
        server.most = 0
        call(Remote(server.url, batch_size=2, concurrency=1), texts)
        assert server.most == 1


def test_what_may_pass_is_tried_again_with_doubling_waits():
    def third_time(body, number):
        return (503, {}, b"busy") if number < 4 else lengths(body)

    with Server(third_time) as server:
        assert call(Remote(server.url, backoff=0.1), ["abc"]) == [3.0]
    gaps = [b - a for a, b in zip(server.times, server.times[1:], strict=False)]
    for gap, wait in zip(gaps, (0.1, 0.2, 0.4), strict=True):
        assert wait <= gap < wait + 5  # a busy machine may add to it


def test_a_server_may_ask_for_patience():
    def wait_a_second(body, number):
        return (429, {"Retry-After": "1"}, b"") if number == 1 else lengths(body)

    with Server(wait_a_second) as server:
        assert call(Remote(server.url, backoff=0.01), ["abc"]) == [3.0]
    assert server.times[1] - server.times[0] >= 1.0


def test_a_cut_connection_is_tried_again():
    def cut_short(body, number):
        whole = json.dumps({"rewards": lengths(body)}).encode()
        return (200, {"Content-Length": "999"}, whole) if number == 1 else lengths(body)

    with Server(cut_short) as server:
        assert call(Remote(server.url, backoff=0.01), ["abc"]) == [3.0]
        assert len(server.bodies) == 2


def test_a_slow_server_times_out():
    with Server(lambda body, _: time.sleep(8) or lengths(body)) as server:
        started = time.monotonic()
        says = refusal(Remote(server.url, timeout=0.2, attempts=2, backoff=0.05))
        assert time.monotonic() - started < 5
    assert "failed 2 times in" in says and "TimeoutError" in says


def test_a_server_that_trickles_times_out():
    class Trickle(Handler):
        def do_POST(self):
            self.send_response(200)
            self.end_headers()
            try:
                for _ in range(200):
                    self.wfile.write(b" ")
                    self.wfile.flush()
                    time.sleep(0.05)
            except OSError:
                pass

    with Server(lengths) as server:
        server.RequestHandlerClass = Trickle
        started = time.monotonic()
        says = refusal(Remote(server.url, timeout=0.3, attempts=1))
        assert time.monotonic() - started < 5
    assert "failed once in" in says and "trickled" in says


def test_a_server_that_is_down():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound and not listening: connections are refused
        url = f"http://127.0.0.1:{taken.getsockname()[1]}/"
        says = refusal(Remote(url, attempts=3, backoff=0.01))
    assert says.startswith(f"the scorer at {url} failed 3 times in ") and "ConnectionRefusedError" in says


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        ((200, {}, b"<html>"), "answered with something that is not JSON: '<html>'"),
        ((200, {}, b"\xff\xfe\x00"), "not JSON"),
        ((200, {}, b""), "not JSON"),
        ((200, {}, b"[1.0]"), "must answer {\"rewards\": [...]}, not '[1.0]'"),
        ((200, {}, b'{"scores": [1.0]}'), 'must answer {"rewards": [...]}'),
        ((200, {}, b'{"rewards": [1.0, 2.0]}'), "gave 2 rewards for 1 completions"),
        ((200, {}, b'{"rewards": ["high"]}'), "'high', which is not a number"),
        ((200, {}, b'{"rewards": [NaN]}'), "the reward gave nan"),
        ((404, {}, b"no such page"), "refused the request with HTTP 404 Not Found: 'no such page'"),
        ((400, {}, b'{"error": "bad"}'), "HTTP 400"),
        ((302, {"Location": "/other"}, b""), "is elsewhere (HTTP 302): use '/other'"),
        ((308, {"Location": "/other"}, b""), "is elsewhere (HTTP 308): use '/other'"),
    ],
)
def test_what_will_not_pass_ends_the_run_at_once(answer, says):
    with Server(lambda body, _: answer) as server:
        assert says in refusal(Remote(server.url))
        assert len(server.bodies) == 1


def test_one_failing_chunk_stops_the_others():
    """The first refusal is the error, and chunks that wait between attempts give up."""

    def some(body, _):
        return (400, {}, b"") if "bad" in body["completions"] else (503, {}, b"")

    with Server(some) as server:
        started = time.monotonic()
        says = refusal(Remote(server.url, batch_size=1, concurrency=2, backoff=20.0), ["a", "bad", "c", "d"])
        assert time.monotonic() - started < 10 and "HTTP 400" in says
        time.sleep(0.1)
        assert len(server.bodies) == 2


def test_proxies_of_the_environment_do_not_stand_before_loopback(monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with Server(lengths) as server:
        assert call(Remote(server.url, attempts=1), ["ab"]) == [2.0]
        assert call(Remote(server.url.replace("127.0.0.1", "localhost"), attempts=1), ["ab"]) == [2.0]
        with socket.create_server(("127.0.0.1", 0)) as proxy:  # elsewhere, the proxy is asked
            monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{proxy.getsockname()[1]}")
            remote = Remote("http://scorer.invalid/", attempts=1, timeout=0.2)
            assert "TimeoutError" in refusal(remote)
            proxy.settimeout(2)
            assert proxy.accept()[0].recv(100).startswith(b"POST http://scorer.invalid/")


@pytest.mark.parametrize(
    ("spec", "url"),
    [
        ("http://h:1/p", "http://h:1/p"),
        ("https://h/p?q=1", "https://h/p?q=1"),
        ("http:h:1/p", "http://h:1/p"),
        ("http:http://h/p", "http://h/p"),
        ("http:https://h/p", "https://h/p"),
        ("http:localhost:8000", "http://localhost:8000"),
    ],
)
def test_specs(spec, url):
    assert rewards.load(spec).url == url
    reward = rewards.load(f"{spec}#timeout=2.5&attempts=3&backoff=0&batch_size=8&concurrency=2")
    assert (reward.url, reward.timeout, reward.attempts, reward.backoff) == (url, 2.5, 3, 0.0)
    assert (reward.batch_size, reward.concurrency) == (8, 2)


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("http:", "is written as http://HOST:PORT/PATH, not 'http:"),
        ("http://h:port/", "is written as http://HOST:PORT/PATH"),
        ("http://a b/", "is written as http://HOST:PORT/PATH"),
        ("http://me:secret@h/", "takes no user or password"),
        ("http://h/#patience=3", "patience='3' is no option of a remote reward: give timeout, attempts"),
        ("http://h/#attempts=many", "attempts='many' is no option"),
        ("http://h/#attempts=0", "the option attempts of a remote reward must be at least 1, not 0"),
        ("http://h/#timeout=nan", "the option timeout of a remote reward must be at least"),
    ],
)
def test_bad_addresses(spec, says):
    with pytest.raises(misvo.MisvoError, match=re.escape(says)) as caught:
        rewards.load(spec)
    assert "secret" not in str(caught.value)


def test_a_secret_in_the_query_is_not_repeated():
    with Server(lambda body, _: (500, {}, b"")) as server:
        assert "hush" not in refusal(Remote(f"{server.url}?key=hush", attempts=2, backoff=0))


def test_what_is_not_json_is_said():
    with Server(lengths) as server, pytest.raises(misvo.RewardError, match="the column 'thing' cannot be sent"):
        call(Remote(server.url), ["a"], thing=object())


def test_a_scorer_that_goes_down_leaves_what_was_done():
    def dies_after_two_steps(body, number):
        return lengths(body) if number <= 2 else (500, {}, b"")

    with Server(dies_after_two_steps) as server, pytest.raises(misvo.RewardError) as caught:
        remote = Remote(server.url, attempts=2, backoff=0.01)
        misvo.steer(make_policy(), "a b", remote, rollouts=3, steps=4, max_new_tokens=5, preset="paper")
    assert "failed 2 times" in str(caught.value) and "HTTP 500" in str(caught.value)
    result = caught.value.result
    assert len(result.trace) == 2 and len(result.candidates) == 6
    assert [c.reward for c in result.candidates] == [float(len(c.text)) for c in result.candidates]


def test_the_reference_scorer():
    command = [sys.executable, "-I", "-S", str(SCORER), "--port", "0"]  # -S: the standard library and nothing else
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as scorer:
        try:
            url = re.fullmatch(r"listening on (\S+)\n", scorer.stdout.readline())[1]
            assert call(url, ["How are you?", "Fine. Thanks.", ""], column=1) == pytest.approx([0.85, -0.05, None])
            assert call(url, ["Why?"], [{"role": "user", "content": "p"}]) == pytest.approx([0.95])
            assert "HTTP 400" in refusal(lambda prompts, completions: Remote(url)(prompts[:0], completions))
        finally:
            scorer.terminate()
