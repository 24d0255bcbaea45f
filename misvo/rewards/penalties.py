"""`overlength:WORDS` and `repetition:N`: penalties, at most 0, to add to another reward with a weight.

What they count is words as a reader sees them, not tokens of a model, so that they mean the same for every policy.
"""

import re
from collections import Counter

from misvo.errors import MisvoError
from misvo.prompts import as_text


def _whole(name, value, least):
    """A whole number from a spec or from Python, or a sentence about how to write it."""
    text = str(value).strip()
    if not text.isdecimal() or int(text) < least:
        raise MisvoError(f"the reward {name!r} takes a whole number of at least {least}, not {value!r}.")
    return int(text)


class Overlength:
    """Minus the number of words beyond `words`: nothing is lost below it, one for every word above."""

    scores_prefixes = True

    def __init__(self, words):
        self.words = _whole("overlength", words, 0)

    def __call__(self, prompts, completions, **columns):
        return [-float(max(0, len(as_text(completion).split()) - self.words)) for completion in completions]


class Repetition:
    """Minus the share of runs of `n` words that stood in the response before: 0 is all new, towards −1 all repeated.

    Words are compared without case, and every punctuation mark is a word, so that a wall of `!!!!` repeats itself.
    A script without spaces counts as one word between marks.
    """

    scores_prefixes = True

    def __init__(self, n=3):
        self.n = _whole("repetition", n, 1)

    def __call__(self, prompts, completions, **columns):
        return [-self._share(as_text(completion)) for completion in completions]

    def _share(self, text):
        words = re.findall(r"\w+|[^\w\s]", text.casefold())
        runs = Counter(zip(*(words[start:] for start in range(self.n)), strict=False))
        total = sum(runs.values())
        return (total - len(runs)) / total if total else 0.0
