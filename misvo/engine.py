"""What an engine is: it decodes requests, many at a time, and knows token ids, not text, rewards or updates.

    ticket = engine.submit(request)
    while finished := engine.advance(): ...      # one token for every row in flight; what it finished

Implementations are in `misvo.engines`, one file each. Random numbers have addresses, so a request gives the same
tokens on every engine, in whatever company, up to near ties of the last digits.
"""

from typing import Protocol

from misvo.head import Head
from misvo.rollouts import Request, Rollouts

Ticket = int


class Engine(Protocol):
    head: Head
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
