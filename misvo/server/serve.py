"""The application on uvicorn: one process, one loop, an orderly end.

At SIGTERM or Ctrl-C no new request is taken; those that run have the grace time to end, and are told then. A second
signal does not wait.
"""

import asyncio
import logging
from collections.abc import Callable

import uvicorn
from fastapi import FastAPI

from misvo.errors import MisvoError
from misvo.server.core import Core

CONNECTIONS = 2048  # open at once; beyond, 503
TELLING = 2.0  # seconds of the grace time that are for telling clients


class Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, core: Core, grace: float, on_start: Callable[[int], None]):
        super().__init__(config)
        self.core, self.grace, self.on_start = core, grace, on_start
        self._draining: asyncio.Task | None = None

    def handle_exit(self, sig, frame) -> None:
        self.core.stopping = True
        super().handle_exit(sig, frame)

    async def startup(self, sockets=None) -> None:
        await super().startup(sockets)
        if self.started:
            self.on_start(self.servers[0].sockets[0].getsockname()[1])

    async def shutdown(self, sockets=None) -> None:
        self._draining = asyncio.ensure_future(self.core.drain(max(0.0, self.grace - TELLING)))
        await super().shutdown(sockets)
        self._draining.cancel()


def run(app: FastAPI, host: str, port: int, grace: float, on_start: Callable[[int], None]) -> None:
    """Until a signal comes; `on_start` hears of the port, which the system chooses where it is 0."""
    logging.basicConfig(level=logging.INFO, format="misvo: %(message)s")
    for chatty in ("httpx", "httpx2", "urllib3"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
    config = uvicorn.Config(
        app,
        host=host,
        port=port,
        log_config=None,
        log_level="warning",
        access_log=False,
        server_header=False,
        limit_concurrency=CONNECTIONS,
        timeout_graceful_shutdown=max(1, round(grace)),
        timeout_keep_alive=30,
        ws="none",
        lifespan="on",
    )
    server = Server(config, app.state.core, grace, on_start)
    server.run()
    if not server.started:
        raise MisvoError(
            f"the server could not be started at {host}:{port}: is the port taken? --port 0 takes a free one."
        )
