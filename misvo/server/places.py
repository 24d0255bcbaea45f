"""Who may come in: limits on requests and on the tokens that they may decode, of all clients together and of each.

A place is taken before any work. A client is a key, or an address where there are no keys.
"""

import math
import threading
from dataclasses import dataclass

from misvo.server.config import Limits
from misvo.server.errors import ApiError

SHORTEST, LONGEST = 1, 60  # seconds that a client is told to wait; the openai client gives up above 120


@dataclass
class Held:
    """Requests that run or wait, and the tokens that they may decode."""

    requests: int = 0
    tokens: int = 0

    def full(self, tokens: int, most: int, load: int) -> bool:
        """Whether there is no room for so many tokens more; one request may always come to an empty place."""
        return self.requests >= most or self.tokens + tokens > max(load, tokens)

    def add(self, requests: int, tokens: int) -> None:
        self.requests += requests
        self.tokens += tokens


class Places:
    def __init__(self, limits: Limits):
        self.limits, self._all = limits, Held()
        self._clients: dict[str, Held] = {}  # those that hold a place
        self._lock = threading.Lock()

    @property
    def taken(self) -> int:
        return self._all.requests

    @property
    def tokens(self) -> int:
        return self._all.tokens

    def check(self, tokens: int) -> None:
        """Refuse what would be too much even for an empty server."""
        if tokens > self.limits.request:
            raise ApiError(
                400,
                f"this request may decode {tokens} tokens (rollouts × steps × max_tokens): the limit of this server is "
                f"{self.limits.request}.",
                code="request_too_large",
            )

    def take(self, client: str, tokens: int, tokens_per_second: float) -> None:
        limits = self.limits
        with self._lock:
            if self._all.full(tokens, limits.queue, limits.load):
                wait = _wait(self._all.tokens, tokens_per_second)
                raise ApiError(503, "the server is full: try again later.", code="full", retry_after=wait, retry=True)
            own = self._clients.get(client, Held())
            if own.full(tokens, limits.client_queue or limits.queue, limits.client_load or limits.load):
                wait = _wait(own.tokens, tokens_per_second)
                said = "you have as much under way as one client may: try again later."
                raise ApiError(429, said, code="client_full", retry_after=wait, retry=True)
            self._clients[client] = own
            own.add(1, tokens)
            self._all.add(1, tokens)

    def give_back(self, client: str, tokens: int) -> None:
        with self._lock:
            self._all.add(-1, -tokens)
            self._clients[client].add(-1, -tokens)
            if not self._clients[client].requests:
                del self._clients[client]


def _wait(tokens: int, tokens_per_second: float) -> int:
    """A guess when there will be room: when a quarter of the work is done."""
    wait = tokens / 4 / tokens_per_second if tokens_per_second > 0 else SHORTEST
    return min(LONGEST, max(SHORTEST, math.ceil(wait)))
