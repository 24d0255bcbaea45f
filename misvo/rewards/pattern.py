"""`regex:PATTERN`: 1 where the pattern is found in a response, 0 where it is not, None where that took too long.

Patterns are those of Python's `re`, run by the package `regex`, which can be stopped: some patterns take a time
exponential in the length of a text, `(a+)+$` for one. A response that was not searched to its end could not be scored,
which is not the same as 0. `(?i)` at the beginning ignores case.
"""

import math
import re
import time

from misvo.errors import MisvoError, first_line, short
from misvo.prompts import as_text

SECONDS = 1.0  # for a text
CALL_SECONDS = 10.0  # for all texts of a call, which may be hundreds of beginnings
UNROLLED = 1_000_000  # `regex` copies what is repeated: `((a{999}){999}){999}` would take all memory there is


class Pattern:
    scores_prefixes = True

    def __init__(self, pattern: str):
        self.pattern = compiled(pattern)

    def __call__(self, prompts, completions, **columns):
        end = time.monotonic() + CALL_SECONDS
        return [self._score(as_text(completion), end - time.monotonic()) for completion in completions]

    def _score(self, text, left):
        try:
            return float(found(self.pattern, text, min(SECONDS, left)))
        except TimeoutError:
            return None


def compiled(pattern: str):
    """A pattern of the package `regex`, or one sentence about what is wrong with it."""
    try:
        import regex
    except ImportError as error:
        raise MisvoError("a reward with a pattern needs regex: pip install 'misvo[embedded]'") from error
    # An upper bound of the copies that does not depend on how the pattern is read: all counts, multiplied.
    copies = math.prod(max(1, int(count[:9])) for count in re.findall(r"\{\s*(\d+)", pattern))
    if copies * len(pattern) > UNROLLED:
        raise MisvoError(f"the pattern {short(pattern)!r} repeats too much: give smaller counts in its braces.")
    try:
        return regex.compile(pattern)
    except RecursionError:
        raise MisvoError(f"the pattern {short(pattern)!r} is nested too deeply.") from None
    except regex.error as error:
        raise MisvoError(f"the pattern {short(pattern)!r} cannot be read: {first_line(error)}.") from error


def found(pattern, text: str, seconds: float) -> bool:
    """Whether a compiled pattern is found in a text; TimeoutError where that is not known after so many seconds."""
    if seconds <= 0:
        raise TimeoutError
    try:
        return pattern.search(text, timeout=seconds, concurrent=True) is not None  # others may run meanwhile
    except MemoryError:
        raise TimeoutError from None  # as good as endless
