"""`length:WORDS`: minus the distance of a response from a wished number of words; 0 is a perfect hit."""

from misvo.errors import MisvoError
from misvo.prompts import as_text


class Length:
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
