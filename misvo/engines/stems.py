"""Rows that were cut off and will be continued: what was read of them is kept, so that nothing is read twice.

A stem is found by its tokens. Any number of rows may go on from it, each with random numbers of its own, so that this
is all that a particle filter needs of an engine.
"""

from dataclasses import dataclass

from misvo.model import Prefix
from misvo.rollouts import Request

Address = tuple[tuple[int, ...], int, int]  # prompt, seed, step


@dataclass(frozen=True)
class Stem:
    """One row of what was read."""

    prefix: Prefix
    row: int


class Stems:
    def __init__(self):
        self._kept: dict[Address, dict[tuple[int, ...], Stem]] = {}

    def __len__(self) -> int:
        """Rows that are kept."""
        return sum(len(stems) for stems in self._kept.values())

    def keep(self, request: Request, beginnings: list[tuple[int, ...]], prefix: Prefix) -> None:
        """Keep rows of a request with these tokens behind the prompt, in the order of `prefix`."""
        stems = self._kept.setdefault(_address(request), {})
        stems |= {beginning: Stem(prefix, row) for row, beginning in enumerate(beginnings)}

    def take(self, request: Request) -> list[Stem | None]:
        """What was kept for each row of a request; all of its step is let go of."""
        stems = self._kept.pop(_address(request), {})
        return [stems.get(request.beginning(row)) for row in range(len(request.rollouts))]

    def forget(self, prompt: tuple[int, ...]) -> None:
        self._kept = {address: stems for address, stems in self._kept.items() if address[0] != prompt}

    def clear(self) -> None:
        self._kept.clear()


def _address(request: Request) -> Address:
    return request.prompt, request.seed, request.step
