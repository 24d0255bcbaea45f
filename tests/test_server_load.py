"""Many clients, clients that leave, slow ones: nobody else's answer changes, and nothing is left behind."""

import asyncio
import json
import random
import socket
import threading
import time

import httpx2
import openai
import psutil
import pytest
from conftest import letter_reward, make_policy
from serving import served

import misvo
from misvo.server import Config, Limits, doors, sse

gate = threading.Event()


def waits(completions, **_):
    """A reward that answers when the gate is open."""
    gate.wait(20)
    return [float(len(completion)) for completion in completions]


REWARDS = {"letters": letter_reward, "waits": waits}
LONG = {"reward": "letters", "rollouts": 4, "steps": 200, "min_new_tokens": 40, "select": "best"}


def body(**options):
    return {"model": "tiny", "prompt": "a b c", "max_tokens": 40, "seed": 1, **options}


@pytest.fixture(scope="module")
def server():
    with served(make_policy(), REWARDS, Config(name="tiny", keep_alive=0.05, max_rows=64)) as running:
        yield running


def test_32_clients_at_once_get_what_they_get_alone(server):
    """Different rewards, lengths and prompts; all begin together."""
    policy = make_policy()
    cases = [
        {"prompt": " ".join("abcdefgh"[i % 5 : i % 5 + 2 + i % 3]), "max_tokens": 4 + i % 9, "seed": i,
         "reward": ["letters", "length:3", "contains:w2,w7", [{"name": "letters", "weight": 2.0}, "words:2-4"]][i % 4]}
        for i in range(32)
    ]  # fmt: skip
    local = [letter_reward, "length:3", "contains:w2,w7", "2*{} + words:2-4"]

    async def all_at_once():
        async with server.async_client() as client:
            return await asyncio.gather(
                *(
                    client.completions.create(
                        model="tiny",
                        prompt=case["prompt"],
                        max_tokens=case["max_tokens"],
                        seed=case["seed"],
                        extra_body={"misvo": {"reward": case["reward"], "rollouts": 3, "steps": 2}},
                    )
                    for case in cases
                )
            )

    answers = asyncio.run(all_at_once())
    for index, (case, answer) in enumerate(zip(cases, answers, strict=True)):
        reward = local[index % 4]
        if index % 4 == 3:
            reward = misvo.rewards.Combined({"letters": letter_reward, "words": "words:2-4"}, {"letters": 2.0})
        how = {"rollouts": 3, "steps": 2, "max_new_tokens": case["max_tokens"], "seed": case["seed"], "raw": True}
        result = misvo.steer(policy, case["prompt"], reward, **how)
        assert answer.choices[0].text == result.text
        assert answer.misvo["answers"][0]["reward"] == pytest.approx(result.reward, abs=1e-9)
    server.idle()


def test_200_clients_against_a_queue_of_16():
    config = Config(limits=Limits(queue=16), name="tiny")
    with served(make_policy(), REWARDS, config) as server:
        before = server.client().completions.create(**body(max_tokens=6)).choices[0].text
        memory = psutil.Process().memory_info().rss
        gate.clear()

        async def crowd():
            limits = httpx2.Limits(max_connections=None)
            async with httpx2.AsyncClient(base_url=server.url, timeout=60, trust_env=False, limits=limits) as http:
                sent = body(max_tokens=4, misvo={"reward": "waits", "rollouts": 2, "steps": 1})
                tasks = [asyncio.ensure_future(http.post("/v1/completions", json=sent)) for _ in range(200)]
                while sum(task.done() for task in tasks) < 184:
                    await asyncio.sleep(0.01)
                refused = [task.result() for task in tasks if task.done()]
                gate.set()
                return refused, [answer for answer in await asyncio.gather(*tasks) if answer not in refused]

        refused, answered = asyncio.run(crowd())
        assert {answer.status_code for answer in refused} == {503} and len(refused) == 184
        assert {answer.status_code for answer in answered} == {200} and len(answered) == 16
        for answer in refused:
            assert 1 <= int(answer.headers["retry-after"]) <= 60 and answer.headers["x-should-retry"] == "true"
            assert answer.json()["error"]["code"] == "full"
        server.idle()
        assert server.client().completions.create(**body(max_tokens=6)).choices[0].text == before
        grown = psutil.Process().memory_info().rss - memory
        print(f"200 clients against a queue of 16: {grown / 2**20:.1f} MiB more, the clients' own included")
        assert grown < 64 * 2**20


def test_a_client_that_is_refused_comes_again_by_itself():
    """The stock client reads the headers: with retries left, its answer comes once there is room."""
    with served(make_policy(), REWARDS, Config(limits=Limits(queue=1), name="tiny")) as server:
        gate.clear()
        with server.http() as http:
            run = http.post("/misvo/v1/runs", json={"prompt": "a", "reward": "waits", "rollouts": 2, "steps": 1}).json()
            with pytest.raises(openai.InternalServerError):
                server.client(max_retries=0).completions.create(**body())
            threading.Timer(0.3, gate.set).start()
            assert server.client(max_retries=3).completions.create(**body()).choices[0].text
            assert http.get(f"/misvo/v1/runs/{run['id']}").json()["state"] == "completed"


