"""What the studio reads of a run: parts, a held-out reward, what started it, light rows, pieces, uploads."""

import json
import math

import pytest
import safetensors.torch
import torch
from conftest import letter_reward, make_policy
from serving import served
from test_server_runs import events_of

import misvo
from misvo.metrics import diversity
from misvo.server import Config, Limits, steering_file
from misvo.text import cut_at_tokens

RUN = {"prompt": "a b c", "rollouts": 4, "steps": 3, "max_new_tokens": 8, "seed": 5, "raw": True}


def sometimes(completions, **_):
    """Scores every other response."""
    return [None if index % 2 else float(len(text)) for index, text in enumerate(completions)]


def broken(completions, **_):
    raise ValueError("a secret")


@pytest.fixture(scope="module")
def server():
    rewards = {"letters": letter_reward, "sometimes": sometimes, "broken": broken}
    with served(make_policy(chat=True), rewards, Config(name="tiny", limits=Limits(upload=40_000))) as it:
        yield it


@pytest.fixture(scope="module")
def http(server):
    with server.http() as client:
        yield client


def done(server, http, **body):
    run = http.post("/misvo/v1/runs", json={**RUN, **body}).json()["id"]
    server.wait_until(lambda: http.get(f"/misvo/v1/runs/{run}").json()["state"] == "completed")
    return run, http.get(f"/misvo/v1/runs/{run}").json()


def rows_of(http, run, **how):
    return http.get(f"/misvo/v1/runs/{run}/candidates", params=how).json()["candidates"]


def test_parts_of_a_sum_stand_beside_each_response(server, http):
    reward = [{"name": "letters", "weight": 0.5}, {"length": 4, "label": "brief"}]
    run, state = done(server, http, reward=reward)
    assert state["weights"] == {"letters": 0.5, "brief": 1.0}
    for row in rows_of(http, run):
        assert row["parts"] == {"letters": letter_reward([row["text"]])[0], "brief": -abs(len(row["text"].split()) - 4)}
        assert row["reward"] == pytest.approx(0.5 * row["parts"]["letters"] + row["parts"]["brief"])
        assert row["token_count"] == len(row["tokens"]) and row["diversity"] == diversity(row["text"])
        assert row["kl_per_token"] == pytest.approx(sum(row["token_kl"]) / len(row["tokens"]))
    again = misvo.Result.from_dict(http.get(f"/misvo/v1/runs/{run}/result").json())
    assert [c.parts for c in again.candidates] == [row["parts"] for row in rows_of(http, run)]


def test_a_held_out_reward_is_watched_and_changes_nothing(server, http):
    plain, _ = done(server, http, reward="letters")
    run, state = done(server, http, reward="letters", held_out="sometimes")
    assert state["request"]["held_out"] == "sometimes"
    rows = rows_of(http, run)
    assert [row["tokens"] for row in rows] == [row["tokens"] for row in rows_of(http, plain)]
    assert [row["held_out"] for row in rows] == [
        None if row["rollout"] % 2 else float(len(row["text"])) for row in rows
    ]
    trace = [event["row"] for event in events_of(http.get(f"/misvo/v1/runs/{run}/events").text) if "row" in event]
    for row in trace:
        known = [one["held_out"] for one in rows if one["step"] == row["step"] and one["held_out"] is not None]
        assert row["held_out"] == pytest.approx(sum(known) / len(known))
    run, _ = done(server, http, reward="letters", held_out="broken")
    assert all(row["held_out"] is None and row["reward"] is not None for row in rows_of(http, run))
    said = http.get(f"/misvo/v1/runs/{run}/events").text
    notes = [event["row"].get("note") for event in events_of(said) if "row" in event]
    assert "the held-out reward failed" in notes[0] and notes[1:] == [None, None] and "secret" not in said


def test_what_started_a_run_starts_it_again(server, http):
    body = {**RUN, "reward": [{"contains": ["a", "b"]}, {"json": {"type": "object"}, "weight": 0.25}]}
    del body["seed"]
    run = http.post("/misvo/v1/runs", json=body).json()["id"]
    server.idle()
    told = http.get(f"/misvo/v1/runs/{run}").json()
    assert told["request"] == body | {"seed": told["settings"]["seed"]}
    again = http.post("/misvo/v1/runs", json=told["request"]).json()["id"]
    server.idle()
    assert [row["tokens"] for row in rows_of(http, again)] == [row["tokens"] for row in rows_of(http, run)]


def test_kl_and_budget_by_token(server, http):
    for how, per_token in (({"kl_budget_per_token": 0.2}, 0.2), ({"kl_budget": 1.5}, None)):
        given = {"preset": "paper", **how} if per_token is None else how
        run, state = done(server, http, reward="letters", **given)
        rows = rows_of(http, run)
        trace = [event["row"] for event in events_of(http.get(f"/misvo/v1/runs/{run}/events").text) if "row" in event]
        for row in trace:
            own = [one for one in rows if one["step"] == row["step"]]
            tokens = sum(one["token_count"] for one in own)
            assert row["kl_per_token"] == pytest.approx(sum(one["kl"] for one in own) / tokens, abs=1e-6)
            budget = per_token or 1.5 * len(own) / tokens
            assert row["kl_budget_per_token"] == pytest.approx(budget, rel=1e-6)
        assert state["budget"]["per_token"] == pytest.approx(trace[-1]["kl_budget_per_token"])


def test_light_rows_leave_out_what_there_is_of_each_token(server, http):
    run, _ = done(server, http, reward="letters")
    light, full = (rows_of(http, run, fields=fields, limit=5000) for fields in ("light", "all"))
    for less, more in zip(light, full, strict=True):
        assert set(more) - set(less) == {"tokens", "token_kl", "changed"}
        assert less == {name: more[name] for name in less}
    assert http.get(f"/misvo/v1/runs/{run}/candidates", params={"fields": "some"}).status_code == 400


