"""Server-sent events: lines of data, comments in silence, and an ear for clients that leave or do not read.

A stream has data lines only: stock clients take every event for a chunk, whatever its name. An `id:` is sent where a
route of our own asks for it. The connection is watched from the first byte on, also while nothing is sent.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from misvo.server.errors import dumps

HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
DONE = "data: [DONE]\n\n"

T = TypeVar("T")


class Left(Exception):
    """The client went away."""


def data(content, id: int | None = None) -> str:
    """One event."""
    return f"data: {dumps(content)}\n\n" if id is None else f"id: {id}\ndata: {dumps(content)}\n\n"


async def attended(request: Request, work: Awaitable[T]) -> T:
    """What something gives, unless the client leaves before: then it is cancelled."""
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_gone(request.receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise Left
        return task.result()
    finally:
        for one in (task, gone):
            one.cancel()
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await task


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Sends what an iterator gives; `at_end` is called when that is over, or when the client has left."""

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncIterator[str],
        *,
        keep_alive: float,
        send_seconds: float,
        at_end: Callable[[bool], None],  # whether the client left
        headers: dict[str, str] | None = None,
    ):
        self.events, self.keep_alive, self.send_seconds, self.at_end = events, keep_alive, send_seconds, at_end
        self.status_code, self.background, self.body = 200, None, b""
        self.init_headers({**HEADERS, **(headers or {})})
        del self.headers["content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        writer, gone = asyncio.ensure_future(self._write(send)), asyncio.ensure_future(_gone(receive))
        left = True
        try:
            await asyncio.wait({writer, gone}, return_when=asyncio.FIRST_COMPLETED)
            if writer.done():
                writer.result()
                left = False
        except TimeoutError:  # it does not read
            pass
        finally:
            for one in (writer, gone):
                one.cancel()
            self.at_end(left)
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await writer

    async def _write(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        pending: asyncio.Future | None = None
        try:
            while True:
                pending = pending or asyncio.ensure_future(anext(self.events, None))
                await asyncio.wait({pending}, timeout=self.keep_alive)
                if not pending.done():
                    await self._send(send, ": keep-alive\n\n")
                    continue
                event, pending = pending.result(), None
                if event is None:
                    break
                await self._send(send, event)
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            if pending is not None:
                pending.cancel()

    async def _send(self, send: Send, text: str) -> None:
        message = {"type": "http.response.body", "body": text.encode("ascii"), "more_body": True}
        async with asyncio.timeout(self.send_seconds):  # wait_for may swallow that this task is cancelled
            await send(message)
