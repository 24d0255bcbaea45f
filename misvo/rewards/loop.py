"""Async rewards: one event loop in a thread of its own, for the life of the process.

A client that a reward opened in one call (httpx, aiohttp, openai) belongs to the loop in which it was first used, so
the calls of all steps have to meet the same loop. A thread of its own also serves where the caller's thread runs a loop
already, as in a notebook, and several async rewards of a sum run side by side in it.
"""

import asyncio
import functools
import os
import threading
from collections.abc import Awaitable, Coroutine
from concurrent.futures import Future

from misvo.errors import MisvoError


def start(awaitable: Awaitable) -> Future:
    """Let the loop work on it; `wait` has what comes of it."""
    loop = _loop(os.getpid())
    if threading.current_thread().name == _THREAD:
        if isinstance(awaitable, Coroutine):
            awaitable.close()
        raise MisvoError("an async reward cannot wait for another one that misvo calls: await that one itself.")
    return asyncio.run_coroutine_threadsafe(_awaited(awaitable), loop)


def wait(future: Future):
    """What an awaitable gave or raised. Somebody who presses Ctrl-C cancels it."""
    try:
        return future.result()
    except BaseException:
        future.cancel()
        raise


async def gathered(awaitables) -> list:
    """What many give, side by side; where one fails, the others are not left behind in the loop."""
    results = await asyncio.gather(*map(_awaited, awaitables), return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


_THREAD = "misvo-async-rewards"


@functools.cache
def _loop(_: int) -> asyncio.AbstractEventLoop:
    """The loop of a process, by its id: a fork has the object of its parent, but not the thread."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name=_THREAD, daemon=True).start()
    return loop


async def _awaited(awaitable):
    try:
        return await awaitable
    except (SystemExit, KeyboardInterrupt) as error:  # would end the thread of the loop, and all later calls with it
        raise RuntimeError(f"{type(error).__name__} in an async reward") from error
