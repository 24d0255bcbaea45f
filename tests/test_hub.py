"""Whether the hub answers is asked once and quickly: hubs that are silent, closed, behind a dead proxy, or there."""

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import huggingface_hub
import pytest
from conftest import make_model, make_tokenizer

import misvo
from misvo import embedded, hub, metrics
from misvo.bench.config import Model as ModelEntry
from misvo.rewards import RewardModel


class SilentHub:
    """Takes connections, counts them and never says a word."""

    def __init__(self):
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.listener.getsockname()[1]}"
        self.connections = []
        threading.Thread(target=self._take, daemon=True).start()

    def _take(self):
        with contextlib.suppress(OSError):  # closed: the test is over
            while True:
                self.connections.append(self.listener.accept())

    def close(self):
        with contextlib.suppress(OSError):  # closed before
            self.listener.shutdown(socket.SHUT_RDWR)  # wakes the thread, which would keep the door open
        self.listener.close()


class SpeakingHub:
    """Answers everything with one status, and keeps what it was asked for."""

    def __init__(self, status):
        asked = self.asked = []

        class Handler(BaseHTTPRequestHandler):
            def do_HEAD(self):
                asked.append((self.command, self.path))
                self.send_response(status)
                self.send_header("Content-Length", "0")
                self.end_headers()

            do_GET = do_HEAD

            def log_message(self, *_):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def close(self):
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def online(monkeypatch, tmp_path):
    """A function that makes a hub the one of this process, which then is not offline and has asked nothing before."""
    opened = []

    def use(place):
        opened.append(place)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", place.url)
        monkeypatch.setattr(hub, "PATIENCE", 0.5)
        monkeypatch.setattr(huggingface_hub.utils._detect_agent, "_registry", None)
        monkeypatch.setattr(huggingface_hub.constants, "AGENT_HARNESSES_PATH", str(tmp_path / "harnesses.json"))
        hub.silence.cache_clear()
        hub._make_headers.cache_clear()
        return place

    yield use
    hub.silence.cache_clear()
    for place in opened:
        place.close()


def refusal(call, *args, **options) -> str:
    with pytest.raises(misvo.MisvoError) as caught:
        call(*args, **options)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 500
    return str(caught.value)


def test_a_silent_hub_is_asked_once_by_all_who_load(online):
    place, started = online(SilentHub()), time.monotonic()
    says = f"the hub at {place.url} does not answer (nothing came in 0.5 s), and the cache of this machine does not"
    assert says in refusal(misvo.Policy.from_pretrained, "no-such/model")
    assert says in refusal(misvo.Policy.from_pretrained, "no-such/other-model")
    assert says in refusal(RewardModel.from_pretrained, "no-such/reward-model")
    assert says in refusal(metrics.load_encoder, "no-such/encoder")
    assert says in refusal(ModelEntry("no-such/model").tokenizer)
    assert time.monotonic() - started < 10  # five times a minute, were each file tried again and again
    assert len(place.connections) == 1


def test_the_sentence_says_what_to_do(online):
    online(SilentHub())
    assert "did you mean 'smollm2-135m'?" in refusal(misvo.Policy.from_pretrained, "smollm2-135")
    message = refusal(misvo.Policy.from_pretrained, "no-such/model")
    names = ", ".join(embedded.MODELS)
    assert message.endswith(f"; give a Hugging Face id or a folder; embedded models are {names}.")
    assert "give 'minilm', an id or a folder" in refusal(metrics.load_encoder, "simcse")


def test_a_closed_door_and_a_dead_proxy_are_silence_too(online):
    place = online(SilentHub())
    place.close()
    message = refusal(misvo.Policy.from_pretrained, "no-such/model")
    assert f"{place.url} does not answer (" in message and "refused" in message
    online(SpeakingHub(503))
    assert "does not answer (HTTP 503)" in refusal(misvo.Policy.from_pretrained, "no-such/model")


