"""`starts:TEXT`: 1 if a response begins with TEXT, else the share of TEXT that its beginning matches.

Case, leading blanks and kinds of blanks do not count (`folding.py`).
"""

from itertools import takewhile

from misvo.errors import MisvoError
from misvo.prompts import as_text
from misvo.rewards.folding import folded


class Starts:
    scores_prefixes = True

    def __init__(self, text: str):
        self.text = folded(text)
        if not self.text:
            raise MisvoError("the reward 'starts' needs a text, as in 'starts:Dear reader'.")

    def __call__(self, prompts, completions, **columns):
        return [self._share(folded(as_text(completion))) for completion in completions]

    def _share(self, text):
        pairs = zip(self.text, text, strict=False)
        return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs)) / len(self.text)
