"""`misvo serve` as a process of its own: started from the shell, asked by the stock client, stopped by signals."""

import asyncio
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
from serving import served

import misvo
from misvo.cli import app
from misvo.errors import MisvoError
from misvo.server import Config

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


def stopped(folder, sign):
    """What clients hear of a server that is told to stop while it answers them, and how long it took to go."""
    heard = {}
    with process(*tiny(folder, "--grace", 6, "--api-key-file", folder / "keys")) as (running, address):
        ask = client(address, "sesame")
        options = {"model": "tiny", "prompt": "a b", "max_tokens": 4, "seed": 1}
        slow, stuck = ({"misvo": {"reward": name, "rollouts": 2, "steps": 6}} for name in ("slow", "stuck"))
        heard["expected"] = ask.completions.create(**options, extra_body=slow).choices[0].text

        def streamed():
            chunks = ask.completions.create(stream=True, extra_body=slow, **options)
            heard["streamed"] = "".join(chunk.choices[0].text for chunk in chunks if chunk.choices)

        def blocking():
            heard["blocking"] = ask.completions.create(extra_body=slow, **options).choices[0].text

        def told():
            headers = {"Authorization": "Bearer tahini"}
            how = {"json": {**options, **stuck}, "headers": headers, "timeout": 60, "trust_env": False}
            heard["told"] = httpx2.post(f"{address}/v1/completions", **how)

        def told_in_a_stream():
            try:
                list(ask.completions.create(stream=True, extra_body=stuck, **options))
            except openai.APIError as error:
                heard["told in a stream"] = error.code

        threads = [threading.Thread(target=task) for task in (streamed, blocking, told, told_in_a_stream)]
        for thread in threads:
            thread.start()
        time.sleep(0.5)
        started = time.monotonic()
        running.send_signal(sign)
        time.sleep(0.2)
        try:
            ask.completions.create(**options)
        except (openai.APIConnectionError, openai.InternalServerError) as error:
            heard["new"] = type(error).__name__
        for thread in threads:
            thread.join(30)
        heard["code"] = running.wait(30)
        heard["seconds"] = time.monotonic() - started
        heard["log"] = running.stdout.read()
    return heard


@pytest.mark.parametrize("sign", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_a_signal_ends_it_in_order(folder, sign):
    """No new requests; those that can end do; a reward that hangs for ten minutes holds nobody beyond the grace."""
    heard = stopped(folder, sign)
    assert heard["streamed"] == heard["blocking"] == heard["expected"]
    assert heard["told"].status_code == 503 and heard["told"].headers["x-should-retry"] == "true"
    assert heard["told"].json()["error"]["code"] == heard["told in a stream"] == "stopping"
    assert "new" in heard and heard["code"] in (0, -sign, 130) and heard["seconds"] < 15
    assert not any(word in heard["log"] for word in ("sesame", "tahini", "Traceback", "a b")), heard["log"]


def test_refusals_of_the_command_line():
    for options, said in (
        (["--reward", "=x"], "write --reward as NAME=SPEC"),
        (["--api-key", "two words"], "an API key is one word"),
        (["--api-key-file", "missing"], "could not be read"),
    ):
        with pytest.raises(MisvoError, match=said):
            app(["serve", *options], standalone_mode=False)


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


@pytest.mark.slow
def test_throughput_is_that_of_steer_many(smollm2):
    """Six clients at once, each with a prompt of its own: CPU time for each token, the clients' own included."""
    prompts = [f"Give me tip number {number} for sleeping better." for number in range(6)]
    chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
    how = {"rollouts": 4, "steps": 3, "max_new_tokens": 32, "seed": 1}

    def together():
        started = time.process_time()
        results = misvo.steer_many(smollm2, chats, "length:12", **how)
        return time.process_time() - started, [result.text for result in results]

    def by_clients(server):
        async def ask():
            async with server.async_client(timeout=600) as client:
                body = {"misvo": {"reward": "length:12", "rollouts": 4, "steps": 3}}
                asked = {"model": "smollm2-135m", "seed": 1, "max_tokens": 32, "extra_body": body}
                return await asyncio.gather(*(client.chat.completions.create(messages=chat, **asked) for chat in chats))

        started = time.process_time()
        answers = asyncio.run(ask())
        return time.process_time() - started, [answer.choices[0].message.content for answer in answers]

    with served(smollm2, {}, Config()) as server:
        server.client().completions.create(model="smollm2-135m", prompt="Hello", max_tokens=2)
        first, texts = together()
        seconds, answers = by_clients(server)
        again, _ = together()
    ratio = (first + again) / 2 / seconds
    print(f"tokens per second of CPU time, against steer_many: {ratio:.3f}")
    assert answers == texts
    assert ratio > 0.8  # of a short run: the first client begins alone, so that rows stand at different places
