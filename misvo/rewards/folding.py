"""Text as rewards compare it: without regard for case, width, kinds of blanks and kinds of apostrophes."""

import unicodedata

# Unicode's own bound on marks that follow one letter (UAX 15, stream-safe text): sorting them is quadratic, and a text
# of nothing else would take seconds.
MARKS = 30
_APOSTROPHES = str.maketrans("‘’ʼ", "'''")


def folded(text: str) -> str:
    """`Don’t  STOP` -> `don't stop`; two texts that a reader takes for the same have the same folded form."""
    text = _normal(_normal(text).casefold()).translate(_APOSTROPHES)
    return " ".join(text.split())


def _normal(text):
    if text.isascii():
        return text
    kept, marks = [], 0
    for letter in text:
        marks = marks + 1 if unicodedata.combining(letter) else 0
        if marks <= MARKS:
            kept.append(letter)
    return unicodedata.normalize("NFKC", "".join(kept))
