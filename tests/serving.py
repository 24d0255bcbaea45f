"""A real server on loopback for tests: uvicorn in a thread of this process, so that a test can look inside."""

import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass

import httpx2
import openai
import uvicorn

from misvo.server import Config, create_app
from misvo.server.core import Core


@dataclass(frozen=True)
class Served:
    url: str
    core: Core

    def http(self, **options) -> httpx2.Client:
        return httpx2.Client(base_url=self.url, timeout=60, trust_env=False, **options)

    def client(self, **options) -> openai.OpenAI:
        return openai.OpenAI(**self._options(options))

    def async_client(self, **options) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(**self._options(options))

    def _options(self, options):
        return {"base_url": f"{self.url}/v1", "api_key": "none", "max_retries": 0, "timeout": 60, **options}

    def wait_until(self, holds, seconds=10.0):
        """Until something is so; a test that waits in vain fails."""
        end = time.monotonic() + seconds
        while not holds():
            assert time.monotonic() < end, "it never came about"
            time.sleep(0.005)

    def idle(self):
        """Until nothing is under way: no place taken, no row in flight."""
        self.wait_until(lambda: self.core.places.taken == 0 and self.core.engine.tally.rows == 0)
        assert self.core.places.tokens == 0


@contextmanager
def served(policy, rewards=None, config=None):
    app = create_app(policy, rewards, config or Config(name="tiny"))
    options = {"port": 0, "log_level": "warning", "timeout_graceful_shutdown": 5, "ws": "none", "lifespan": "on"}
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", **options))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        time.sleep(0.005)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield Served(f"http://127.0.0.1:{port}", app.state.core)
    finally:
        server.should_exit = True
        thread.join(20)
        assert not thread.is_alive()
