"""Who may come in: a limit on requests and on the tokens that they may decode. A place is taken before any work."""

import math
import threading

from misvo.server.config import Limits
from misvo.server.errors import ApiError

SHORTEST, LONGEST = 1, 60  # seconds that a client is told to wait; the openai client gives up above 120


class Places:
    def __init__(self, limits: Limits):
        self.limits = limits
        self.taken = self.tokens = 0  # requests, and what they may decode
        self._lock = threading.Lock()

    def check(self, tokens: int) -> None:
        """Refuse what would be too much even for an empty server."""
        if tokens > self.limits.request:
            raise ApiError(
                400,
                f"this request may decode {tokens} tokens (rollouts × steps × max_tokens): the limit of this server is "
                f"{self.limits.request}.",
                code="request_too_large",
            )

    def take(self, tokens: int, tokens_per_second: float) -> None:
        with self._lock:
            if self.taken >= self.limits.queue or self.tokens + tokens > max(self.limits.load, tokens):
                raise full(self.tokens, tokens_per_second)
            self.taken += 1
            self.tokens += tokens

    def give_back(self, tokens: int) -> None:
        with self._lock:
            self.taken -= 1
            self.tokens -= tokens


def full(tokens: int, tokens_per_second: float) -> ApiError:
    """The refusal, with a guess when there will be room: when a quarter of the work is done."""
    wait = tokens / 4 / tokens_per_second if tokens_per_second > 0 else SHORTEST
    seconds = min(LONGEST, max(SHORTEST, math.ceil(wait)))
    return ApiError(503, "the server is full: try again later.", code="full", retry_after=seconds, retry=True)
