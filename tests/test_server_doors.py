"""Who may come in and with what: keys, hosts, origins, sizes, and bodies that nobody means well with."""

import json
import logging
import socket
import threading

import openai
import psutil
import pytest
from conftest import letter_reward, make_policy
from serving import served

from misvo.server import Config, Limits

ROUTES = (
    "/v1/models",
    "/misvo/v1/runs",
    "/misvo/v1/rewards",
    "/misvo/v1/status",
    "/metrics",
    "/docs",
    "/openapi.json",
    "/x",
)


@pytest.fixture(scope="module")
def server():
    config = Config(name="tiny", limits=Limits(body=20_000, body_seconds=0.5))
    with served(make_policy(chat=True), {"letters": letter_reward}, config) as running:
        yield running


@pytest.fixture(scope="module")
def closed():
    config = Config(name="tiny", keys=("sesame", "tahini"), hosts=("127.0.0.1",), log_requests=False)
    with served(make_policy(), {"letters": letter_reward}, config) as running:
        yield running


def raw(server, request: bytes, half_close=True) -> bytes:
    """What comes back for bytes of our own."""
    with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])), timeout=10) as connection:
        try:
            connection.sendall(request)
            if half_close:
                connection.shutdown(socket.SHUT_WR)
        except OSError:
            pass
        answer = b""
        try:
            while block := connection.recv(65536):
                answer += block
        except OSError:
            pass
        return answer


def test_a_key_guards_everything_but_health(closed):
    with closed.http() as http:
        for path in ROUTES:
            assert http.get(path).status_code == 401, path
        assert http.post("/v1/chat/completions", json={}).status_code == 401
        assert http.get("/health").status_code == 200
        for wrong in (
            "",
            "Bearer",
            "Bearer sesam",
            "Bearer sesame2",
            "Basic sesame",
            "sesame",
            "Bearer s\xe9same",
        ):
            headers = {"Authorization": wrong.encode("latin-1")}
            assert http.get("/v1/models", headers=headers).status_code == 401, wrong
        for right in ("Bearer sesame", "bearer tahini"):
            assert http.get("/v1/models", headers={"Authorization": right}).status_code == 200
    with pytest.raises(openai.AuthenticationError):
        closed.client().models.list()
    assert closed.client(api_key="sesame").models.list().data


@pytest.mark.parametrize(
    "request_line",
    [
        "GET /v1/models?x=/health", "GET //health/../v1/models", "GET /health/../v1/models", "GET /HEALTH",
        "GET /v1/models#/health", "GET http://x/health/../v1/models", "GET /health/", "GET /health;/v1/models",
        "GET /health%2f..%2fv1/models",
    ],
)  # fmt: skip
@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.1/health?", "127.0.0.1:80/health#", "a/health"])
def test_no_trick_with_paths_or_hosts_passes_the_key(closed, request_line, host):
    answer = raw(closed, f"{request_line} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
    assert answer.split(b" ", 2)[1] in (b"400", b"401", b"403"), answer
    assert b'"tiny"' not in answer


def test_hosts_and_origins(closed):
    key = {"Authorization": "Bearer sesame"}
    with closed.http() as http:
        assert http.get("/v1/models", headers={**key, "Host": "evil.test"}).status_code == 403  # DNS rebinding
        assert http.get("/health", headers={"Host": "evil.test"}).status_code == 403
        assert http.get("/v1/models", headers={**key, "Origin": "http://evil.test"}).status_code == 403
        assert http.get("/v1/models", headers={**key, "Origin": "null"}).status_code == 403
        assert http.get("/v1/models", headers={**key, "Origin": closed.url}).status_code == 200
        preflight = http.options(
            "/v1/models", headers={"Origin": "http://evil.test", "Access-Control-Request-Method": "GET"}
        )
        assert "access-control-allow-origin" not in preflight.headers
    with served(make_policy(), {}, Config(name="tiny", origins=("https://page.test",))) as other, other.http() as http:
        answer = http.get("/v1/models", headers={"Origin": "https://page.test"})
        assert answer.headers["access-control-allow-origin"] == "https://page.test"
        assert http.get("/v1/models", headers={"Origin": "https://else.test"}).status_code == 403


def test_one_keys_runs_are_not_anothers(closed):
    with closed.http() as http:
        mine, other = ({"Authorization": f"Bearer {key}"} for key in ("sesame", "tahini"))
        body = {"prompt": "a", "reward": "letters", "rollouts": 2, "steps": 1, "max_new_tokens": 3}
        run = http.post("/misvo/v1/runs", json=body, headers=mine).json()["id"]
        assert http.get(f"/misvo/v1/runs/{run}", headers=mine).status_code == 200
        for method, path in (("GET", ""), ("GET", "/events"), ("GET", "/result"), ("POST", "/cancel"), ("DELETE", "")):
            assert http.request(method, f"/misvo/v1/runs/{run}{path}", headers=other).status_code == 404
        assert run in http.get("/misvo/v1/runs", headers=mine).text
        assert run not in http.get("/misvo/v1/runs", headers=other).text
        assert http.get(f"/v1/responses/{run}", headers=mine).status_code == 404  # of another kind


def test_no_key_prompt_or_path_in_logs(closed, caplog):
    with caplog.at_level(logging.DEBUG), closed.http() as http:
        key = {"Authorization": "Bearer sesame"}
        body = {
            "model": "tiny",
            "prompt": "q q q q",
            "max_tokens": 3,
            "misvo": {"reward": "letters", "rollouts": 2, "steps": 1},
        }
        assert http.post("/v1/completions", json=body, headers=key).status_code == 200
        assert http.get("/misvo/v1/runs/run-secret", headers=key).status_code == 404
        assert http.get("/v1/models", headers={"Authorization": "Bearer wrong-key"}).status_code == 401
    shown = "\n".join(r.getMessage() for r in caplog.records if not r.name.startswith(("httpx", "httpcore", "asyncio")))
    assert not any(word in shown for word in ("sesame", "q q q", "run-secret", "wrong-key", "/v1/"))


def test_a_body_of_a_gigabyte_is_refused_unread(server):
    head = (
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    )
    before = psutil.Process().memory_info().rss
    answer = raw(server, head % 10**9 + b"x" * 100_000, half_close=False)
    assert answer.startswith(b"HTTP/1.1 413") and b"body_too_large" in answer
    assert raw(server, head % 10**30, half_close=False).split(b" ")[1] in (b"400", b"413")
    chunked = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    answer = raw(
        server, chunked + b"5000\r\n" + b"x" * 0x5000 + b"\r\n" + b"5000\r\n" + b"x" * 0x5000, half_close=False
    )
    assert answer.startswith(b"HTTP/1.1 413")
    assert psutil.Process().memory_info().rss - before < 32 * 2**20


def test_a_body_that_trickles_in_is_given_up(server):
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n"
    assert raw(server, head + b'{"model"', half_close=False).startswith(b"HTTP/1.1 408")


CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "a"}], "max_tokens": 2}


