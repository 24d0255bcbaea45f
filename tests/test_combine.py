"""Combined rewards: sums, penalties, clipping, standardisation; and the small language that names them."""

import itertools
import math
import re
import statistics

import pytest
from conftest import letter_reward, make_policy
from hypothesis import given
from hypothesis import strategies as st

import misvo
from misvo import rewards
from misvo.rewards import Clipped, Combined, Overlength, Repetition, Scores, Standardised

TEXTS = ["This is wonderful, I love it!", "This is terrible and sad.", "so so so so so so"]


def call(reward, texts=TEXTS, prompt="p", **columns):
    return rewards.score(rewards.as_reward(reward), prompt, texts, [[1]] * len(texts), columns)


def words(text):
    return len(text.split())


def even_only(text):
    return None if len(text) % 2 else float(len(text))


def test_a_weighted_sum_and_its_parts():
    got = call(Combined({"words": words, "letters": len}, {"letters": -0.25}))
    assert got == pytest.approx([words(t) - 0.25 * len(t) for t in TEXTS])
    assert got.parts == {"words": [float(words(t)) for t in TEXTS], "letters": [float(len(t)) for t in TEXTS]}
    assert got.means() == {"words": statistics.fmean(map(words, TEXTS)), "letters": statistics.fmean(map(len, TEXTS))}


def test_what_one_part_cannot_score_is_not_scored():
    got = call(Combined({"words": words, "even": even_only}), ["ab", "abc", "abcd"])
    assert got == [3.0, None, 5.0]
    assert got.parts == {"words": [1.0, 1.0, 1.0], "even": [2.0, None, 4.0]}
    assert got.means() == {"words": 1.0, "even": 3.0}
    assert Scores([None], {"x": [None]}).means() == {"x": None}


def test_parts_get_the_columns_that_they_take():
    def right(completions, answer):
        return [float(text == a) for text, a in zip(completions, answer, strict=True)]

    def ids(completion_ids, completions, **_):
        return [float(len(row)) for row in completion_ids]

    got = call(Combined({"right": right, "ids": ids}, {"right": 10}), ["4", "5"], answer="4", other=1)
    assert got == [11.0, 1.0]


def test_parts_of_parts_have_paths_for_names():
    inner = Combined({"words": words})
    got = call(Combined({"a": Clipped(Clipped(inner, high=5), low=2), "b": len}))
    assert {*got.parts} == {"a", "a/raw", "a/raw/raw", "a/raw/raw/words", "b"}
    assert got.parts["a"] == [5.0, 5.0, 5.0] and got.parts["a/raw/raw/words"] == [6.0, 5.0, 6.0]


def test_clipping():
    got = call(Clipped(len, 20, 27))
    assert got == [27.0, 25.0, 20.0] and got.parts == {"raw": [29.0, 25.0, 17.0]}
    assert call(Clipped(even_only, high=3), ["ab", "abc", "abcdef"]) == [2.0, None, 3.0]


def test_standardising_by_the_first_responses_to_a_prompt():
    reward = rewards.as_reward(Standardised(words))
    first = rewards.score(reward, "p", ["a", "a b", "a b c d"], [[1]] * 3, {})
    mean, std = statistics.fmean([1, 2, 4]), statistics.stdev([1, 2, 4])
    assert first == pytest.approx([(n - mean) / std for n in (1, 2, 4)])
    assert first.parts == {"raw": [1.0, 2.0, 4.0]}
    later = rewards.score(reward, "p", ["a b c d e f g"], [[1]], {})  # on the same scale: progress shows
    assert later == pytest.approx([(7 - mean) / std])
    other = rewards.score(reward, [{"role": "user", "content": "q"}], ["a", "a b c"], [[1]] * 2, {})
    assert other == pytest.approx([-1 / math.sqrt(2), 1 / math.sqrt(2)])  # another prompt has a scale of its own
    mixed = reward(prompts=["p", "r", "r"], completions=["a b c d e f g", "a", "a b c"])
    assert mixed == pytest.approx([*later, *other])


def test_standardising_where_there_is_no_spread():
    reward = rewards.as_reward(Standardised(words))
    assert rewards.score(reward, "p", ["a b", "c d"], [[1]] * 2, {}) == [0.0, 0.0]
    assert rewards.score(reward, "p", ["a b c"], [[1]], {}) == [1.0]
    shy = rewards.as_reward(Standardised(even_only))
    assert rewards.score(shy, "p", ["abc", "a"], [[1]] * 2, {}) == [None, None]  # nothing learned from nothing
    assert rewards.score(shy, "p", ["ab", "abcd", "a"], [[1]] * 3, {}) == pytest.approx([-(0.5**0.5), 0.5**0.5, None])


