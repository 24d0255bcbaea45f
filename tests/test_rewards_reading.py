"""Reading ease and reading grade against sentences counted by hand."""

import pytest

from misvo import rewards
from misvo.rewards.reading import EASE, GRADE, ease, grade, ratios, syllables

# text, words, sentences, syllables: counted by hand
COUNTED = [
    ("The cat sat on the mat.", 6, 1, 6),
    # the example of Wikipedia's article on Flesch's formulas, with its 24 syllables
    ("The Australian platypus is seemingly a hybrid of a mammal and reptilian creature.", 13, 1, 24),
    ("Sleep in a dark, quiet room. Don't look at a screen before bed!", 13, 2, 15),
    ("She wanted 3.5 apples… “Why?” he asked.", 6, 3, 8),
    ("Tips:\n1. Go to bed early.\n2. Drink less coffee.\n\nGood night", 10, 4, 12),
    ("One line\nof a poem", 5, 1, 6),
]
BY_SYLLABLES = {
    1: "the me make makes baked called friend thing through don't can't eye whole strengths",
    2: "table tables handled boxes wishes changes wanted needed science quiet being going nation people didn't café "
    "poem create client friendly million special marriage language creature",
    3: "usual media radio idea area animal example serious variance beautiful",
    4: "experience society variety situation information",
}


def test_syllables_of_words_counted_by_hand():
    wrong = {w: syllables(w) for count, words in BY_SYLLABLES.items() for w in words.split() if syllables(w) != count}
    assert not wrong


@pytest.mark.parametrize(("text", "words", "sentences", "count"), COUNTED)
def test_formulas_by_hand(text, words, sentences, count):
    assert ratios(text) == pytest.approx((words / sentences, count / words))
    expected = 206.835 - 1.015 * words / sentences - 84.6 * count / words
    assert ease(text) == pytest.approx(expected)
    years = 0.39 * words / sentences + 11.8 * count / words - 15.59
    assert grade(text) == pytest.approx(years)
    call = {"prompts": ["p"], "completions": [text]}
    assert rewards.load("reading-ease")(**call) == pytest.approx([expected])
    assert rewards.load("reading-grade:6.5")(**call) == pytest.approx([-abs(years - 6.5)])


def test_what_cannot_be_read_is_worst():
    hopeless = ["", "?! 42 \n", "\x00\x01", "supercalifragilistic" * 5000, "antidisestablishmentarianism " * 3000]
    for text in hopeless:
        assert (ease(text), grade(text)) == (EASE[0], GRADE[1])
    assert EASE[0] < ease("Go.") <= EASE[1] and GRADE[0] <= grade("Go.") < GRADE[1]
