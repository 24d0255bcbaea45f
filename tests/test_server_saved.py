"""Finished runs from folders: shown without a model, and beside the runs of a server that has one."""

import json
import re
import subprocess
import sys

import httpx2
import pytest
from conftest import letter_reward, make_policy
from serving import served

import misvo
from misvo.cli import app
from misvo.errors import MisvoError
from misvo.server import Config, create_app

HOW = {"rollouts": 4, "steps": 3, "max_new_tokens": 8, "seed": 5, "raw": True}


@pytest.fixture(scope="module")
def result():
    return misvo.steer(make_policy(chat=True), "a b c", letter_reward, **HOW)


@pytest.fixture(scope="module")
def folder(result, tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved") / "calm run"
    result.save(folder)
    return folder


@pytest.fixture(scope="module")
def viewer(folder):
    with served(None, {}, Config(runs=(folder,))) as server, server.http() as http:
        yield http


def test_a_folder_answers_like_a_run_without_a_model(viewer, result, folder):
    (run,) = viewer.get("/misvo/v1/runs").json()["runs"]
    assert (run["name"], run["state"], run["prompt"]) == ("calm run", "completed", "a b c")
    assert str(folder.parent) not in json.dumps(run)
    assert run["answer"]["text"] == result.text and run["usage"]["rollouts"] == 12 and run["steering"] is True
    assert run["story"] == result.summary().splitlines()[-len(run["story"]) :]
    address = f"/misvo/v1/runs/{run['id']}"
    events = [json.loads(line[6:]) for line in viewer.get(f"{address}/events").text.split("\n") if line[:5] == "data:"]
    assert [event["type"] for event in events] == ["started", "step", "step", "step", "completed"]
    assert [event["row"]["mean"] for event in events[1:-1]] == [row["mean"] for row in result.trace]
    page = viewer.get(f"{address}/candidates", params={"fields": "light"}).json()
    assert [row["text"] for row in page["candidates"]] == [candidate.text for candidate in result.candidates]
    again = misvo.Result.from_dict(viewer.get(f"{address}/result").json())
    assert again.candidates == result.candidates
    best = viewer.get(f"{address}/candidates/{result.best.step}/{result.best.rollout}").json()
    assert best["pieces"] == result.pieces and best["moved"] is None
    other = next(c for c in result.candidates if c != result.best)
    assert viewer.get(f"{address}/candidates/{other.step}/{other.rollout}").json()["pieces"] is None
    measures = viewer.post(f"{address}/panel", json={"held_out": "length:3"}).json()["measures"]
    own = misvo.panel(result, held_out="length:3").to_dict()
    assert measures["held_out"]["last"] == pytest.approx(own["held_out"]["last"])
    assert viewer.get(f"{address}/safetensors").status_code == 200


def test_what_needs_a_model_says_so(viewer):
    (run,) = viewer.get("/misvo/v1/runs").json()["runs"]
    asked = {"prompt": "a", "reward": "length:3"}
    for path, body in (
        ("/misvo/v1/runs", asked),
        ("/misvo/v1/generate", {"prompt": "a", "run": run["id"]}),
        ("/v1/chat/completions", {"model": "tiny", "messages": [{"role": "user", "content": "a"}]}),
        ("/v1/responses", {"model": "tiny", "input": "a"}),
    ):
        answer = viewer.post(path, json=body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (409, "no_model"), path
    assert viewer.get("/health").status_code == viewer.get("/metrics").status_code == 200
    assert viewer.get("/misvo/v1/models").json() == {"models": []} and viewer.get("/v1/models").json()["data"] == []
    assert viewer.get("/misvo/v1/status").json()["rows_in_flight"] == 0
    fluency = viewer.post(f"/misvo/v1/runs/{run['id']}/fluency")
    assert fluency.status_code == 409 and "--judge" in fluency.json()["error"]["message"]


def test_folders_are_shown_to_all_keys_beside_own_runs_and_stay(folder):
    config = Config(name="tiny", keys=("sesame", "tahini"), runs=(folder,), keep_runs=1, keep_seconds=0.0)
    with served(make_policy(chat=True), {"letters": letter_reward}, config) as server:
        with server.http(headers={"Authorization": "Bearer sesame"}) as http:
            body = {**HOW, "prompt": "a b c", "reward": "letters", "steps": 1}
            assert http.post("/misvo/v1/runs", json=body).status_code == 202
            server.idle()
        with server.http(headers={"Authorization": "Bearer tahini"}) as http:
            (run,) = http.get("/misvo/v1/runs").json()["runs"]
            assert run["name"] == "calm run"
            for answer in (http.delete(f"/misvo/v1/runs/{run['id']}"), http.get(f"/v1/responses/{run['id']}")):
                assert answer.status_code in (404, 409)
            assert http.post(f"/misvo/v1/runs/{run['id']}/cancel").json()["state"] == "completed"
            told = http.post("/misvo/v1/generate", json={"prompt": "a b c", "run": run["id"], "raw": True}).json()
            assert len(told["strengths"][0]["samples"][0]["tokens"]) > 0  # its vectors fit this model
            assert len(http.get("/misvo/v1/runs").json()["runs"]) == 1


def test_a_folder_that_is_none_is_named(tmp_path):
    with pytest.raises(MisvoError, match="misvo steer --save"):
        create_app(None, {}, Config(runs=(tmp_path / "nothing",)))


def test_the_studio_from_the_shell(folder):
    """A process without a model: the address that it prints is that of the page, which shows the folder."""
    command = [sys.executable, "-m", "misvo.cli", "studio", "--view", str(folder), "--port", "0", "--no-browser"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            line = next(line for line in process.stderr if "the studio is at" in line)
            address = re.search(r"http://127\.0\.0\.1:\d+/", line)[0]
            page = httpx2.get(address, trust_env=False)
            assert page.status_code == 200 and page.headers["content-type"].startswith("text/html")
            runs = httpx2.get(f"{address}misvo/v1/runs", trust_env=False).json()["runs"]
            assert [run["name"] for run in runs] == ["calm run"]
            rewards = httpx2.get(f"{address}misvo/v1/rewards", trust_env=False).json()["rewards"]
            assert [one["name"] for one in rewards] == ["sentiment", "reading-ease"]
        finally:
            process.terminate()


def test_a_view_of_nothing_is_refused():
    with pytest.raises(MisvoError, match="give their folders"):
        app(["studio", "--view"], standalone_mode=False)
