"""Ask `misvo serve` with the openai package: a plain sample, a steered one, a stream that shows progress.

misvo serve --reward cheer=sentiment          # in another terminal; here, one is started where no address is given
python examples/server_client.py http://127.0.0.1:8000/v1
"""

import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import contextmanager

from openai import OpenAI

MESSAGES = [{"role": "user", "content": "Give me one tip for sleeping better."}]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextmanager
def served():
    """A server of our own, until we are done."""
    port = free_port()
    command = [sys.executable, "-m", "misvo.cli", "serve", "--reward", "cheer=sentiment", "--port", str(port)]
    server = subprocess.Popen(command)
    try:
        while server.poll() is None:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1)
                break
            except (urllib.error.URLError, TimeoutError):
                time.sleep(0.2)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        server.terminate()
        server.wait(timeout=30)


def main(address: str) -> dict:
    client = OpenAI(base_url=address, api_key="none")
    plain = client.chat.completions.create(model="smollm2-135m", messages=MESSAGES, max_tokens=20, seed=1)
    print("plain:  ", plain.choices[0].message.content)
    asked = {"reward": "cheer", "rollouts": 4, "steps": 2}
    steered = client.chat.completions.create(
        model="smollm2-135m", messages=MESSAGES, max_tokens=20, seed=1, extra_body={"misvo": asked}
    )
    print("steered:", steered.choices[0].message.content, steered.misvo["answers"][0]["reward"])
    streamed = client.chat.completions.create(
        model="smollm2-135m", messages=MESSAGES, max_tokens=20, seed=1, stream=True, extra_body={"misvo": asked}
    )
    text = ""
    for chunk in streamed:
        progress = (chunk.model_extra or {}).get("misvo")
        if progress:
            print("  ", progress)
        text += (chunk.choices and chunk.choices[0].delta.content) or ""
    return {"plain": plain.choices[0].message.content, "steered": steered.choices[0].message.content, "streamed": text}


if __name__ == "__main__":
    if len(sys.argv) > 1:
        answers = main(sys.argv[1])
    else:
        with served() as address:
            answers = main(address)