@pytest.mark.parametrize(
    "body",
    [
        b"", b"null", b"[]", b"5", b'"x"', b"{", b"\xff\xfe", b'{"a":' * 3000, b"[" * 9000,
        b'{"model":"tiny","model":"tiny"}',
        json.dumps(CHAT).replace("2}", "NaN}").encode(),
        json.dumps(CHAT).replace("2}", "1e308}").encode(),
        json.dumps(CHAT).replace("2}", "-1}").encode(),
        json.dumps(CHAT).replace("2}", "1" + "0" * 4000 + "}").encode(),
        json.dumps(CHAT).replace("2}", "1" + "0" * 9000 + "}").encode(),
        json.dumps(CHAT).replace("2}", '"2"}').encode(),
        json.dumps(CHAT).replace("2}", "true}").encode(),
        json.dumps({**CHAT, "n": 2**62}).encode(),
        json.dumps({**CHAT, "n": 10**6}).encode(),
        json.dumps({**CHAT, "seed": -1}).encode(),
        json.dumps({**CHAT, "seed": 2**70}).encode(),
        json.dumps({**CHAT, "temperature": 1e308}).encode(),
        json.dumps({**CHAT, "temperature": float("inf")}).encode(),
        json.dumps({**CHAT, "top_p": 0}).encode(),
        json.dumps({**CHAT, "stop": [""]}).encode(),
        json.dumps({**CHAT, "stop": ["x"] * 17}).encode(),
        json.dumps({**CHAT, "messages": [{"role": "user", "content": "a\x00b"}]}).encode(),
        json.dumps({**CHAT, "messages": [{"role": "user", "content": "\x1b[31m"}]}).encode(),
        json.dumps({**CHAT, "messages": [{"role": "user", "content": "\ud800"}]}).encode(),
        json.dumps({**CHAT, "stop": "\udfff"}).encode(),
        json.dumps({**CHAT, "user": "\ud800"}).encode(),
        json.dumps({**CHAT, "\ud800": 1}).encode(),
        json.dumps({**CHAT, "messages": [{"role": "user", "content": " "}]}).encode(),
        json.dumps({**CHAT, "messages": [{"role": "tool", "content": "a"}]}).encode(),
        json.dumps({**CHAT, "messages": [{"role": "user", "content": [{"type": "image_url", "url": "x"}]}]}).encode(),
        json.dumps({**CHAT, "messages": [{"role": "user", "content": "a " * 2000}]}).encode(),
        json.dumps({**CHAT, "misvo": {"reward": "letters", "rollouts": 2**31, "steps": 2**31}}).encode(),
        json.dumps({**CHAT, "misvo": {"reward": "letters", "learning_rate": 1e308}}).encode(),
        json.dumps({**CHAT, "misvo": {"reward": "letters", "columns": {"prompts": 1}}}).encode(),
        json.dumps({**CHAT, "misvo": {"reward": "letters", "explicit_fisher": True}}).encode(),
        json.dumps({**CHAT, "misvo": {"reward": "letters", "max_rows": 1}}).encode(),
        json.dumps({**CHAT, "misvo": {"reward": "letters", "memory": "1"}}).encode(),
        json.dumps({**CHAT, "misvo": {"reward": "letters", "chat_template_kwargs": {"chat_template": "x"}}}).encode(),
        json.dumps({**CHAT, "misvo": {"steering": "../../etc/passwd"}}).encode(),
        json.dumps({**CHAT, "misvo": {"steering": "x", "strength": 1e308}}).encode(),
        json.dumps({**CHAT, "misvo": []}).encode(),
        json.dumps({**CHAT, "logprobs": 5}).encode(),
    ],
)  # fmt: skip
def test_hostile_bodies_are_refused(server, body):
    with server.http() as http:
        answer = http.post("/v1/chat/completions", content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code in (400, 404), answer.text
    assert len(answer.text) < 2000 and answer.json()["error"]["message"]
    assert server.core.places.taken == 0


def test_other_content_types_are_refused(server):
    """A form or plain text could come from any page without a preflight."""
    with server.http() as http:
        for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"):
            answer = http.post("/v1/chat/completions", content=json.dumps(CHAT), headers={"Content-Type": kind})
            assert answer.status_code == 400, kind


def test_strange_letters_pass_as_text(server):
    texts = ["\u202eabc\u202c", "<script>alert(1)</script>", "e\u0301\u0301", "\U0001f600", "\u200b", "a" * 500]
    with server.http() as http:
        for text in texts:
            answer = http.post("/v1/chat/completions", json={**CHAT, "messages": [{"role": "user", "content": text}]})
            assert answer.status_code in (200, 400), answer.text
        unknown = http.post("/v1/chat/completions", json={**CHAT, "\u202e<b>": 1})
        assert unknown.status_code == 400 and unknown.headers["content-type"] == "application/json"


def test_what_is_too_strong_ends_alone(server):
    """A run whose vectors leave all bounds fails; its batch mates end as if it had not been there."""
    with server.http() as http:
        calm = {"prompt": "a b", "reward": "letters", "rollouts": 3, "steps": 6, "max_new_tokens": 8, "seed": 1}
        alone = http.post("/misvo/v1/runs", json=calm).json()["id"]
        server.idle()
        wild = {**calm, "preset": "paper", "learning_rate": 1e9, "penalty": 1e9, "steps": 12}
        others = [http.post("/misvo/v1/runs", json=body).json()["id"] for body in (calm, wild, wild, calm)]
        server.idle()
        states = [http.get(f"/misvo/v1/runs/{run}").json() for run in (alone, *others)]
        assert [states[i]["state"] for i in (0, 1, 4)] == ["completed"] * 3
        assert states[0]["answer"]["tokens"] == states[1]["answer"]["tokens"] == states[4]["answer"]["tokens"]
        assert server.core.engine.tally.restarts == 0


def test_an_error_of_the_engine_is_told_and_passes(server):
    """What no run can be blamed for ends those that run; the next request is answered as before."""
    engine = server.core.engine._session.engine
    with server.http() as http:
        good = http.post("/v1/chat/completions", json={**CHAT, "seed": 1}).json()["choices"]
        engine.advance = lambda: (_ for _ in ()).throw(RuntimeError("broken"))
        answer = http.post("/v1/chat/completions", json=CHAT)
        assert answer.status_code == 503 and answer.headers["x-should-retry"] == "true"
        assert http.post("/v1/chat/completions", json={**CHAT, "seed": 1}).json()["choices"] == good
        assert server.core.engine.tally.restarts == 1 and http.get("/health").status_code == 200


def test_health_is_503_when_the_engine_has_died():
    with served(make_policy(), {}, Config(name="tiny")) as server, server.http() as http:
        threading.excepthook, usual = lambda _: None, threading.excepthook
        try:
            server.core.engine._post(lambda: 1 / 0)
            server.wait_until(lambda: http.get("/health").status_code == 503)
        finally:
            threading.excepthook = usual
        assert http.post("/v1/completions", json={"model": "tiny", "prompt": "a"}).status_code == 503
        assert "misvo_engine_alive 0" in http.get("/metrics").text
        assert server.core.places.taken == 0


def test_the_documentation_needs_no_other_address(server):
    with server.http() as http:
        page, description = http.get("/docs"), http.get("/openapi.json").json()
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert not any(sign in page.text for sign in ("http://", "https://", "<script", "src="))
    for path in description["paths"]:
        assert path in page.text
