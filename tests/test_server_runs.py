"""/v1/responses in the background, and /misvo/v1: runs, events, candidates, steerings, samples at several strengths."""

import json
import threading

import openai
import pytest
import safetensors.torch
import torch
from conftest import letter_reward, make_policy
from serving import served

import misvo
from misvo.alternatives import alternatives
from misvo.sampling import sampler_of
from misvo.server import Config, Limits

gate = threading.Event()


def waits(completions, **_):
    gate.wait(20)
    return letter_reward([c if isinstance(c, str) else c[0]["content"] for c in completions])


RUN = {"prompt": "a b c", "reward": "letters", "rollouts": 4, "steps": 3, "max_new_tokens": 8, "seed": 5, "raw": True}
STEER = {"reward": "waits", "rollouts": 3, "steps": 2, "seed": 1}


@pytest.fixture(scope="module")
def server():
    with served(
        make_policy(chat=True), {"letters": letter_reward, "waits": waits}, Config(name="tiny", default_tokens=8)
    ) as it:
        yield it


@pytest.fixture(scope="module")
def http(server):
    with server.http() as client:
        yield client


@pytest.fixture(scope="module")
def finished(server, http):
    """The id of a run that is done."""
    run = http.post("/misvo/v1/runs", json=RUN).json()["id"]
    server.wait_until(lambda: http.get(f"/misvo/v1/runs/{run}").json()["state"] == "completed")
    return run


@pytest.fixture(scope="module")
def alone():
    policy = make_policy(chat=True)
    return misvo.steer(policy, "a b c", letter_reward, rollouts=4, steps=3, max_new_tokens=8, seed=5, raw=True)


def events_of(text):
    blocks = [block for block in text.strip().split("\n\n") if not block.startswith(":")]
    return [json.loads(block.partition("data: ")[2]) for block in blocks if "[DONE]" not in block]


def test_background_responses(server):
    client = server.client()
    gate.clear()
    response = client.responses.create(model="tiny", input="a b", background=True, extra_body={"misvo": STEER})
    assert response.status in ("queued", "in_progress") and response.output_text == ""
    server.wait_until(lambda: client.responses.retrieve(response.id).status == "in_progress")
    gate.set()
    server.wait_until(lambda: client.responses.retrieve(response.id).status == "completed")
    done = client.responses.retrieve(response.id)
    policy = make_policy(chat=True)
    prompt = [{"role": "user", "content": "a b"}]
    result = misvo.steer(policy, prompt, waits, rollouts=3, steps=2, max_new_tokens=8, seed=1)
    assert done.output_text == result.text
    assert done.usage.output_tokens == sum(len(candidate.tokens) for candidate in result.candidates)
    every = [event.to_dict() for event in client.responses.retrieve(response.id, stream=True)]
    assert [event["sequence_number"] for event in every] == list(range(len(every)))
    kinds = [event["type"] for event in every]
    assert (
        kinds[:3] == ["response.created", "response.queued", "response.in_progress"]
        and kinds.count("response.misvo.progress") == 2
    )
    assert kinds[-1] == "response.completed" and "response.output_text.delta" in kinds
    for after in (0, 3, len(every) - 2):
        rest = [event.to_dict() for event in client.responses.retrieve(response.id, stream=True, starting_after=after)]
        assert rest == every[after + 1 :]


def test_a_response_is_cancelled_and_one_that_fails_says_so(server):
    client = server.client()
    gate.clear()
    response = client.responses.create(model="tiny", input="a b", background=True, extra_body={"misvo": STEER})
    assert client.responses.cancel(response.id).status == "cancelled"
    gate.set()
    assert client.responses.retrieve(response.id).status == "cancelled"
    assert [e.type for e in client.responses.retrieve(response.id, stream=True)][-1] == "response.cancelled"
    bad = {**STEER, "reward": {"json": True}, "columns": {}, "on_reward_error": "raise"}
    assert client.responses.create(model="tiny", input="a b", extra_body={"misvo": bad}).status == "completed"
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve("resp-nothing")
    server.idle()


