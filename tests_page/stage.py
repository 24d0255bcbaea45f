"""What the tests of the page stand on: servers in processes of their own, and saved runs to look at."""

import re
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import httpx2

import misvo
from misvo.candidate import Candidate
from tests.conftest import letter_reward, make_model, make_policy, make_tokenizer

HOSTILE = '"><img src=x onerror="window.hacked=1"><script>window.hacked=1</script>'
RIGHT_TO_LEFT = "\u202eevil\u2066 שלום \u202c"
SLOW = """
import time

def slow(completions, **_):
    time.sleep(0.4)
    return [float(len(text)) for text in completions]
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Server:
    """A server and its address. `kill` leaves clients in mid-sentence; `start` works again, at the same address."""

    def __init__(self, command: str, *options):
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.command = [sys.executable, "-m", "misvo.cli", command, *map(str, options), "--port", str(self.port)]
        self.process: subprocess.Popen | None = None

    def start(self, seconds: float = 240) -> "Server":
        self.process = subprocess.Popen(self.command)
        end = time.monotonic() + seconds
        while True:
            assert self.process.poll() is None and time.monotonic() < end, "the server did not start"
            try:
                if httpx2.get(f"{self.url}/health", trust_env=False).status_code == 200:
                    return self
            except httpx2.TransportError:
                time.sleep(0.1)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def get(self, path: str, **how):
        return httpx2.get(f"{self.url}/misvo/v1{path}", trust_env=False, timeout=60, **how).json()

    def post(self, path: str, **body):
        return httpx2.post(f"{self.url}/misvo/v1{path}", json=body, trust_env=False, timeout=60).json()

    def wait_until(self, holds, seconds: float = 60):
        end = time.monotonic() + seconds
        while not holds():
            assert time.monotonic() < end, "it never came about"
            time.sleep(0.05)


@contextmanager
def running(command: str, *options):
    server = Server(command, *options).start()
    try:
        yield server
    finally:
        server.kill()


def tiny_checkpoint(folder: Path) -> tuple:
    """Options of a server on a model that loads in no time, with a reward that takes its time."""
    make_model("llama").save_pretrained(folder / "tiny")
    make_tokenizer(chat=True).save_pretrained(folder / "tiny")
    (folder / "rewards.py").write_text(SLOW)
    return ("--model", folder / "tiny", "--reward", f"slow={folder / 'rewards.py'}:slow")


def real_run() -> misvo.Result:
    """A small run of a tiny model, on a sum of two rewards."""
    reward = misvo.rewards.Combined({"letters": letter_reward, "brief": "length:4"}, {"brief": 0.5})
    return misvo.steer(make_policy(chat=True), "a b c", reward, rollouts=6, steps=4, max_new_tokens=8, seed=3)


def hostile_run() -> misvo.Result:
    """Texts, parts and notes that nobody means well with."""
    run = real_run()
    texts = [HOSTILE, RIGHT_TO_LEFT + HOSTILE, "</title></style></textarea><!--", "\x00\x1b[31m\u2028'\"&amp;<b>", "ok"]
    for index, one in enumerate(run.candidates):
        said = {"text": texts[index % len(texts)], "parts": {HOSTILE: 1.0, RIGHT_TO_LEFT: None}}
        run.candidates[index] = Candidate(**{**vars(one), **said})
    run.candidates[2] = Candidate(**{**vars(run.candidates[2]), "reward": None})
    run.trace[-1]["note"] = HOSTILE
    run.prompt = [{"role": "system", "content": RIGHT_TO_LEFT}, {"role": "user", "content": HOSTILE}]
    run.pieces = []
    return run


def large_run(rollouts: int = 64, steps: int = 64) -> misvo.Result:
    """4,096 responses of forty words: as many as a run of the paper's size has, and more."""
    base = real_run()
    words = ["go", "to", "bed", "and", "keep", "your", "room", "dark", "quiet", "cool", "calm"]
    candidates = []
    for step in range(steps):
        for rollout in range(rollouts):
            number = step * rollouts + rollout
            text = " ".join(words[(number * 7 + place * place) % len(words)] for place in range(40)) + f" {number}"
            reward = None if number % 97 == 0 else ((number * 2654435761) % 100_003) / 100_003
            nats = [((number + place) % 13) / 50 for place in range(40)]
            candidates.append(
                Candidate(step, rollout, list(range(40)), text, reward, -2.0 - reward_of(reward), nats, True)
            )
    rows = [
        {**base.trace[0], "step": step, "mean": step / steps, "max": 1.0, "best": 1.0, "tokens": 40 * rollouts}
        for step in range(steps)
    ]
    settings = misvo.Settings.from_preset(rollouts=rollouts, steps=steps, max_new_tokens=40, select="best")
    return misvo.Result("How can I sleep better?", settings, candidates, rows, reference=candidates[1])


def reward_of(reward: float | None) -> float:
    return 0.0 if reward is None else reward


def number(text: str) -> float:
    """A figure of the page: it has a true minus."""
    found = re.search(r"[−-]?\d+(\.\d+)?(e[−-]?\d+)?", text)
    assert found, text
    return float(found[0].replace("−", "-"))


def until(page, expression: str, arg=None, seconds: float = 60):
    """What an expression gives once that is true. Playwright lets the page evaluate texts, which it forbids."""
    end = time.monotonic() + seconds
    while not (value := page.evaluate(expression, arg)):
        assert time.monotonic() < end, f"it never came about: {expression}"
        page.wait_for_timeout(50)
    return value
