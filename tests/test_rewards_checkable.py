"""Rewards that check a text without a judge: words, contains, avoids, starts, regex; what all of them share."""

import re
import shlex
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

import misvo
from misvo import cli, rewards
from misvo.rewards import pattern, preference, specs

# Of every reward here, one that loads without a model; each is bounded by the two numbers.
CHECKABLE = {
    "words:20-40": (0, 1),
    "contains:sleep,dark room": (0, 1),
    "avoids:very,as an AI": (0, 1),
    "starts:Dear reader": (0, 1),
    "regex:(?i)sleep": (0, 1),
    "json": (0, 1),
    'json:{"type": "object", "required": ["a + b", "c)"], "properties": {"c)": {"pattern": "^(a+)+$"}}}': (0, 1),
    "reading-ease": (-50, 120),
    "reading-grade:6": (-34, 0),
}
HOSTILE = {
    "one letter": "a" * 100_000,
    "control characters": "".join(map(chr, range(32))) * 3_000,
    "brackets": "[" * 100_000,
    "closed brackets": "[" * 50_000 + "]" * 50_000,
    "objects": '{"a":' * 20_000,
    "digits": "9" * 100_000,
    "backslashes": '"' + "\\" * 99_999,
    "marks": "".join("\u0301\u0323"[index % 2] for index in range(100_000)),
    "expanding": "\ufdfa" * 100_000,
    "dots": ". " * 50_000,
    "more dots": "a" + "." * 99_998 + "a",
    "lines": "\n - \n" * 20_000,
    "vowels": "ia" * 50_000,
    "apostrophes": "a'" * 50_000,
    "backticks": "`" * 100_000,
    "sleep": "sleepsleep " * 9_000,
    "surrogates": "\ud800" * 1_000,
    "nothing": "",
}


def call(spec, *texts, prompt="p"):
    return list(rewards.score(rewards.as_reward(spec), prompt, [*texts], [[1]] * len(texts), {}))


@pytest.mark.parametrize(
    ("spec", "by_count"),
    [
        ("words:4-8", {0: 0, 1: 0.25, 3: 0.75, 4: 1, 6: 1, 8: 1, 10: 0.8, 16: 0.5, 80: 0.1}),
        ("words:4 – 8", {2: 0.5, 8: 1, 16: 0.5}),
        ("words:5", {0: 0, 4: 0.8, 5: 1, 10: 0.5}),
        ("words:4-", {2: 0.5, 4: 1, 1000: 1}),
        ("words:-8", {0: 1, 8: 1, 16: 0.5}),
        ("words:0-2", {0: 1, 4: 0.5}),
    ],
)
def test_words(spec, by_count):
    assert call(spec, *("so \n" * count for count in by_count)) == pytest.approx(list(by_count.values()))


@pytest.mark.parametrize(
    ("spec", "text", "score"),
    [
        ("contains:sleep,routine,dark", "A dark room and SLEEP.", 2 / 3),
        ("contains:art", "start the party", 0),  # whole words
        ("contains:art", "start the party: art", 1),  # a later one, after two that are not
        ("contains:dark room", "a dark\n  room", 1),
        ("contains:dark room", "a dark, room", 0),
        ("contains:c++,c", "I like C++17", 1 / 2 + 1 / 2),  # what follows c is no letter
        ("contains:straße", "die STRASSE", 1),
        ("contains:café", "le cafe\u0301 noir", 1),
        ("contains:cafe", "le cafe\u0301 noir", 0),
        ("contains:नी", "नींद", 0),  # a vowel sign goes on with the word
        ("contains:नींद", "अच्छी नींद।", 1),
        ("contains:睡眠,运动", "良好的睡眠很重要", 1 / 2),
        ("contains:don't", "I don’t know", 1),
        ('contains:"well, then", so', "Well, then: no", 1 / 2),
        ("contains:a,A, a ,,b", "a", 1 / 2),  # given twice, counts once
        ("avoids:very,really", "very very very good", 1 / 2),  # occurs thrice, counts once
        ("avoids:very", "every day", 1),
        ("avoids:very", "", 1),
        ("starts:Dear Reader,", " \n dear  READER, hello", 1),
        ("starts:abcd", "ABxd", 1 / 2),
        ("starts:abcd", "abc", 3 / 4),
        ("starts:abcd", "xabcd", 0),
        (r"regex:^\d{4}-\d{2}$", "2024-05", 1),
        (r"regex:^\d{4}-\d{2}$", "on 2024-05", 0),
        ("regex:(?i)SLEEP", "asleep", 1),
        (r"regex:\p{Han}", "睡", 1),
    ],
)
def test_scores_by_hand(spec, text, score):
    assert call(spec, text) == [pytest.approx(score)]
    assert call(spec, text, prompt=[{"role": "user", "content": "p"}]) == [pytest.approx(score)]