def test_responses_as_a_stream_and_at_once(server):
    client = server.client()
    gate.set()
    events = list(client.responses.create(model="tiny", input="a b", stream=True, extra_body={"misvo": STEER}))
    whole = client.responses.create(model="tiny", input="a b", instructions=None, extra_body={"misvo": STEER})
    assert events[-1].response.output_text == whole.output_text
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == whole.output_text
    parts = [{"role": "user", "content": [{"type": "input_text", "text": "a b"}]}]
    assert (
        client.responses.create(model="tiny", input=parts, extra_body={"misvo": STEER}).output_text == whole.output_text
    )
    client.responses.delete(whole.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(whole.id)


def test_a_reader_that_leaves_does_not_end_what_is_in_the_background(server, http):
    gate.clear()
    body = {"model": "tiny", "input": "a b", "background": True, "stream": True, "misvo": STEER}
    with http.stream("POST", "/v1/responses", json=body) as stream:
        id = json.loads(next(line for line in stream.iter_lines() if line).removeprefix("data: "))["response"]["id"]
    gate.set()
    server.wait_until(lambda: http.get(f"/v1/responses/{id}").json()["status"] == "completed")


def test_results_and_events_go_together():
    """Kept for a number and for a time; what is under way is never dropped."""
    config = Config(name="tiny", keep_runs=2)
    rewards = {"letters": letter_reward, "waits": waits}
    with served(make_policy(), rewards, config) as server, server.http() as http:
        gate.clear()
        running = http.post("/misvo/v1/runs", json={**RUN, "reward": "waits"}).json()["id"]
        ids = []
        for seed in range(4):
            ids.append(http.post("/misvo/v1/runs", json={**RUN, "seed": seed, "steps": 1}).json()["id"])
            server.wait_until(lambda: server.core.places.taken == 1)
        gone, kept = ids[:2], ids[2:]
        for id in gone:
            assert {http.get(f"/misvo/v1/runs/{id}{path}").status_code for path in ("", "/events", "/result")} == {404}
        for id in (*kept, running):
            assert http.get(f"/misvo/v1/runs/{id}").status_code == 200
        gate.set()
        server.idle()
        for job in server.core.store._jobs.values():
            job.ended -= 10_000
        assert http.get("/misvo/v1/runs").json() == {"runs": []} and len(server.core.store) == 0


def test_a_run_is_that_of_steer(http, finished, alone):
    told = http.get(f"/misvo/v1/runs/{finished}/result").json()
    again = misvo.Result.from_dict(told)
    assert [c.tokens for c in again.candidates] == [c.tokens for c in alone.candidates]
    assert [c.reward for c in again.candidates] == pytest.approx([c.reward for c in alone.candidates])
    assert (again.text, again.settings.steps) == (alone.text, 3)
    assert [row["kl"] for row in again.trace] == pytest.approx([row["kl"] for row in alone.trace], abs=1e-5)
    state = http.get(f"/misvo/v1/runs/{finished}").json()
    assert state["answer"]["text"] == alone.text and state["usage"]["rollouts"] == 12


def test_events_have_every_trace_row_and_can_be_taken_up_again(http, finished, alone):
    every = events_of(http.get(f"/misvo/v1/runs/{finished}/events").text)
    rows = [event["row"] for event in every if event["type"] == "step"]
    assert [row["step"] for row in rows] == [0, 1, 2]
    for row, own in zip(rows, alone.trace, strict=True):
        assert row["mean"] == pytest.approx(own["mean"]) and len(row["kl_per_position"]) == 8
    assert every[-1]["type"] == "completed" and every[-1]["run"]["state"] == "completed"
    for how in ({"params": {"starting_after": 1}}, {"headers": {"Last-Event-ID": "1"}}):
        assert events_of(http.get(f"/misvo/v1/runs/{finished}/events", **how).text) == every[2:]
    shown = http.get(f"/misvo/v1/runs/{finished}/events").text
    assert [line for line in shown.split("\n") if line.startswith("id:")] == [f"id: {i}" for i in range(len(every))]


def test_two_clients_may_follow_and_cancel_one_run(server):
    gate.clear()
    seen = {}
    with server.http() as first, server.http() as second:
        run = first.post("/misvo/v1/runs", json={**RUN, "reward": "waits"}).json()["id"]

        def follow(name, client):
            seen[name] = events_of(client.get(f"/misvo/v1/runs/{run}/events").text)

        threads = [threading.Thread(target=follow, args=pair) for pair in (("one", first), ("two", second))]
        for thread in threads:
            thread.start()
        with server.http() as third:
            assert third.post("/misvo/v1/runs", json={**RUN, "id": run}).status_code == 400  # nobody chooses ids
            states = [third.post(f"/misvo/v1/runs/{run}/cancel").json()["state"] for _ in range(2)]
        for thread in threads:
            thread.join()
        gate.set()
    assert states == ["cancelled"] * 2 and seen["one"][-1]["type"] == seen["two"][-1]["type"] == "cancelled"
    server.idle()


def test_candidates_with_their_token_kls(http, finished, alone):
    page = http.get(f"/misvo/v1/runs/{finished}/candidates", params={"offset": 5, "limit": 3}).json()
    assert page["total"] == 12
    for row, own in zip(page["candidates"], alone.candidates[5:8], strict=True):
        assert row["tokens"] == own.tokens and row["token_kl"] == pytest.approx(own.token_kl, abs=1e-6)
    assert http.get(f"/misvo/v1/runs/{finished}/candidates", params={"step": 1}).json()["total"] == 4
    assert http.get(f"/misvo/v1/runs/{finished}/candidates/9/0").status_code == 404
    assert http.get(f"/misvo/v1/runs/{finished}/candidates", params={"limit": 10**9}).status_code == 400


def test_tokens_that_were_promoted(http, finished, alone):
    """Before and after agree with the log-probabilities that decoding noted, and KLs follow from whole laws."""
    told = http.get(f"/misvo/v1/runs/{finished}/candidates/2/1", params={"tokens": 3}).json()
    assert "".join(told["pieces"]).replace(" ", "") == told["text"].replace(" ", "")
    for place, moved in enumerate(told["moved"]):
        assert moved["after"] == pytest.approx(torch.tensor(told["logprobs"][place]).exp().item(), abs=1e-5)
        assert moved["before"] == pytest.approx(torch.tensor(told["ref_logprobs"][place]).exp().item(), abs=1e-5)
        gains = [one["after"] - one["before"] for one in moved["promoted"]]
        assert gains == sorted(gains, reverse=True) and gains[0] > 0
    assert http.get(f"/misvo/v1/runs/{finished}/candidates/0/1").json()["moved"] is None  # the reference's own


def test_alternatives_of_all_tokens_make_up_the_kl():
    policy = make_policy()
    result = misvo.steer(policy, "a b", letter_reward, rollouts=4, steps=2, max_new_tokens=6, tie="position")
    from misvo.interventions import Vectors

    vectors = Vectors.by_position(result.steering.vectors)
    sampler = sampler_of(result.settings, policy.ends)
    sampled = policy.sample("a b", result, samples=1, seed=9)
    tokens = sampled.rollouts.responses()[0]
    rows = alternatives(policy, tuple(result.prompt_ids), tokens, vectors, sampler, count=61)
    for row, kl in zip(rows, sampled.rollouts.kl[0].tolist(), strict=False):
        laws = {one["token"]: (one["before"], one["after"]) for one in row["promoted"]}
        before, after = (torch.tensor(law, dtype=torch.float64) for law in zip(*laws.values(), strict=True))
        assert (after * (after / before).log()).sum().item() == pytest.approx(kl, abs=1e-4)


def test_steerings_are_saved_used_downloaded_and_deleted(tmp_path):
    config = Config(name="tiny", steerings=tmp_path / "kept", default_tokens=8)
    policy = make_policy()
    with served(policy, {"letters": letter_reward}, config) as server, server.http() as http:
        run = http.post("/misvo/v1/runs", json=RUN).json()["id"]
        server.idle()
        assert http.post("/misvo/v1/steerings", json={"run": run, "name": "calm"}).status_code == 201
        assert http.post("/misvo/v1/steerings", json={"run": run, "name": "calm"}).status_code == 409
        own = misvo.steer(
            policy, "a b c", letter_reward, rollouts=4, steps=3, max_new_tokens=8, seed=5, raw=True
        ).steering
        vectors = safetensors.torch.load(http.get("/misvo/v1/steerings/calm/safetensors").content)["vectors"]
        assert torch.allclose(vectors, own.vectors, atol=1e-5)
        answer = server.client().completions.create(
            model="tiny",
            prompt="a b c",
            seed=2,
            max_tokens=8,
            extra_body={"misvo": {"steering": "calm", "strength": 2.0}},
        )
        assert answer.choices[0].text == policy.generate("a b c", own, strength=2.0, seed=2, max_new_tokens=8, raw=True)
        assert answer.misvo["strength"] == 2.0 and answer.misvo["answers"][0]["kl"] > 0
        for name in ("../x", "..", ".", "a/b", "/etc/x", "", "x" * 65, "a\x00b", "-x", "é", "a.", "CON\n"):
            assert http.post("/misvo/v1/steerings", json={"run": run, "name": name}).status_code == 400, name
        for path in ("..%2f..%2fetc%2fpasswd", "%2e%2e", "calm%00", "calm%2f..%2fcalm", "x"):
            assert http.get(f"/misvo/v1/steerings/{path}/safetensors").status_code in (400, 404), path
            assert http.delete(f"/misvo/v1/steerings/{path}").status_code in (400, 404, 405), path
        assert sorted(path.name for path in tmp_path.iterdir()) == ["kept"]
    with served(policy, {}, config) as server, server.http() as http:  # another process finds it again
        assert [one["name"] for one in http.get("/misvo/v1/steerings").json()["steerings"]] == ["calm"]
        assert http.delete("/misvo/v1/steerings/calm").status_code == 200
        assert http.get("/misvo/v1/steerings").json() == {"steerings": []} and not list((tmp_path / "kept").iterdir())


def test_generate_at_several_strengths_with_the_same_noise(http, finished, alone):
    policy = make_policy(chat=True)
    body = {"prompt": "a b c", "run": finished, "strength": [0.5, 1, 2], "reference": True, "samples": 3, "seed": 4}
    told = http.post("/misvo/v1/generate", json={**body, "raw": True, "reward": "letters"}).json()["strengths"]
    assert [row["strength"] for row in told] == [0.0, 0.5, 1.0, 2.0]
    for row in told:
        own = policy.sample("a b c", alone, strength=row["strength"], samples=3, seed=4, raw=True)
        assert [sample["text"] for sample in row["samples"]] == own.texts
        nats = own.rollouts.kl.sum().item() / own.rollouts.lengths.sum().item()
        assert row["kl_per_token"] == pytest.approx(nats, abs=1e-5)
        assert row["reward"] == pytest.approx(sum(letter_reward(own.texts)) / 3)
        changed = [torch.nonzero(one)[:, 0].tolist() for one in own.rollouts.changed & own.rollouts.alive]
        assert [sample["changed"] for sample in row["samples"]] == changed
    plain = http.post(
        "/misvo/v1/generate", json={"prompt": "a b c", "samples": 2, "raw": True, "max_new_tokens": 8}
    ).json()
    assert [one["text"] for one in plain["strengths"][0]["samples"]] == policy.generate(
        "a b c", samples=2, max_new_tokens=8, raw=True
    )
    assert http.post("/misvo/v1/generate", json={**body, "strength": [1.0] * 17}).status_code == 400


def test_the_panel(http, finished, alone):
    told = http.post(f"/misvo/v1/runs/{finished}/panel", json={"held_out": "length:3"}).json()["measures"]
    own = misvo.panel(alone, held_out="length:3").to_dict()
    assert set(told) == set(own)
    for name in ("reward", "held_out", "kl_per_token", "diversity"):
        assert told[name]["last"] == pytest.approx(own[name]["last"], abs=1e-5)


def test_what_there_is_to_choose_from(http):
    settings = {row["name"]: row for row in http.get("/misvo/v1/settings").json()["settings"]}
    assert (
        "particles" in settings["method"]["names"]
        and "lora" not in settings["method"]["names"]
        and settings["rollouts"]["default"] == 16
    )
    assert "memory" not in settings and "value" not in settings
    assert [one["name"] for one in http.get("/misvo/v1/rewards").json()["rewards"]] == ["letters", "waits"]
    assert http.get("/misvo/v1/models").json()["models"][0]["hidden_size"] == 32
    status = http.get("/misvo/v1/status").json()
    assert (status["rows_in_flight"], status["requests"], status["queue"]) == (0, 0, Limits().queue)


def test_metrics_count_what_happened():
    with served(make_policy(), {"letters": letter_reward}, Config(name="tiny")) as server, server.http() as http:
        answer = http.post("/v1/completions", json={"model": "tiny", "prompt": "a", "max_tokens": 5, "n": 3}).json()
        http.post("/v1/completions", json={"model": "tiny"})
        run = http.post("/misvo/v1/runs", json=RUN).json()["id"]
        server.idle()
        used = http.get(f"/misvo/v1/runs/{run}").json()["usage"]["completion_tokens"]
        lines = dict(line.rsplit(" ", 1) for line in http.get("/metrics").text.splitlines() if line[0] != "#")
    assert lines['misvo_requests_total{route="/v1/completions",status="200"}'] == "1"
    assert lines['misvo_requests_total{route="/v1/completions",status="400"}'] == "1"
    assert int(lines["misvo_tokens_total"]) == used + answer["usage"]["completion_tokens"]
    assert int(lines["misvo_steps_total"]) == 3 and float(lines["misvo_kl_nats_total"]) > 0
    assert lines["misvo_rows_in_flight"] == lines["misvo_queue"] == "0"