def test_a_scale_of_ones_own():
    assert call(Standardised(words, mean=2, std=0.5)) == [8.0, 6.0, 8.0]


def test_a_run_starts_afresh_and_a_best_response_is_comparable():
    """A run has the scale of its own first step, also when the reward object has seen others; one scale for all."""
    reward = Combined({"letters": Standardised(letter_reward)})
    options = {"rollouts": 4, "steps": 3, "max_new_tokens": 6, "learning_rate": 3.0}
    policy = make_policy()
    misvo.steer(policy, "a b c", reward, seed=2, **options, preset="paper")
    first = misvo.steer(policy, "a b c", reward, seed=1, **options, preset="paper")
    raw = letter_reward([c.text for c in first.candidates])
    mean, std = statistics.fmean(raw[:4]), statistics.stdev(raw[:4])
    assert [c.reward for c in first.candidates] == pytest.approx([(value - mean) / std for value in raw])
    assert raw[first.candidates.index(first.best)] == max(raw)


def test_parts_are_in_the_trace_and_absent_without_parts():
    options = {"rollouts": 3, "steps": 2, "max_new_tokens": 5}
    result = misvo.steer(
        make_policy(), "a b", Combined({"l": letter_reward, "w": words}, {"w": 0.5}), **options, preset="paper"
    )
    for row in result.trace:
        texts = [c.text for c in result.candidates if c.step == row["step"]]
        assert row["parts"] == pytest.approx(
            {"l": statistics.fmean(letter_reward(texts)), "w": statistics.fmean(map(words, texts))}
        )
        assert row["mean"] == pytest.approx(row["parts"]["l"] + 0.5 * row["parts"]["w"])
    plain = misvo.steer(make_policy(), "a b", letter_reward, **options, preset="paper")
    assert all("parts" not in row for row in plain.trace)


def test_penalties():
    assert call(Overlength(4), ["", "a b c d", "a b c d e  f"]) == [0.0, 0.0, -2.0]
    assert call(Repetition(1), ["a b A c", "!!!!", "", "a"]) == [-1 / 4, -3 / 4, 0.0, 0.0]
    assert call("repetition:2", ["to be or not to be", "a b"]) == [-1 / 5, 0.0]
    chat = [{"role": "user", "content": "p"}]
    assert call("overlength:1", ["a b c"], chat) == [-2.0]


@given(st.lists(st.sampled_from("abc"), max_size=12), st.integers(1, 4))
def test_repetition_against_counting_by_hand(letters, n):
    runs = [tuple(letters[i : i + n]) for i in range(len(letters) - n + 1)]
    seen_before = sum(run in runs[:index] for index, run in enumerate(runs))
    expected = -seen_before / len(runs) if runs else 0.0
    assert Repetition(n)(prompts=["p"], completions=[" ".join(letters)]) == pytest.approx([expected])


@pytest.mark.parametrize(
    ("spec", "weights"),
    [
        ("length:4 + overlength:2", {"length:4": 1, "overlength:2": 1}),
        ("length:4 - 0.5*overlength:2", {"length:4": 1, "overlength:2": -0.5}),
        ("2*length:4", {"length:4": 2}),
        (" -1.5e-1 * length:4  +  .5*repetition:2 ", {"length:4": -0.15, "repetition:2": 0.5}),
        ("clip(length:4, -3, 0) + repetition:1", {"clip(length:4, -3, 0)": 1, "repetition:1": 1}),
        ("3*standardise(length:4 + 2*overlength:1)", {"standardise(length:4 + 2*overlength:1)": 3}),
        ("misvo.prompts:as_text + length:3", None),
    ],
)
def test_sums_in_a_spec(spec, weights):
    if weights is None:
        with pytest.raises(misvo.RewardError, match=r"in the part 'misvo\.prompts:as_text', the reward gave 'This is"):
            call(spec)
        return
    reward = rewards.load(spec)
    assert reward.weights == weights
    got, parts = call(spec), {name: call(name) for name in weights}
    assert got == pytest.approx([sum(w * parts[n][i] for n, w in weights.items()) for i in range(len(TEXTS))])


