"""The text of plain samples while it is being written, as far as no later token can change it.

Held back are letters of which only a part is there, and whatever may turn out to be the beginning of a stop text. So
the pieces that were told, put together, are the beginning of the text that comes out in the end.
"""

import time
from collections.abc import Callable

from misvo.text import before_stop

PAUSE = 0.05  # seconds between two looks at a job: reading its tokens takes time that others could decode in
BROKEN = "\ufffd"  # how a decoder shows a part of a letter


def settled(text: str, stops: tuple[str, ...], tidied: bool = False) -> str:
    """The part of an unfinished text that stays as it is, whatever follows.

    `tidied`: the tokenizer takes blanks away before some words, so the last word may still change.
    """
    ended = before_stop(text, stops)
    if len(ended) < len(text):
        return ended
    text = text.rstrip(BROKEN)
    if tidied:
        text = text.rstrip()
        text = text[: max(text.rfind(" "), 0)]
    begun = (size for stop in stops for size in range(1, len(stop)) if text.endswith(stop[:size]))
    return text[: len(text) - max(begun, default=0)]


class Live:
    """What was told so far of the samples of one prompt."""

    def __init__(self, decode: Callable[[list[int]], str], stops: tuple[str, ...], tidied: bool):
        self.decode, self.stops, self.tidied = decode, stops, tidied
        self._told: dict[int, str] = {}  # by sample
        self._next = 0.0

    def due(self) -> bool:
        now = time.monotonic()
        if now < self._next:
            return False
        self._next = now + PAUSE
        return True

    def pieces(self, rows: list[list[int]]) -> list[tuple[int, str]]:
        """What can be told beyond that of each sample, whose tokens so far these are."""
        found = []
        for index, tokens in enumerate(rows):
            told, text = self._told.get(index, ""), settled(self.decode(tokens), self.stops, self.tidied)
            if len(text) > len(told) and text.startswith(told):
                found.append((index, text[len(told) :]))
                self._told[index] = text
        return found