def test_places_are_weighed_by_tokens():
    """K·N·T of all together, and of one; taken before any work, and given back."""
    limits = Limits(queue=100, load=1000, request=800)
    with served(make_policy(), REWARDS, Config(limits=limits, name="tiny")) as server, server.http() as http:
        gate.clear()
        big = {"prompt": "a", "reward": "waits", "rollouts": 10, "steps": 7, "max_new_tokens": 10}
        assert http.post("/misvo/v1/runs", json=big).status_code == 202
        assert server.core.places.tokens == 700
        assert http.post("/misvo/v1/runs", json=big).status_code == 503
        # A sample is told at once, although a reward is being waited for.
        assert http.post("/v1/completions", json=body(max_tokens=30, n=10), timeout=10).status_code == 200
        too_much = http.post("/misvo/v1/runs", json={**big, "steps": 9})
        assert too_much.status_code == 400 and "900 tokens" in too_much.json()["error"]["message"]
        many = http.post("/v1/completions", json=body(prompt=["a"] * 9, max_tokens=100))
        assert many.status_code == 400 and "900 tokens" in many.json()["error"]["message"]
        huge = http.post("/v1/completions", json=body(n=2**31))
        assert huge.status_code == 400 and huge.json()["error"]["code"] == "request_too_large"
        gate.set()
        server.idle()


def test_a_client_that_leaves_frees_its_rows(server):
    """In mid-stream, before the first byte and while queued: its rows leave, the others' stay."""
    policy = make_policy()
    stays = {"prompt": "d e f", "reward": "letters", "rollouts": 4, "steps": 12, "max_new_tokens": 20, "seed": 2}
    with server.http() as http:
        other = http.post("/misvo/v1/runs", json={**stays, "raw": True}).json()["id"]
        with http.stream("POST", "/v1/completions", json=body(stream=True, misvo=LONG)) as stream:
            for line in stream.iter_lines():
                if '"step":2' in line:
                    break
            assert server.core.places.taken == 2
        server.wait_until(lambda: server.core.places.taken <= 1)
        server.wait_until(lambda: server.core.engine.tally.rows <= 4)
        with pytest.raises(httpx2.ReadTimeout):
            http.post("/v1/completions", json=body(misvo=LONG), timeout=0.3)
        server.wait_until(lambda: server.core.places.taken <= 1)
        server.wait_until(lambda: http.get(f"/misvo/v1/runs/{other}").json()["state"] == "completed", 60)
        told = http.get(f"/misvo/v1/runs/{other}/result").json()["candidates"]
    alone = misvo.steer(
        policy, "d e f", letter_reward, rollouts=4, steps=12, max_new_tokens=20, seed=2, raw=True
    ).candidates
    assert [row["tokens"] for row in told] == [candidate.tokens for candidate in alone]
    server.idle()


def test_leaving_takes_one_decoding_step(server):
    """Cancelled from the loop, the engine's thread draws at most one more token for each row."""
    with server.http() as http:
        run = http.post("/misvo/v1/runs", json={"prompt": "a", "max_new_tokens": 100, **LONG}).json()["id"]
        server.wait_until(lambda: server.core.engine.tally.rows == 4)
        job = server.core.store.get(run, "", "run")
        seen = []
        cancel = server.core.engine._cancel
        server.core.engine._cancel = lambda job: (seen.append(server.core.engine.tally.tokens), cancel(job))
        try:
            drawn = server.core.engine.tally.tokens
            server.core.cancel(job)
            server.wait_until(lambda: job.over)
        finally:
            server.core.engine._cancel = cancel
        assert seen[0] - drawn <= 2 * 4  # the step under way, and one that may have begun before the inbox was read
        assert server.core.engine.tally.rows == 0
        assert server.core.engine.tally.tokens == seen[0]
    server.idle()


