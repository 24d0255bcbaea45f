"""The MBPP+ tasks that equality with the reference's answer would judge wrongly, by the name of their function.

The names are those that EvalPlus's evaluator (0.3.1) treats apart. Two kinds:
  - `match` compares otherwise (see `compare`): by elements, or by whether there is an answer at all;
  - `also` knows other right answers to an input, because the text has a second reading or the reference is wrong.

Two rows are stricter than EvalPlus, which takes anything at all from are_equivalent and 0 for everything from sum_div:
a reward must not be had for `return None` or `return 0`.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

_LARGEST = 10**10  # its divisors are found in a hundred thousand divisions


@dataclass(frozen=True)
class Comparison:
    match: str = "equal"
    also: Callable | None = None  # (*arguments) -> other right answers than the reference's


def other_answers(comparison, arguments):
    """What else is right for these arguments; nothing where the rule does not apply to them."""
    if comparison.also is None:
        return []
    try:
        return comparison.also(*arguments)
    except (ArithmeticError, TypeError, ValueError):  # other arguments than the rule knows, as text or far too large
        return []


def _divisor_sums_agree(first, second):
    """Whether the sums of divisors are the same, with the numbers themselves and without."""
    return [
        _divisor_sum(first) == _divisor_sum(second),
        _divisor_sum(first) - first == _divisor_sum(second) - second,
    ]


def _nothing_to_sum(number):
    return [0] if number < 2 else []


def _upright_pyramid(edge, height):
    """The surface of a square pyramid whose height is measured inside, from the middle of its base."""
    return [round(edge**2 + 2 * edge * math.hypot(edge / 2, height))]


def _digit_by_digit(first, second):
    """The distances of digits that stand at the same place."""
    width = max(len(str(first)), len(str(second)))
    pairs = zip(str(first).zfill(width), str(second).zfill(width), strict=True)
    return [sum(abs(int(one) - int(other)) for one, other in pairs)]


@functools.lru_cache(maxsize=1024)
def _divisor_sum(number):
    if not 0 < number <= _LARGEST:
        raise ValueError("too large, or with endless divisors")
    small = [divisor for divisor in range(1, math.isqrt(number) + 1) if number % divisor == 0]
    return sum({*small, *(number // divisor for divisor in small)})


SPECIAL = {
    # Which elements, in any order and any collection: the texts ask for no order, and some references return a set.
    "similar_elements": Comparison("set"),
    "find_char_long": Comparison("set"),
    "common_in_nested_lists": Comparison("set"),
    "extract_singly": Comparison("set"),
    "larg_nnum": Comparison("set"),
    "intersection_array": Comparison("set"),
    "find_dissimilar": Comparison("set"),
    "Diff": Comparison("set"),
    # A match object or None: the references return what `re` gives them, others True and False.
    "check_str": Comparison("not-none"),
    "text_match_three": Comparison("not-none"),
    "text_starta_endb": Comparison("not-none"),
    # Other right answers.
    "are_equivalent": Comparison(also=_divisor_sums_agree),  # the reference counts square roots twice and adds 1
    "sum_div": Comparison(also=_nothing_to_sum),  # the reference says 1 where a number has no divisor below itself
    "surface_Area": Comparison(also=_upright_pyramid),  # the reference takes the height for that of a side
    "digit_distance_nums": Comparison(also=_digit_by_digit),  # the reference adds the digits of the difference
}
