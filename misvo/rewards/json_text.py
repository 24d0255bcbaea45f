"""How far a text is JSON: all of it, a beginning that can still become JSON, or broken somewhere.

The grammar is RFC 8259: no NaN, no Infinity, no comments, no comma before a closing bracket. A value of any kind will
do, a number too. A Markdown fence around it (```json) is accepted, closed or not. The reader walks once over the text
with a stack of its own, so that neither length nor depth of a text is a danger.
"""

import re
from dataclasses import dataclass

_OPENING_FENCE = re.compile(r"```[ \t]*[\w+-]*[ \t]*(?:\r?\n|\Z)|`{1,2}\Z")
_CLOSING_FENCE = re.compile(r"`{0,3}\s*\Z")
_END = re.compile(r"\Z")
_BLANKS = re.compile(r"[ \t\n\r]*")
_LETTERS = re.compile(r'(?:[^"\\\x00-\x1f]++|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))*+')  # inside a string
_OPEN_ESCAPE = re.compile(r"\\(?:u[0-9a-fA-F]{0,3})?\Z")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*+)(?:\.[0-9]++)?(?:[eE][+-]?[0-9]++)?")
_OPEN_NUMBER = re.compile(r"-\Z|-?(?:0|[1-9][0-9]*+)(?:\.\Z|(?:\.[0-9]++)?[eE][+-]?\Z)")
_NAMES = ("true", "false", "null")
_CLOSERS = {"{": "}", "[": "]"}


@dataclass(frozen=True)
class Reading:
    """`complete` is JSON; else `valid` characters of `length` are a beginning of JSON, all of them where it is open.

    `closed` is that beginning after its last value, with its brackets closed: JSON, or empty where no value has begun.
    """

    complete: bool
    valid: int
    length: int
    closed: str
    depth: int  # of the deepest nesting


class _End(Exception):
    """The text ends, or breaks, at `place`."""

    def __init__(self, place):
        self.place = place


def read(text: str) -> Reading:
    text = text.strip()
    reader = _Reader(text)
    try:
        reader.value_of_text()
    except _End as end:
        return Reading(False, end.place, len(text), reader.closed(), reader.depth)
    return Reading(True, len(text), len(text), reader.closed(), reader.depth)


class _Reader:
    """Walks over a text, keeping the closers of the open brackets and the place after the last value."""

    def __init__(self, text):
        self.text, self.place = text, 0
        self.closers, self.depth = [], 0
        self.start = self.last = 0  # where JSON begins, and the end of its last value or opened bracket

    def closed(self):
        return self.text[self.start : self.last] + "".join(reversed(self.closers)) if self.last > self.start else ""

    def value_of_text(self):
        fence = _OPENING_FENCE.match(self.text)
        if fence:
            self.place = self.start = self.last = fence.end()
        self.value()
        while self.closers:
            self.after_value()
        self.blanks()
        closing = _CLOSING_FENCE if fence else _END
        self.expect(closing.match(self.text, self.place))

    def value(self):
        """One value, or an opened bracket with the first value in it, and so on down."""
        while True:
            letter = self.next()
            if letter == '"':
                self.string()
            elif letter in _CLOSERS:
                self.place += 1
                self.closers.append(_CLOSERS[letter])
                self.depth = max(self.depth, len(self.closers))
                self.last = self.place
                if self.next() != self.closers[-1]:
                    if letter == "{":
                        self.key()
                    continue
                self.place += 1
                self.closers.pop()
            else:
                self.number_or_name()
            self.last = self.place
            return

    def after_value(self):
        """A comma and the next value, or the closing bracket."""
        letter = self.next()
        self.expect(letter in (",", self.closers[-1]))
        self.place += 1
        if letter == ",":
            if self.closers[-1] == "}":
                self.key()
            self.value()
        else:
            self.closers.pop()
            self.last = self.place

    def key(self):
        self.expect(self.next() == '"')
        self.string()
        self.expect(self.next() == ":")
        self.place += 1

    def string(self):
        self.place = _LETTERS.match(self.text, self.place + 1).end()
        if _OPEN_ESCAPE.match(self.text, self.place):
            raise _End(len(self.text))
        self.expect(self.text[self.place : self.place + 1] == '"')
        self.place += 1

    def number_or_name(self):
        if _OPEN_NUMBER.match(self.text, self.place):
            raise _End(len(self.text))
        number = _NUMBER.match(self.text, self.place)
        if number:
            self.place = number.end()
            return
        rest = self.text[self.place : self.place + 5]
        for name in _NAMES:
            if rest.startswith(name):
                self.place += len(name)
                return
            if name.startswith(rest) and self.place + len(rest) == len(self.text):
                raise _End(len(self.text))
        raise _End(self.place)

    def blanks(self):
        self.place = _BLANKS.match(self.text, self.place).end()

    def next(self):
        """The letter after blanks; the end of the text, where a beginning is open, raises."""
        self.blanks()
        if self.place == len(self.text):
            raise _End(self.place)
        return self.text[self.place]

    def expect(self, right):
        if not right:
            raise _End(self.place)
