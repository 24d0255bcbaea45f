"""`contains:a,b,c` and `avoids:a,b`: which of the given words and phrases occur in a response.

Phrases are compared without case (`folding.py`) and as whole words: `art` does not occur in `start`, `c++` does in
`C++17`, because only an edge that is a letter or a digit needs an end of a word beside it. An apostrophe and a hyphen
end a word. Scripts that put no blanks between words have no such ends, and a phrase in one is found anywhere. Each
phrase counts once, however often it occurs: one that is to be avoided is avoided or not.
"""

import csv
import unicodedata
from collections.abc import Sequence

from misvo.errors import MisvoError
from misvo.prompts import as_text
from misvo.rewards.folding import folded

# First words of the Unicode names of letters that are written without blanks between words.
UNSPACED = ("CJK", "HIRAGANA", "KATAKANA", "THAI", "LAO", "KHMER", "MYANMAR", "TIBETAN")


class Contains:
    """The share of the phrases that occur, 0 to 1."""

    scores_prefixes = True
    name = "contains"

    def __init__(self, phrases: Sequence[str]):
        if isinstance(phrases, str) or not all(isinstance(phrase, str) for phrase in phrases):
            raise MisvoError(f"the reward {self.name!r} takes a list of words and phrases, not {phrases!r}.")
        self.phrases = list(dict.fromkeys(filter(None, map(folded, phrases))))  # what is given twice counts once
        if not self.phrases:
            raise MisvoError(f"the reward {self.name!r} needs a word or phrase, as in '{self.name}:sleep,dark room'.")

    @classmethod
    def from_spec(cls, text: str):
        """Phrases with commas in between; one that holds a comma itself stands in double quotation marks."""
        try:
            return cls(next(csv.reader([text], skipinitialspace=True, strict=True)))
        except csv.Error as error:
            raise MisvoError(f"the phrases of the reward '{cls.name}:{text}' cannot be read: {error}.") from error

    def __call__(self, prompts, completions, **columns):
        return [self._share(as_text(completion)) for completion in completions]

    def _share(self, text):
        text = folded(text)
        return sum(occurs(phrase, text) for phrase in self.phrases) / len(self.phrases)


class Avoids(Contains):
    """1 minus the share of the phrases that occur."""

    name = "avoids"

    def _share(self, text):
        return 1.0 - super()._share(text)


def occurs(phrase: str, text: str) -> bool:
    """Whether a phrase stands in a text as whole words; both are folded."""
    start = text.find(phrase)
    while start >= 0:
        end = start + len(phrase)
        if not _one_word(text[start - 1 : start], phrase[0]) and not _one_word(phrase[-1], text[end : end + 1]):
            return True
        start = text.find(phrase, start + 1)
    return False


def _one_word(left, right):
    """Whether two neighbours belong to one word; at the ends of a text, where one of them is missing, they do not."""
    return all(letter and _in_word(letter) for letter in (left, right))


def _in_word(letter):
    kind = unicodedata.category(letter)[0]  # letters, numbers, and marks such as the vowels of Hindi
    return (kind in "LNM" or letter == "_") and not unicodedata.name(letter, "").startswith(UNSPACED)