@pytest.fixture
def checkpoint(tmp_path):
    folder = tmp_path / "checkpoint"
    make_model("llama").save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


def cached(checkpoint, cache, name):
    """The checkpoint as a download of `name` would have left it."""
    commit = "0123456789abcdef" * 2 + "01234567"
    place = cache / f"models--{name.replace('/', '--')}"
    shutil.copytree(checkpoint, place / "snapshots" / commit)
    (place / "refs").mkdir()
    (place / "refs" / "main").write_text(commit)


def test_a_name_in_the_cache_loads_without_a_network(online, checkpoint, tmp_path):
    place = online(SilentHub())
    cached(checkpoint, tmp_path / "cache", "somebody/tiny")
    policy = misvo.Policy.from_pretrained("somebody/tiny", cache_dir=tmp_path / "cache")
    own = misvo.Policy(make_model("llama"), make_tokenizer())
    assert policy.generate("a", samples=4, max_new_tokens=8) == own.generate("a", samples=4, max_new_tokens=8)
    assert len(place.connections) == 1


def test_folders_and_offline_machines_ask_nobody(online, checkpoint, tmp_path, monkeypatch):
    place = online(SilentHub())
    own = misvo.Policy(make_model("llama"), make_tokenizer())
    folder = misvo.Policy.from_pretrained(checkpoint)
    assert folder.generate("a", samples=4, max_new_tokens=8) == own.generate("a", samples=4, max_new_tokens=8)
    for path in (tmp_path / "none", "./none", "somewhere/of/mine", "~/models/none"):
        assert "there is no such folder" in refusal(misvo.Policy.from_pretrained, path)
    message = refusal(misvo.Policy.from_pretrained, "no-such/model", local_files_only=True)
    assert "local_files_only was given, and the cache of this machine does not have it" in message
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE is set, and the cache" in refusal(misvo.Policy.from_pretrained, "no-such/model")
    assert not place.connections and hub.silence.cache_info().misses == 0


def test_what_is_wrong_with_a_cached_model_is_said(online, checkpoint, tmp_path):
    """The hub's silence is not blamed for a file that is there and broken."""
    online(SilentHub())
    (checkpoint / "config.json").write_text("{")
    cached(checkpoint, tmp_path / "cache", "somebody/broken")
    message = refusal(misvo.Policy.from_pretrained, "somebody/broken", cache_dir=tmp_path / "cache")
    assert "does not answer" not in message and "JSON" in message


def said(code, **environment) -> str:
    """What a process prints that was not started offline."""
    plain = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, env={**plain, **environment}, capture_output=True, text=True, timeout=60).stdout


def test_the_environment_names_the_hub_and_forbids_it():
    code = "from misvo import hub; [print(hub.find('no-such/model').barrier) for _ in range(2)]"
    place = SpeakingHub(200)
    try:
        assert said(code, HF_ENDPOINT=place.url).split() == ["None", "None"] and place.asked == [("HEAD", "/")]
        assert said(code, HF_ENDPOINT=place.url, HF_HUB_OFFLINE="1") == "HF_HUB_OFFLINE is set\n" * 2
        assert len(place.asked) == 1
    finally:
        place.close()


def test_a_hub_that_answers_is_asked_for_the_model(tmp_path):
    code = (
        "import misvo\n"
        "try: misvo.Policy.from_pretrained('no-such/model')\n"
        "except misvo.MisvoError as error: print(error)\n"
    )
    place = SpeakingHub(404)
    try:
        message = said(code, HF_ENDPOINT=place.url, HF_HOME=str(tmp_path))
    finally:
        place.close()
    assert message.startswith("no model could be loaded from the name 'no-such/model': ")
    assert "does not answer" not in message and message.count("\n") == 1
    assert place.asked[0] == ("HEAD", "/")
    assert any("no-such/model" in path for _, path in place.asked[1:])
