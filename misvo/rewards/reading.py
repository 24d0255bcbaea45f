"""`reading-ease` and `reading-grade:6`: how easy the English of a response is to read, by Flesch's two formulas.

    ease  = 206.835 − 1.015 words/sentences − 84.6 syllables/words     90 is very easy, 30 is for graduates
    grade = 0.39 words/sentences + 11.8 syllables/words − 15.59        years of school (Flesch and Kincaid)

Words are runs of letters, with apostrophes inside. A sentence ends at `.`, `!`, `?` or `…` before a blank, at an empty
line and before an item of a list, and has a word in it. Both formulas are kept within bounds, and a text without words,
which nobody can read, has the worst figure.
"""

import math
import re

from misvo.errors import MisvoError
from misvo.prompts import as_text

EASE = (-50.0, 120.0)  # what the figures are kept within
GRADE = (-4.0, 40.0)
GRADES_TO_ASK_FOR = (0.0, 20.0)

_WORD = re.compile(r"[^\W\d_]+(?:['’][^\W\d_]+)*")
_SENTENCE_END = re.compile(r"(?<![.!?…])[.!?…]++[\"'”’)\]*_]*(?:\s+|$)|\n\s*\n|\n(?=\s*(?:[-*•#]|\d+[.)])\s)")

_VOWELS = "aeiouyàáâãäåæèéêëìíîïòóôõöøùúûüýÿœ"
_RUN = re.compile(f"[{_VOWELS}]+")
# make, makes, baked; but ta-ble, ta-bles, han-dled, box-es, want-ed
_SILENT = re.compile(
    f"[^{_VOWELS}]" + r"(?:(?<![^aeiouyl]l)e|(?<![^aeiouyl]l)(?<![sxzcg])(?<![sc]h)es|(?<![^aeiouyl]l)(?<![td])ed)$"
)
# Neighbouring vowels that are sounded apart, and endings with a syllable but no vowel of its own.
_APART = re.compile(
    r"(?<![cgstl])ia(?!ge)"  # me-di-a; not spe-cial, mar-riage
    r"|(?<![cgstlnx])io"  # ra-di-o; not na-tion, mil-lion
    r"|(?<![gq])ua"  # u-su-al; not lan-guage
    r"|(?:[lr](?<!fr)|sc)ien"  # cli-ent, ex-pe-ri-ence, sci-ence; not friend
    r"|iet|oe[mt]|creat(?!ure)|^idea|rea$"  # qui-et, po-em, cre-ate, i-de-a, a-re-a
    r"|[aeouy]ing"  # be-ing
    r"|ism$"  # tour-is-m
    rf"|[^{_VOWELS}'](?<!n)n't$"  # did-n't; not don't
)


def syllables(word: str) -> int:
    """The syllables of an English word by rules, at least 1: runs of vowels, less silent endings, more where two vowels
    are sounded apart. Right for most words; `recipe` and its like have one too few."""
    word = word.lower().replace("’", "'")
    return max(1, len(_RUN.findall(word)) - bool(_SILENT.search(word)) + len(_APART.findall(word)))


def ratios(text: str) -> tuple[float, float] | None:
    """Words for each sentence and syllables for each word; None of a text without words."""
    words = _WORD.findall(text)
    if not words:
        return None
    sentences = sum(bool(_WORD.search(piece)) for piece in _SENTENCE_END.split(text))
    return len(words) / sentences, sum(map(syllables, words)) / len(words)


def ease(text: str) -> float:
    """Flesch reading ease."""
    found = ratios(text)
    return EASE[0] if found is None else _within(EASE, 206.835 - 1.015 * found[0] - 84.6 * found[1])


def grade(text: str) -> float:
    """Flesch–Kincaid grade."""
    found = ratios(text)
    return GRADE[1] if found is None else _within(GRADE, 0.39 * found[0] + 11.8 * found[1] - 15.59)


def _within(bounds, value):
    return min(max(value, bounds[0]), bounds[1])


class ReadingEase:
    scores_prefixes = True

    def __call__(self, prompts, completions, **columns):
        return [ease(as_text(completion)) for completion in completions]


class ReadingGrade:
    """Minus the distance of the grade from a wished one; 0 is a perfect hit."""

    scores_prefixes = True

    def __init__(self, grade):
        try:
            self.grade = float(grade)
        except (TypeError, ValueError):
            self.grade = math.nan
        if not GRADES_TO_ASK_FOR[0] <= self.grade <= GRADES_TO_ASK_FOR[1]:
            raise MisvoError(
                f"the reward 'reading-grade' takes a grade from 0 to 20, as in 'reading-grade:6', not {grade!r}."
            )

    def __call__(self, prompts, completions, **columns):
        return [-abs(grade(as_text(completion)) - self.grade) for completion in completions]
