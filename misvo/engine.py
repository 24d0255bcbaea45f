"""What an engine is: it decodes requests, many at a time, and knows token ids, not text, rewards or updates.

    ticket = engine.submit(request)
    while finished := engine.advance(): ...      # one token for every row in flight; what it finished

Implementations are classes of this protocol in `misvo.engines`, one file each. Random numbers have addresses, so a
request gives the same tokens on every engine, in whatever company, up to near ties of the last digits.
"""

from collections import deque
from collections.abc import Sequence
from typing import Protocol

from misvo.errors import MisvoError
from misvo.head import Head
from misvo.rollouts import Request, Rollouts

Ticket = int


class Engine(Protocol):
    """An engine that decodes requests with an adapter, too, says so by `adapts = True`."""

    head: Head
    max_rows: int  # that decode together; what asks for more waits
    drawn: int  # tokens, of all requests so far

    @property
    def in_flight(self) -> int:
        """Rows that decode together now."""
        ...

    def submit(self, request: Request) -> Ticket:
        """Queue a request."""
        ...

    def advance(self) -> list[tuple[Ticket, Rollouts]]:
        """One token for every row in flight; gives the requests that this token finished."""
        ...

    def cancel(self, ticket: Ticket) -> None:
        """Take a request out: its rows leave the batch before the next token. Nothing for a ticket that has ended."""
        ...

    def room(self, request: Request) -> bool:
        """Whether a request would begin at once."""
        ...

    def written(self, ticket: Ticket) -> list[list[int]] | None:
        """The tokens of each row of a request so far; None where an engine does not know them before the end."""
        return None

    def limit(self, rows: int) -> None:
        """At most so many rows from now on; those that are in flight stay."""
        self.max_rows = rows

    def forget(self, prompt: tuple[int, ...]) -> None:
        """Let go of what was kept of a prompt; no more requests of it will come."""
        ...

    @property
    def busy(self) -> bool:
        """Whether anything is in flight or waiting."""
        ...

    def close(self) -> None:
        """Drop everything."""
        ...

    def run(self, request: Request) -> Rollouts:
        """Decode one request to its end."""
        ticket = self.submit(request)
        while self.busy:
            for finished, rollouts in self.advance():
                if finished == ticket:
                    return rollouts
        raise MisvoError("the request was cancelled.")

    def run_many(self, requests: Sequence[Request]) -> list[Rollouts]:
        """Decode requests of different prompts to their end, together as far as there is room."""
        left = deque(enumerate(requests))
        flying: dict[Ticket, int] = {}  # index of each request
        done: dict[int, Rollouts] = {}
        while left or flying:
            while left and self.room(left[0][1]):
                index, request = left.popleft()
                flying[self.submit(request)] = index
            for ticket, rollouts in self.advance():
                index = flying.pop(ticket)
                done[index] = rollouts
                self.forget(requests[index].prompt)
        return [done[index] for index in range(len(requests))]
