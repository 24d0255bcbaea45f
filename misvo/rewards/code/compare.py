"""Whether a program's answer is the right one: the tree that came out of the sandbox against the one we expect.

The rules are EvalPlus's: `==`, and for numbers that should be floats a tolerance, `|a - b| <= atol + rtol
|b|`, with atol the task's own or 1e-6. Some tasks compare otherwise ("match"): "set" when the order is not
part of the answer, "truth" when only its truth counts, "not-none" when it only counts whether there is one.

The answer stays a tree, and only parts that stand where the expected value has a like part are looked at,
so the work is bounded by the expected value: an answer made of numbers with colliding hashes costs nothing
extra. No answer raises.
"""

import math
import re

from misvo.sandbox.codec import NotPlain, decode, decode_scalar

RTOL = 1e-7
DEFAULT_ATOL = 1e-6
MATCHES = ("equal", "set", "truth", "not-none")
_LARGEST_KEY = 1000  # elements of a set inside a set: its hash may be built to collide
_TAGS = {list: "l", tuple: "t", set: "s", frozenset: "z"}


def right(tree, expected, atol=0.0, match="equal"):
    """Whether the answer `tree` counts as `expected`."""
    try:
        if match == "set":
            return _same_elements(tree, expected, atol or DEFAULT_ATOL)
        if match == "truth":
            return _truth(tree) == bool(expected)
        if match == "not-none":
            return _found(tree) == _found(expected)
        return _equal(tree, expected, atol or DEFAULT_ATOL)
    except (NotPlain, RecursionError):
        return False


def _equal(tree, expected, atol):
    kind = type(expected)
    if kind in (bool, int, float, complex):
        return _same_number(_number(tree), expected, atol)
    if expected is None or kind is str:
        return type(tree) is kind and tree == expected
    tag, parts = _open(tree)
    if kind is bytes:
        return tag == "b" and decode_scalar(tag, parts) == expected
    if kind is re.Match:
        return tag == "m" and not parts
    if len(parts) != 1 or type(parts[0]) is not list or len(parts[0]) != len(expected):
        return False
    (items,) = parts
    if kind in (list, tuple):
        return tag == _TAGS[kind] and all(_equal(*pair, atol) for pair in zip(items, expected, strict=True))
    if kind in (set, frozenset):
        return tag in ("s", "z") and {key for item in items if (key := _key(item)) in expected} == expected
    if kind is dict:
        return tag == "d" and _same_dict(items, expected, atol)
    return False


def _open(tree):
    if type(tree) is not list or not tree:
        raise NotPlain("not a container")
    return tree[0], tree[1:]


def _number(tree):
    """The number in a tree; NotPlain when it holds something else."""
    if type(tree) in (bool, int):
        return tree
    if _open(tree)[0] not in ("i", "f", "c"):
        raise NotPlain("not a number")
    return decode(tree)


def _same_number(found, expected, atol):
    if found == expected:
        return True
    if isinstance(expected, float | complex):
        if found != found or expected != expected:
            return found != found and expected != expected  # a task whose answer is NaN
        try:
            return abs(found - expected) <= atol + RTOL * abs(expected) and math.isfinite(abs(expected))
        except OverflowError:  # an integer beyond every float
            return False
    return False


def _key(tree):
    """The hashable value of a tree, or NotPlain."""
    if type(tree) is not list:
        return decode(tree)
    tag, parts = _open(tree)
    if tag not in ("t", "z"):
        return decode_scalar(tag, parts)
    if len(parts) != 1 or type(parts[0]) is not list or (tag == "z" and len(parts[0]) > _LARGEST_KEY):
        raise NotPlain("not hashable")
    items = [_key(item) for item in parts[0]]
    return tuple(items) if tag == "t" else frozenset(items)


def _truth(tree):
    if type(tree) is not list:
        return bool(decode(tree))
    tag, parts = _open(tree)
    if tag in ("l", "t", "s", "z", "d"):
        return bool(parts and parts[0])
    return bool(decode_scalar(tag, parts))


def _found(answer):
    """What a search found, from a tree or a value: True and False say so themselves, else all but None is a find."""
    return answer if type(answer) is bool else answer is not None


def _same_dict(pairs, expected, atol):
    seen = set()
    for pair in pairs:
        if type(pair) is not list or len(pair) != 2:
            return False
        key = _key(pair[0])
        if key not in expected or key in seen or not _equal(pair[1], expected[key], atol):
            return False
        seen.add(key)
    return True  # as many keys as expected, each once, each right


def _same_elements(tree, expected, atol):
    """`set(answer) == set(expected)`, the answer any of Python's own collections or a string."""
    try:
        wanted, seen = set(expected), set()
    except TypeError:  # no collection, or of elements that no set can hold
        return _equal(tree, expected, atol)
    if type(tree) is str:
        items = list(tree)
    else:
        tag, parts = _open(tree)
        if tag not in ("l", "t", "s", "z") or len(parts) != 1 or type(parts[0]) is not list:
            return False
        (items,) = parts
    for item in items:
        key = _key(item)
        if key not in wanted:
            return False
        seen.add(key)
    return seen == wanted