def test_50_clients_that_leave_at_random_leave_nothing_behind(server):
    def once(chance):
        patience = chance.random() * 0.5 + 0.01
        sent = body(stream=chance.random() < 0.5, max_tokens=30, seed=chance.randrange(99))
        sent["misvo"] = {**LONG, "min_new_tokens": 20, "reward": chance.choice(["letters", "length:3", "contains:w2"])}
        with socket.create_connection(("127.0.0.1", port)) as raw:
            content = json.dumps(sent)
            head = f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: {len(content)}\r\n"
            raw.sendall(f"{head}Content-Type: application/json\r\n\r\n{content}".encode())
            time.sleep(patience)  # and leaves, whatever has come by then

    def crowd(seed):
        threads = [threading.Thread(target=once, args=(random.Random(seed + i),)) for i in range(50)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        server.idle()

    port, process = int(server.url.rpartition(":")[2]), psutil.Process()
    crowd(0)
    server.wait_until(lambda: not [t for t in threading.enumerate() if t.name.startswith("misvo-reward")])
    names, memory = sorted(thread.name for thread in threading.enumerate()), process.memory_info().rss
    crowd(1000)
    server.wait_until(lambda: not [t for t in threading.enumerate() if t.name.startswith("misvo-reward")])
    assert len(threading.enumerate()) <= len(names) + 2, "threads were left behind"  # those of asyncio's own pool
    grown = process.memory_info().rss - memory
    print(f"50 clients that left: {grown / 2**20:.1f} MiB more")
    assert grown < 32 * 2**20
    engine = server.core.engine
    assert not engine._jobs and not engine._handles and not server.core._jobs
    assert not engine._session._scoring and not engine._session._scorer._queues
    assert not engine._session.engine._prefixes


def test_a_reader_who_does_not_read_is_left():
    """A stream whose client takes nothing for longer than the limit ends, and says that it was left."""

    async def never(message):
        if message["type"] == "http.response.body":
            await asyncio.Event().wait()

    async def silent():
        await asyncio.Event().wait()

    async def lines():
        yield "data: 1\n\n"

    left = []
    stream = sse.EventStream(lines(), keep_alive=1, send_seconds=0.05, at_end=left.append)
    asyncio.run(asyncio.wait_for(stream({"type": "http"}, silent, never), 5))
    assert left == [True]


def test_comments_keep_a_silent_stream_alive(server):
    """While a reward thinks there is nothing to tell; the stock client does not mind the comments."""
    sent = body(stream=True, max_tokens=4, misvo={"reward": "waits", "rollouts": 2, "steps": 1})
    gate.clear()
    with server.http() as http, http.stream("POST", "/v1/completions", json=sent) as stream:
        lines = stream.iter_lines()
        assert next(line for line in lines if line.startswith(":")) == ": keep-alive"
        gate.set()
        assert list(lines)[-2:] == ["data: [DONE]", ""]
    gate.clear()
    threading.Timer(0.3, gate.set).start()
    steer = {"misvo": sent.pop("misvo")}
    chunks = list(server.client().completions.create(**sent, extra_body=steer))
    assert chunks[-1].choices[0].finish_reason
    server.idle()


def test_the_extra_time_of_a_client(server):
    """Over the engine's own time, for answers that take a few tokens: the median of 20."""
    client, policy = server.client(), make_policy()
    policy.generate("a b c", max_new_tokens=4)
    over, own = [], []
    for seed in range(20):
        started = time.perf_counter()
        client.completions.create(**body(max_tokens=4, seed=seed))
        over.append(time.perf_counter() - started)
        started = time.perf_counter()
        policy.generate("a b c", seed=seed, max_new_tokens=4, raw=True)
        own.append(time.perf_counter() - started)
    extra = sorted(over)[10] - sorted(own)[10]
    print(f"a client's extra time: {1000 * extra:.1f} ms over {1000 * sorted(own)[10]:.1f} ms")
    assert extra < 0.2  # ten times what it is on a machine that has nothing else to do


@pytest.mark.parametrize("keys", [(), ("sesame", "tahini")])
def test_one_client_may_hold_so_many_places(keys):
    """By key, or by address where there are no keys; the others' places are theirs, and what was held comes back."""
    limits = Limits(queue=8, client_queue=2, client_load=1000, load=10_000)
    with served(make_policy(), REWARDS, Config(limits=limits, name="tiny", keys=keys)) as server, server.http() as http:
        gate.clear()
        run = {"prompt": "a", "reward": "waits", "rollouts": 2, "steps": 1, "max_new_tokens": 10}

        def start(key="sesame", **more):
            return http.post("/misvo/v1/runs", json={**run, **more}, headers={"Authorization": f"Bearer {key}"})

        assert [start().status_code for _ in range(2)] == [202, 202]
        refused = start()
        assert refused.status_code == 429 and refused.json()["error"]["code"] == "client_full"
        assert refused.json()["error"]["type"] == "rate_limit_error"
        assert refused.headers["x-should-retry"] == "true" and 1 <= int(refused.headers["retry-after"]) <= 60
        client = server.client(api_key="sesame")
        with pytest.raises(openai.RateLimitError):
            client.completions.create(**body(max_tokens=4))
        if keys:  # another key has places of its own
            assert [start("tahini").status_code for _ in range(3)] == [202, 202, 429]
        gate.set()
        server.idle()
        assert not server.core.places._clients
        gate.clear()
        assert [start(steps=45).status_code for _ in range(2)] == [202, 429]  # 900 tokens each
        threading.Timer(0.3, gate.set).start()
        assert server.client(api_key="sesame", max_retries=40).completions.create(**body(max_tokens=40, n=10))
        server.idle()


def test_an_address_of_ipv6_is_its_network():
    def client(host):
        return doors._address({"client": (host, 1)})

    assert client("2001:db8::1") == client("2001:db8::ffff:1") != client("2001:db8:0:1::1")
    assert client("10.0.0.1") != client("10.0.0.2") and client("") == ""