WORD = st.text(alphabet="abcß睡éЖ'", min_size=1, max_size=4).filter(lambda word: word.strip("'"))


@given(st.lists(WORD, min_size=1, max_size=5), st.sampled_from([" ", ", ", "\n"]))
def test_all_words_joined_contain_each_and_avoid_none(words, between):
    text = between.join(words).swapcase()
    prompts, completions = ["p", "p"], [text, "0"]
    assert rewards.Contains(words)(prompts, completions) == [1.0, 0.0]
    assert rewards.Avoids(words)(prompts, completions) == [0.0, 1.0]


@given(
    st.text(alphabet="ab ", max_size=12), st.lists(st.sampled_from(["a", "b", "ab", "a b"]), min_size=1, unique=True)
)
def test_contains_against_padded_words(text, phrases):
    padded = f" {' '.join(text.split())} "  # between blanks, whole words can be found as plain text
    expected = sum(f" {phrase} " in padded for phrase in phrases) / len(phrases)
    assert rewards.Contains(phrases)(["p"], [text]) == [expected]


@settings(deadline=None)  # nine rewards, twice
@given(st.text(max_size=60), st.integers(0, 60))
def test_any_text_and_any_beginning_has_a_score_in_bounds(text, cut):
    for spec, (low, high) in CHECKABLE.items():
        for value in call(LOADED[spec], text, text[:cut]):
            assert low <= value <= high, spec


LOADED = {spec: rewards.load(spec) for spec in CHECKABLE}


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_texts_take_no_time(kind):
    """100,000 characters, read by each within a bound that anything quadratic would break."""
    for spec, (low, high) in CHECKABLE.items():
        started = time.process_time()
        (value,) = call(LOADED[spec], HOSTILE[kind])
        assert time.process_time() - started < 1.5, spec
        assert value is None or low <= value <= high, spec


def test_an_endless_pattern_is_stopped_and_is_not_zero():
    endless = "a" * 80 + "!"  # 10¹⁶ ways to fail
    started = time.monotonic()
    assert call(r"regex:^(a|aa)+$", endless, "aaa", "b") == [None, 1.0, 0.0]
    assert time.monotonic() - started < 10 * pattern.SECONDS
    assert call(r"words:1 + regex:^(a|aa)+$", endless, "aaa") == [None, 2.0]


