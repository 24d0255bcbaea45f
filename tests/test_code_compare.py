"""Right and wrong answers. The oracle for plain values is Python's own `==`."""

import contextlib
import math
import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from misvo.rewards.code.compare import MATCHES, right
from misvo.sandbox.codec import NotPlain, decode, dumps, encode, loads

scalars = st.none() | st.booleans() | st.integers() | st.text(max_size=3) | st.binary(max_size=3)
keys = st.recursive(scalars, lambda inner: st.tuples(inner, inner) | st.frozensets(inner, max_size=3), max_leaves=4)
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner)
        | st.tuples(inner, inner)
        | st.sets(keys, max_size=3)
        | st.dictionaries(keys, inner, max_size=3)
    ),
    max_leaves=8,
)
MATCH = re.match("a", "abc")
floats = st.floats() | st.complex_numbers()


@given(values | st.lists(floats))
def test_a_value_survives_the_wire_and_is_right(value):
    tree = loads(dumps(encode(value)))
    assert repr(decode(tree)) == repr(value) or decode(tree) == value
    assert right(tree, value)


@given(values, values)
def test_without_floats_right_means_equal(found, expected):
    assert right(encode(found), expected) == (found == expected)


@pytest.mark.parametrize(
    "found, expected, atol, answer",
    [
        (1.0, 1, 0, True),
        (True, 1, 0, True),
        (1.0 + 1e-7, 1.0, 0, True),
        (1.0 + 1e-5, 1.0, 0, False),
        (1.0 + 5e-5, 1.0, 1e-4, True),
        (1, 1.0 + 5e-5, 1e-4, True),
        (1 + 5e-5, 1, 1e-4, False),  # the right answer is an integer
        ([1.0 + 1e-8, (2.0,)], [1.0, (2.0,)], 0, True),
        ((1.0,), [1.0], 0, False),
        ({"a": 1 + 1e-9}, {"a": 1.0}, 0, True),
        (1e300, 1e300 * (1 + 1e-9), 0, True),
        (10**400, 1.0, 0, False),
        (10**400, math.inf, 0, False),
        (1e308, math.inf, 0, False),
        (math.nan, 1.0, 0, False),
        (1.0, math.nan, 0, False),
        (math.nan, math.nan, 0, True),
        (math.inf, math.inf, 0, True),
        (-math.inf, math.inf, 0, False),
        (1 + 1e-9j, 1.0, 0, True),
        ("1.0", 1.0, 0, False),
        (None, 0, 0, False),
        (0, None, 0, False),
        (0, False, 0, True),
        ("", None, 0, False),
        ({1, 2}, frozenset({1, 2}), 0, True),
        ([1, 2], {1, 2}, 0, False),
        ({1: 2}, {1: 2, 3: 4}, 0, False),
    ],
)
def test_tolerance(found, expected, atol, answer):
    assert right(encode(found), expected, atol) is answer


@pytest.mark.parametrize(
    "found, expected, match, answer",
    [
        ([2, 1, 1], (1, 2), "set", True),
        ({1, 2}, [1, 2], "set", True),
        ([1], [1, 2], "set", False),
        ([1, 2, 3], [1, 2], "set", False),
        ([[1]], [1], "set", False),
        (5, [5], "set", False),
        (None, [], "set", False),
        ("ab", ["b", "a"], "set", True),
        ([1], True, "truth", True),
        ([], False, "truth", True),
        (0.0, True, "truth", False),
        (None, False, "truth", True),
        (MATCH, True, "truth", True),
        (None, MATCH, "truth", False),
        (MATCH, MATCH, "equal", True),
        ([MATCH, 1], [MATCH, 1], "equal", True),
        (True, MATCH, "equal", False),
        (None, MATCH, "equal", False),
        (MATCH, None, "equal", False),
        (MATCH, MATCH, "not-none", True),
        ("abc", MATCH, "not-none", True),
        (True, MATCH, "not-none", True),
        (False, MATCH, "not-none", False),
        (None, MATCH, "not-none", False),
        (None, None, "not-none", True),
        (False, None, "not-none", True),
        (True, None, "not-none", False),
        (MATCH, None, "not-none", False),
        ("", None, "not-none", False),
        (0, None, "not-none", False),
    ],
)
def test_other_matches(found, expected, match, answer):
    assert right(encode(found), expected, match=match) is answer


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.text(max_size=4), st.lists, max_leaves=20))
def test_no_tree_raises(tree):
    for expected in (1, 1.5, 2j, "a", b"a", None, [1], (1,), {1}, {1: 2}, frozenset([(1,)]), MATCH):
        for match in MATCHES:
            assert right(tree, expected, match=match) in (True, False)
    with contextlib.suppress(NotPlain):
        decode(tree)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[",
        "NaN",
        "1.5",
        "[" * 100_000,
        "9" * 5000,
        '"\\',
        "{",
        "Infinity",
        "\0",
        '["f","x"]',
        '["i","1"',
        '["f","0x1p99999"]',
    ],
)
def test_no_text_raises_anything_but_not_plain(text):
    try:
        tree = loads(text)
    except NotPlain:
        return
    assert right(tree, 1.0) is False


def test_of_a_match_only_the_fact_crosses_the_wire():
    tree = loads(dumps(encode(re.search("secret", "a secret"))))
    assert tree == ["m"] and decode(tree).group() == "" and encode(decode(tree)) == tree
    assert not right(["m", "more"], MATCH)


def test_colliding_hashes_cost_nothing():
    """Multiples of 2**61 - 1 all hash to 0: building a set of these takes hours."""
    hostile = ["i", hex(2**61 - 1)]
    items = [["i", hex((2**61 - 1) * k)] for k in range(1, 200_000)]
    start = time.process_time()
    for tree in (["s", items], ["l", items], ["s", [["z", items], 1]], ["d", [[item, 0] for item in items]]):
        for expected in ({1, 2}, {1: 2}, [1, 2], 0):
            for match in ("equal", "set"):
                if match == "equal" or type(expected) in (set, list):
                    assert not right(tree, expected, match=match)
    assert right(hostile, 2**61 - 1)
    assert time.process_time() - start < 5
