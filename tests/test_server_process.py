"""`misvo serve` as a process of its own: started from the shell, asked by the stock client, stopped by signals."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager

import httpx2
import openai
import pytest
from conftest import make_model, make_tokenizer

import misvo

REWARDS = """
import time

def slow(completions, **_):
    time.sleep(0.15)
    return [float(len(completion)) for completion in completions]

def stuck(completions, **_):
    time.sleep(600)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny checkpoint, and rewards in a file."""
    folder = tmp_path_factory.mktemp("served")
    make_model("llama").save_pretrained(folder / "tiny")
    make_tokenizer(chat=True).save_pretrained(folder / "tiny")
    (folder / "rewards.py").write_text(REWARDS)
    (folder / "keys").write_text("sesame\ntahini\n")
    return folder


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextmanager
def process(*options, seconds=120):
    """A server in a process of its own; what it said is in `log` once it has ended."""
    port = free_port()
    command = [sys.executable, "-m", "misvo.cli", "serve", "--port", str(port), *map(str, options)]
    running = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    address = f"http://127.0.0.1:{port}"
    try:
        end = time.monotonic() + seconds
        while True:
            assert running.poll() is None and time.monotonic() < end, running.communicate()[0]
            try:
                if httpx2.get(f"{address}/health", trust_env=False).status_code == 200:
                    break
            except httpx2.TransportError:
                time.sleep(0.05)
        yield running, address
    finally:
        running.kill()
        running.wait()
        running.stdout.close()


def tiny(folder, *options):
    source = folder / "rewards.py"
    rewards = ("--reward", f"slow={source}:slow", "--reward", f"stuck={source}:stuck", "--reward", "sentiment")
    return ("--model", folder / "tiny", *rewards, *options)


def client(address, key="none"):
    return openai.OpenAI(base_url=f"{address}/v1", api_key=key, max_retries=0, timeout=60)


def test_sigterm_lets_running_requests_end(folder):
    """No new ones; a blocking and a streamed one end as if nothing had happened; the process goes."""
    with process(*tiny(folder, "--grace", 20, "--api-key-file", folder / "keys")) as (running, address):
        steer = {"misvo": {"reward": "slow", "rollouts": 2, "steps": 6}}
        options = {"model": "tiny", "prompt": "a b", "max_tokens": 4, "seed": 1, "extra_body": steer}
        ask, done = client(address, "sesame"), {}
        expected = ask.completions.create(**options).choices[0].text

        def blocking():
            done["blocking"] = ask.completions.create(**options).choices[0].text

        def streamed():
            chunks = ask.completions.create(stream=True, **options)
            done["streamed"] = "".join(chunk.choices[0].text for chunk in chunks if chunk.choices)

        threads = [threading.Thread(target=task) for task in (blocking, streamed)]
        for thread in threads:
            thread.start()
        time.sleep(0.4)
        running.send_signal(signal.SIGTERM)
        time.sleep(0.2)
        with pytest.raises((openai.APIConnectionError, openai.InternalServerError)):
            ask.completions.create(model="tiny", prompt="a b", max_tokens=4)
        for thread in threads:
            thread.join(30)
        assert running.wait(20) in (0, -signal.SIGTERM)
        assert done == {"blocking": expected, "streamed": expected}
        said = running.stdout.read()
        assert "sesame" not in said and "Traceback" not in said and "a b" not in said, said


@pytest.mark.parametrize("sign", [signal.SIGTERM, signal.SIGINT])
def test_what_does_not_end_in_time_is_told(folder, sign):
    """A reward that hangs for ten minutes holds nobody: after the grace time its clients hear of it."""
    with process(*tiny(folder, "--grace", 3)) as (running, address):
        said = {}
        body = {"model": "tiny", "prompt": "a b", "max_tokens": 4, "misvo": {"reward": "stuck", "rollouts": 2}}

        def blocking():
            said["blocking"] = httpx2.post(f"{address}/v1/completions", json=body, timeout=60, trust_env=False)

        def streamed():
            sent = {**body, "stream": True}
            said["streamed"] = httpx2.post(f"{address}/v1/completions", json=sent, timeout=60, trust_env=False).text

        threads = [threading.Thread(target=task) for task in (blocking, streamed)]
        for thread in threads:
            thread.start()
        time.sleep(0.5)
        started = time.monotonic()
        running.send_signal(sign)
        for thread in threads:
            thread.join(30)
        assert running.wait(20) in (0, -sign, 130) and time.monotonic() - started < 15
        assert said["blocking"].status_code == 503 and said["blocking"].headers["x-should-retry"] == "true"
        last = said["streamed"].strip().split("\n\n")[-1]
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "stopping"


def test_refusals_of_the_command_line(folder):
    def refused(*options):
        command = [sys.executable, "-m", "misvo.cli", "serve", *map(str, options)]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert ended.returncode == 2 and "Traceback" not in ended.stderr
        return ended.stderr

    assert "write --reward as NAME=SPEC" in refused("--reward", "=x")
    assert "there is no file" in refused("--model", folder / "tiny", "--reward", "x=missing.py:f")
    assert "an API key is one word" in refused("--api-key", "two words")


@pytest.mark.slow
def test_smollm2_end_to_end(smollm2):
    """The embedded model behind the stock client: a plain answer, a steered one, a stream, a background response."""
    prompt = [{"role": "user", "content": "Give me one tip for sleeping better."}]
    steer = {"reward": "cheer", "rollouts": 4, "steps": 2}
    how = {"max_tokens": 16, "seed": 42, "model": "smollm2-135m", "messages": prompt}
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with process("--reward", "cheer=sentiment", "--default-tokens", 16, seconds=300) as (_, address):
        ask = client(address)
        plain = ask.chat.completions.create(**how)
        assert plain.choices[0].message.content == smollm2.generate(prompt, seed=42, max_new_tokens=16)
        steered = ask.chat.completions.create(**how, extra_body={"misvo": steer})
        result = misvo.steer(smollm2, prompt, "sentiment", rollouts=4, steps=2, max_new_tokens=16, seed=42)
        assert steered.choices[0].message.content == result.text
        assert steered.misvo["answers"][0]["reward"] == pytest.approx(result.reward, abs=1e-9)
        chunks = list(ask.chat.completions.create(**how, stream=True, extra_body={"misvo": steer}))
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == result.text
        steer = {"misvo": {**steer, "seed": 42}}
        response = ask.responses.create(model="smollm2-135m", input=prompt, background=True, extra_body=steer)
        while response.status in ("queued", "in_progress"):
            time.sleep(0.2)
            response = ask.responses.retrieve(response.id)
        assert response.output_text == result.text