def test_a_call_has_a_bound_too(monkeypatch):
    monkeypatch.setattr(pattern, "SECONDS", 0.05)
    monkeypatch.setattr(pattern, "CALL_SECONDS", 0.2)
    started = time.monotonic()
    assert call(r"regex:^(a|aa)+$", *["a" * 80 + "!"] * 100) == [None] * 100  # 100 × 0.05 would be 5 s
    assert time.monotonic() - started < 2


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("words:", "write this reward as 'words:LEAST-MOST', as in 'words:20-40', not 'words:'"),
        ("words:-", "write this reward as 'words:20-40'"),
        ("words:many", "write this reward as 'words:20-40'"),
        ("words:1-2-3", "write this reward as 'words:20-40'"),
        ("words:40-20", "a range of whole numbers such as 20-40"),
        ("words:0", "the second at least 1"),
        ("words:" + "9" * 5000, "write this reward as 'words:20-40'"),
        ("contains:,", "the reward 'contains' needs a word or phrase"),
        ("avoids: ", "write this reward as 'avoids:A,B,…'"),
        ('avoids:"a', "cannot be read"),
        ("starts", "write this reward as 'starts:TEXT'"),
        ("regex:(", "the pattern '(' cannot be read: missing )"),
        ("regex:" + "(" * 50_000, "is nested too deeply"),
        ("regex:((a{999}){999}){999}", "repeats too much"),
        ("reading-ease:3", "write this reward as 'reading-ease', not"),
        ("reading-grade:hard", "takes a grade from 0 to 20"),
        ("reading-grade:nan", "takes a grade from 0 to 20"),
        ("reading-grade:21", "takes a grade from 0 to 20"),
        ("json:", "write this reward as 'json[:{SCHEMA}]'"),
    ],
)
def test_what_is_wrong_is_one_sentence(spec, says):
    with pytest.raises(misvo.MisvoError, match=re.escape(says)) as caught:
        rewards.load(spec)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("spec", "terms"),
    [
        ("words:20-40 + contains:sleep,routine,dark", [(1, "words:20-40"), (1, "contains:sleep,routine,dark")]),
        ("words:20 - 40 - 0.5*json", [(1, "words:20 - 40"), (-0.5, "json")]),
        ("similarity:fewer words - words of wisdom", [(1, "similarity:fewer words - words of wisdom")]),
        ("contains:a + b,c + avoids:d", [(1, "contains:a + b,c"), (1, "avoids:d")]),
        (r"regex:\( + words:3", [(1, r"regex:\("), (1, "words:3")]),
        (r"regex:[(] + clip(words:3, 0, 1)", [(1, "regex:[(]"), (1, "clip(words:3, 0, 1)")]),
        (r"regex:(a|b) + words:3", [(1, "regex:(a|b)"), (1, "words:3")]),
        (r"clip(regex:\) + words:3, 0, 1)", [(1, r"clip(regex:\) + words:3, 0, 1)")]),
        (
            '2*json:{"enum": ["a + words:3", ") - json", "\\"}"]} - json',
            [(2, 'json:{"enum": ["a + words:3", ") - json", "\\"}"]}'), (-1, "json")],
        ),
        (
            'clip(json:{"const": "( + json"}, 0, 0.5) + words:3',
            [(1, 'clip(json:{"const": "( + json"}, 0, 0.5)'), (1, "words:3")],
        ),
        ("reading-ease - reading-grade:6", [(1, "reading-ease"), (-1, "reading-grade:6")]),
    ],
)
def test_sums_are_cut_where_they_are_meant(spec, terms):
    assert specs.terms(spec) == terms
    if "similarity" not in spec:  # which loads a model
        rewards.load(spec)


@pytest.mark.parametrize("spec", CHECKABLE)
def test_each_in_sums_and_wrappers(spec):
    texts = ["Dear reader, sleep well.", '{"c)": "aaa"}', "no"]
    alone, words = call(spec, *texts), call("words:2", *texts)
    total = rewards.load(f"0.5*{spec} - words:2")
    assert call(total, *texts) == pytest.approx([0.5 * a - w for a, w in zip(alone, words, strict=True)])
    assert total.scores_prefixes
    low, high = min(alone) + 0.1, max(alone) - 0.1
    expected = [min(max(value, low), high) for value in alone] if low <= high else None
    if expected:
        assert call(f"clip({spec}, {low!r}, {high!r}) + words:2", *texts) == pytest.approx(
            [e + w for e, w in zip(expected, words, strict=True)]
        )


def test_the_list_has_every_name_with_an_example_that_loads(tmp_path, monkeypatch):
    preference.write(tmp_path / "taste", torch.zeros(768), {})  # the folder that the example of `preference` names
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(cli.app, ["list", "rewards"])
    assert done.exit_code == 0
    lines = [line.strip() for line in done.output.splitlines()]
    for name, entry in specs.EMBEDDED.items():
        (place,) = [index for index, line in enumerate(lines) if line.startswith(entry.usage(name) + " ")]
        assert lines[place].endswith(entry.about) and len(entry.about) < 90
        option, example = shlex.split(lines[place + 1])  # as a shell reads it
        assert option == "--reward" and name in example
        assert callable(rewards.load(example))


def test_steering_with_a_sum_scores_beginnings(policy):
    """End to end: the credit of `auto` asks about beginnings, and every part is in the trace."""
    spec = "words:3-5 + contains:a,b + avoids:c + starts:a + regex:b + json + reading-ease"
    result = misvo.steer(policy, "a b c", spec, rollouts=4, steps=2, max_new_tokens=6)
    assert all("credit" in row for row in result.trace)  # which is there where beginnings were scored
    assert set(result.trace[0]["parts"]) == set(spec.split(" + "))
    assert [c.reward for c in result.candidates] == pytest.approx(call(spec, *(c.text for c in result.candidates)))
