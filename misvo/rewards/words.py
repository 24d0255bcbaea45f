"""`words:20-40` and `length:30`: rewards on the number of words, which are what stands between blanks.

`words` is 1 inside its range and outside it the ratio of the number to the nearer end of the range: half as many words
as the least, or twice as many as the most, score 0.5. `length` is minus the distance from a wished number; 0 is a
perfect hit. A script without blanks counts as one word.
"""

import re

from misvo.errors import MisvoError, short
from misvo.prompts import as_text

_RANGE = re.compile(r"(\d{0,9})\s*[-–]\s*(\d{0,9})")  # both ends of the range, either may be left out


class Words:
    """1 from `least` to `most` words, falling towards 0 outside; either end may be None."""

    scores_prefixes = True

    def __init__(self, least: int | None = None, most: int | None = None):
        ends = [end for end in (least, most) if end is not None]
        whole = all(isinstance(end, int) and not isinstance(end, bool) and end >= 0 for end in ends)
        if not ends or not whole or ends != sorted(ends) or most == 0:
            raise MisvoError(
                "the reward 'words' takes a range of whole numbers such as 20-40, the second at least 1, "
                f"not {least!r} to {most!r}."
            )
        self.least, self.most = least, most

    @classmethod
    def from_spec(cls, text: str) -> "Words":
        """`20-40`, `20-` (at least), `-40` (at most) or `30` (exactly)."""
        text = text.strip()
        ends = _RANGE.fullmatch(text if _RANGE.fullmatch(text) else f"{text}-{text}")
        if not ends or not any(ends.groups()):
            raise MisvoError(
                f"write this reward as 'words:20-40', 'words:20-', 'words:-40' or 'words:30', not {short(text)!r}."
            )
        return cls(*(int(end) if end else None for end in ends.groups()))

    def __call__(self, prompts, completions, **columns):
        return [self._ratio(len(as_text(completion).split())) for completion in completions]

    def _ratio(self, count):
        if self.least is not None and count < self.least:
            return count / self.least
        if self.most is not None and count > self.most:
            return self.most / count
        return 1.0


class Length:
    """Minus the distance from `words` words."""

    scores_prefixes = True

    def __init__(self, words):
        try:
            self.words = int(words)
        except ValueError:
            self.words = -1
        if self.words < 0:
            raise MisvoError(f"the reward 'length' takes a number of words, as in 'length:50', not {words!r}.")

    def __call__(self, prompts, completions, **columns):
        return [-float(abs(len(as_text(completion).split()) - self.words)) for completion in completions]