def test_wrappers_in_a_spec():
    assert call("clip(length:4, -inf, -2)") == [-2.0, -2.0, -2.0]
    assert call("clip(length:4 + length:5, -2.5, 9)") == [-2.5, -1.0, -2.5]
    assert call("standardize(length:5)") == pytest.approx([-1 / 3**0.5, 2 / 3**0.5, -1 / 3**0.5])


def test_a_sign_in_a_text_is_text():
    """No cut where what follows does not read like a term; a term that names nothing is an error, not text."""
    from misvo.rewards.specs import _split

    for spec in (
        "similarity:salt + pepper",
        "similarity:1 + 1 is 2",
        "similarity:a (b + length:3)",
        "similarity:a - b",
    ):
        assert _split(spec) == [(1.0, spec)]
    assert _split("similarity:a :) + length:3") == [(1.0, "similarity:a :)"), (1.0, "length:3")]
    assert _split("http://h/p?a=1+2 - hf:a/b-c#so so") == [(1.0, "http://h/p?a=1+2"), (-1.0, "hf:a/b-c#so so")]


@given(st.text(alphabet="ab+-*:(). 01", max_size=30))
def test_any_spec_loads_or_is_refused_in_a_sentence(spec):
    try:
        rewards.load(spec)
    except misvo.MisvoError as error:
        assert "\n" not in str(error)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: rewards.load("length:4 + length:4"), "names 'length:4' twice"),
        (lambda: rewards.load("length:4 + 2*nope"), "unknown reward 'nope'"),
        (lambda: rewards.load("length:4 + lenght:4"), "unknown reward 'lenght'"),
        (lambda: rewards.load("clip(length:4, 1)"), "write this reward as 'clip(REWARD, LOW, HIGH)'"),
        (lambda: rewards.load("clip(length:4, a, b)"), "write this reward as 'clip(REWARD, LOW, HIGH)'"),
        (lambda: rewards.load("clip(length:4, 2, 1)"), "2.0 is above 1.0"),
        (lambda: rewards.load("standardise()"), "unknown reward ''"),
        (lambda: rewards.load(""), "unknown reward ''"),
        (lambda: rewards.load("overlength:-3"), "takes a whole number of at least 0, not '-3'"),
        (lambda: rewards.load("repetition:0"), "takes a whole number of at least 1"),
        (lambda: Combined({}), "at least one part"),
        (lambda: Combined({"a": len}, {"b": 1.0}), "a weight for 'b', but the parts are a"),
        (lambda: Combined({"a": len}, {"a": math.nan}), "the weight of 'a' must be a finite number"),
        (lambda: Combined({"a": 3}), "a reward must be callable"),
        (lambda: Clipped(len, math.nan), "clipping takes two numbers"),
        (lambda: Standardised(len, mean=1.0), "a mean and a std, or neither"),
        (lambda: Standardised(len, 0.0, 0.0), "the std must be above 0"),
    ],
)
def test_refusals(make, says):
    with pytest.raises(misvo.MisvoError, match=re.escape(says)):
        make()


def test_a_failing_part_is_named_once_with_its_prompt():
    reward = Combined({"good": len, "bad": Clipped(lambda text: 1 / 0)})
    with pytest.raises(misvo.RewardError) as caught:
        call(reward, ["x"], "the prompt")
    message = str(caught.value)
    assert message.startswith("in the part 'bad', the reward raised ZeroDivisionError (division by zero)")
    assert message.count("'the prompt'") == 1 and "'x'" in message


def test_a_class_in_a_spec_is_made(tmp_path):
    source = tmp_path / "mine.py"
    source.write_text(
        "class Mine:\n    def __call__(self, completions, **_):\n        return [7.0] * len(completions)\n"
        "class Other:\n    def __init__(self, needed):\n        pass\n"
    )
    assert call(f"{source}:Mine") == [7.0] * 3
    with pytest.raises(misvo.MisvoError, match=r"Other of .* could not be made: TypeError"):
        rewards.load(f"{source}:Other")


def test_names_of_the_room_load_on_use():
    named = {name for name in rewards.__all__ if getattr(getattr(rewards, name), "__name__", None) == name}
    assert set(rewards.__all__) - named == {"AnyReward", "EMBEDDED", "Reward"} and "sentiment" in rewards.EMBEDDED
    with pytest.raises(AttributeError):
        _ = rewards.nope
    assert list(itertools.islice(Scores([1.0, None]), 2)) == [1.0, None]