def test_pieces_make_up_the_text_and_samples_say_where_they_part(server, http):
    run, _ = done(server, http, reward="letters")
    body = {"prompt": "a b c", "run": run, "raw": True, "strength": [0, 8], "samples": 6, "seed": 3}
    reference, steered = http.post("/misvo/v1/generate", json=body).json()["strengths"]
    parted = []
    for ours, theirs in zip(steered["samples"], reference["samples"], strict=True):
        for sample in (ours, theirs):
            assert "".join(sample["pieces"]) == sample["text"] and len(sample["pieces"]) == len(sample["tokens"])
        pairs = zip(ours["tokens"], theirs["tokens"], strict=False)
        parted.append(next((place for place, (one, other) in enumerate(pairs) if one != other), None))
        assert ours["parts_at"] == parted[-1] and theirs["parts_at"] is None
    assert any(place is not None for place in parted)
    for row in rows_of(http, run):
        told = http.get(f"/misvo/v1/runs/{run}/candidates/{row['step']}/{row['rollout']}").json()
        assert "".join(told["pieces"]) == told["text"]


def test_pieces_of_letters_that_are_several_tokens_and_of_texts_cut_off():
    letters = "naïve 🙂 STOP more".encode()
    tokens, decode = list(letters), lambda some: bytes(some).decode("utf-8", "replace")
    for text in ("naïve 🙂 STOP more", "naïve 🙂 "):
        assert "".join(cut_at_tokens(text, tokens, decode)) == text
    assert cut_at_tokens("é", list("é".encode()), decode) == ["", "é"]


def test_a_steering_goes_out_as_a_file_and_comes_back(server, http):
    run, _ = done(server, http, reward="letters")
    content = http.get(f"/misvo/v1/runs/{run}/safetensors").content
    http.post("/misvo/v1/steerings", json={"run": run, "name": "first"})
    saved = http.get("/misvo/v1/steerings/first/safetensors").content  # the order of its metadata is any
    assert vars(steering_file.decode(saved)) | {"vectors": 0} == vars(steering_file.decode(content)) | {"vectors": 0}
    loaded = http.put("/misvo/v1/steerings/second/safetensors", content=content)
    assert loaded.status_code == 201
    own, back = (http.get(f"/misvo/v1/steerings/{name}").json() for name in ("first", "second"))
    assert {**own, "name": 0, "created": 0} == {**back, "name": 0, "created": 0}
    body = {"prompt": "a b c", "raw": True, "samples": 3, "max_new_tokens": 8}
    one, two = (
        http.post("/misvo/v1/generate", json={**body, "steering": name}).json()["strengths"]
        for name in ("first", "second")
    )
    assert one == two
    assert http.put("/misvo/v1/steerings/second/safetensors", content=content).status_code == 409
    for name in ("..%2fx", "a%00", "-x"):
        assert http.put(f"/misvo/v1/steerings/{name}/safetensors", content=content).status_code in (400, 404), name


def test_files_that_are_no_steering_are_refused(server, http):
    run, _ = done(server, http, reward="letters")
    good = steering_file.decode(http.get(f"/misvo/v1/runs/{run}/safetensors").content)

    def file(tensors=None, **metadata):
        about = json.dumps({"model": "tiny", "prompt": "a", "settings": None})
        told = {"head": good.head, "tie": "shared", "about": about} | metadata
        return safetensors.torch.save(tensors or {"vectors": good.vectors}, told)

    bad = {
        "nothing": b"",
        "no file": b"hello",
        "a header that is too long": (2**40).to_bytes(8, "little") + b"{}",
        "cut off": file()[:-8],
        "other tensors": file({"vectors": good.vectors, "more": torch.zeros(1)}),
        "another name": file({"u": good.vectors}),
        "another width": file({"vectors": torch.zeros(4, 31)}),
        "another type": file({"vectors": good.vectors.double()}),
        "one row": file({"vectors": torch.zeros(32)}),
        "no row": file({"vectors": torch.zeros(0, 32)}),
        "not finite": file({"vectors": torch.full((2, 32), math.nan)}),
        "another head": file(head="0" * 16),
        "no tie": file(tie="loose"),
        "no settings": file(about=json.dumps({"settings": {"rollouts": -1}})),
        "strange settings": file(about=json.dumps({"settings": {"import": 1}})),
        "no prompt": file(about=json.dumps({"prompt": {"a": 1}})),
        "no JSON": file(about="{"),
        "a list": file(about="[]"),
        "a model that is none": file(about=json.dumps({"model": {"a": 1}})),
    }
    for what, content in bad.items():
        answer = http.put("/misvo/v1/steerings/bad/safetensors", content=content)
        assert answer.status_code == 400, what
    assert http.put("/misvo/v1/steerings/bad/safetensors", content=b"x" * 50_000).status_code == 413
    assert http.put("/misvo/v1/steerings/good/safetensors", content=file()).status_code == 201
    assert "bad" not in [one["name"] for one in http.get("/misvo/v1/steerings").json()["steerings"]]


def test_settings_say_where_they_belong(http):
    rows = {row["name"]: row for row in http.get("/misvo/v1/settings").json()["settings"]}
    assert rows["steps"]["group"] == "first" and rows["temperature"]["group"] == "sampling"
    assert rows["patience"]["group"] == "stopping" and rows["tie"]["group"] == "search"
    assert rows["tie"]["defaults"] == {"auto": "shared", "paper": "position"}
    assert rows["max_new_tokens"]["default"] == Config().default_tokens
    assert all(row["about"] for row in rows.values())
