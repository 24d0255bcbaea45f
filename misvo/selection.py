"""Which response is returned: the best one, or the best of those that a reader would take for the model's own.

A reward is optimised as it is, and its highest value is often a hack: a loop, babble, a sentence without an end. So
`ordinary` asks of a response what is known of the reference's own: that it is as likely (babble is less so, a loop
more), repeats itself no more, and, where that does not cost too much, comes to an end.
"""

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass

from misvo.candidate import Candidate

WORTH = 1.0  # of the reference's rewards: how many standard deviations a whole answer may cost
CLOSING = tuple(".!?…。！？")
BRACKETS = "\"'”’»)]}*_`"


@dataclass(frozen=True)
class Measure:
    """Something that is known of a response, and what is odd about one that has too little or too much of it.

    How much is too much is said in standard deviations of the reference's own responses.
    """

    of: Callable[[Candidate], float]
    too_little: str
    too_much: str
    below: float | None  # None: as little as it likes
    above: float | None


MEASURES = (
    Measure(
        lambda c: c.ref_logprob,
        "the model itself finds it unlikely",
        "it is more predictable than the model is",
        below=1.0,
        above=2.0,
    ),
    Measure(lambda c: c.distinct, "it repeats itself", "it never repeats itself", below=1.0, above=None),
    Measure(lambda c: c.stutter, "it never says a word twice", "it says a word again and again", below=None, above=2.0),
)


def best(candidates: list[Candidate], reference: list[Candidate]) -> Candidate:
    """The candidate with the highest reward among the ordinary ones, the first of equals; `candidates` have rewards.

    A whole answer is preferred to one that is cut off, unless that would cost too much of the reward.
    """
    kept = ordinary(candidates, reference) if reference else candidates
    top = max(kept, key=_reward)
    entire = max(filter(whole, kept), key=_reward, default=top) if reference else top
    rewards = [candidate.reward for candidate in reference if candidate.reward is not None]
    return entire if top.reward - entire.reward <= WORTH * statistics.pstdev(rewards or [0.0]) else top


def ordinary(candidates: list[Candidate], reference: list[Candidate]) -> list[Candidate]:
    """Those that read like the reference's own responses; where none does, all of them."""
    bands = _bands(reference)
    return [candidate for candidate in candidates if _odd(candidate, bands) is None] or candidates


def why_not(candidate: Candidate, reference: list[Candidate]) -> str | None:
    """What is odd about a response, in words; None for one that could be returned."""
    cut = None if whole(candidate) else "it is cut off in mid-sentence"
    return _odd(candidate, _bands(reference)) or cut


def whole(candidate: Candidate) -> bool:
    """Whether a response ended by itself, or was cut off where a sentence ends."""
    return candidate.ended is True or ends_a_sentence(candidate.text)


def ends_a_sentence(text: str) -> bool:
    return text.rstrip().rstrip(BRACKETS).endswith(CLOSING)


def _bands(reference):
    """Between which values each measure is ordinary."""
    bands = []
    for measure in MEASURES:
        own = [measure.of(candidate) for candidate in reference]
        middle, spread = statistics.mean(own), statistics.pstdev(own)
        low = -math.inf if measure.below is None else middle - measure.below * spread - 1e-9
        high = math.inf if measure.above is None else middle + measure.above * spread + 1e-9
        bands.append((low, high))
    return bands


def _reward(candidate):
    return candidate.reward


def _odd(candidate, bands):
    for measure, (low, high) in zip(MEASURES, bands, strict=True):
        value = measure.of(candidate)
        if not low <= value <= high:
            return measure.too_little if value < low else measure.too_much
    return None
