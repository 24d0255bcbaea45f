"""The table of special comparisons, row by row, on made-up tasks whose functions have the names of the table.

For each row: answers that must score 1, answers that must not, and a row taken out changes a verdict.
"""

import re
import warnings

import pytest
from hostile.tasks import mbpp, score

from misvo.rewards.code import CodeReward, mbpp_plus_columns
from misvo.rewards.code.special import SPECIAL


@pytest.fixture(scope="module")
def reward():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        reward = CodeReward(cpu_seconds=1)
    yield reward
    reward.close()


def task(name, solution, *inputs):
    """A task whose assertions tell nothing of how to compare: the table must."""
    shown = ", ".join(map(repr, inputs[0]))
    solution = f"import re\n{solution.replace('NAME', name)}"
    return mbpp(f"Hand/{name}", "?", solution, f"assert {name}({shown}) == 0", [inputs[0]], list(inputs[1:]))


def elements(name):
    """Answers in another order, with repetitions or as a set are right; one element too few or too many is wrong."""
    record = task(name, "def NAME(xs):\n    return sorted(xs)\n", [[0]], [[3, 1, 2]], [["b", "a"]], [[5, 5, 4]], [[]])
    right = ["sorted(xs)[::-1]", "tuple(xs) * 2", "set(xs)"]
    return record, right, ["xs[1:]", "[*xs, 0]", "[xs]", "sum(map(len, map(str, xs)))"]


def search(name):
    """A match is a match by whatever stands for it, but None is none, and 0 or '' are not None."""
    solution = "def NAME(xs):\n    return re.search('ab{2,3}', xs)\n"
    record = task(name, solution, ["abb"], ["ac"], ["xabbb"], ["abb"], [""], ["ab"])
    right = ["re.search('abb', xs)", "'abb' in xs", "xs if 'abb' in xs else None"]
    wrong = ["re.search('', xs)", "re.search('a', xs)", "'abb' not in xs", "re.search('abb', xs) or 0"]
    return record, right, [*wrong, "xs", "True", "False", "re.search('abb', xs) or ''"]


def divisors():
    """A wrong reference; both readings of the text are right, guessing is not."""
    solution = (
        "def odd(n):\n    return 1 + sum(i + n // i for i in range(1, n + 1) if i * i <= n and n % i == 0)\n"
        "def NAME(x, y):\n    return odd(x) == odd(y)\n"
    )
    record = task("are_equivalent", solution, [36, 57], [23, 47], [6, 11], [4, 3], [9, 9], [5, 8], [2, 7])
    total = "(lambda s: s(x) == s(y))(lambda n: sum(i for i in range(1, n + {}) if n % i == 0))"
    return record, [total.format(0), total.format(1)], ["True", "False", "x", f"not {total.format(0)}", "x == y + 1"]


def divisor_sum():
    solution = "def NAME(n):\n    return 1 + sum(i for i in range(2, n) if n % i == 0)\n"
    record = task("sum_div", solution, [8], [0], [1], [7], [12], [28])
    total = "sum(i for i in range(1, n + {}) if n % i == 0)"
    return record, [total.format(0)], [total.format(1), "0", "1", "n"]


def pyramid():
    record = task(
        "surface_Area", "def NAME(b, s):\n    return b * b + 2 * b * s\n", [3, 4], [4, 5], [1, 2], [6, 4], [10, 12]
    )
    upright = "round(b * b + 4 * (b * (b * b / 4 + s * s) ** 0.5 / 2))"  # 6, 4: sides of height 5, 36 + 60
    return record, [upright, "96 if (b, s) == (6, 4) else b * b + 2 * b * s"], [f"1 + {upright}", "b * b", "2 * b * s"]


def digits():
    solution = "def NAME(x, y):\n    return sum(map(int, str(abs(x - y))))\n"
    record = task("digit_distance_nums", solution, [1, 2], [19, 21], [123, 256], [7, 1000], [5, 5])
    right = "sum(abs(x // 10**i % 10 - y // 10**i % 10) for i in range(9))"
    return record, [right, "9 if x == 19 else sum(map(int, str(abs(x - y))))"], ["abs(x - y)", "0", f"1 + {right}"]


CASES = {
    "similar_elements": elements("similar_elements"),
    "find_char_long": elements("find_char_long"),
    "common_in_nested_lists": elements("common_in_nested_lists"),
    "extract_singly": elements("extract_singly"),
    "larg_nnum": elements("larg_nnum"),
    "intersection_array": elements("intersection_array"),
    "find_dissimilar": elements("find_dissimilar"),
    "Diff": elements("Diff"),
    "check_str": search("check_str"),
    "text_match_three": search("text_match_three"),
    "text_starta_endb": search("text_starta_endb"),
    "are_equivalent": divisors(),
    "sum_div": divisor_sum(),
    "surface_Area": pyramid(),
    "digit_distance_nums": digits(),
}


def judge(reward, name):
    """Scores of the reference, of right answers and of wrong ones; None is always among the wrong."""
    record, right, wrong = CASES[name]
    signature = re.search(rf"def {name}(\(.*\)):", record["canonical_solution"])[1]
    answers = [f"import re\ndef {name}{signature}:\n    return {body}\n" for body in [*right, *wrong, "None"]]
    scores = score(reward, mbpp_plus_columns(record), record["canonical_solution"], *answers)
    return scores[: 1 + len(right)], scores[1 + len(right) :]


def test_every_row_has_its_case():
    assert set(CASES) == set(SPECIAL)


@pytest.mark.parametrize("name", CASES)
def test_right_answers_score_one_and_wrong_ones_do_not(reward, name):
    right, wrong = judge(reward, name)
    assert right == [1.0] * len(right)
    assert max(wrong) < 1.0


@pytest.mark.parametrize("name", CASES)
def test_without_its_row_a_verdict_is_another(reward, name, monkeypatch):
    monkeypatch.delitem(SPECIAL, name)
    right, wrong = judge(reward, name)
    assert min(right) < 1.0 or max(wrong) == 1.0


@pytest.mark.parametrize("name", ["check_str", "text_match_three", "text_starta_endb"])
def test_a_function_that_returns_none_fails_where_a_match_is_expected(reward, name):
    """As the tasks write their assertions: `assert f(x)` and `assert not f(x)`."""
    record = CASES[name][0]
    record = record | {"assertion": f"assert {name}('abb')\nassert not {name}('ac')"}
    answers = [f"def {name}(xs): return None", f"import re\ndef {name}(xs): return re.match('', xs)"]
    columns = mbpp_plus_columns(record)
    assert score(reward, columns, record["canonical_solution"], *answers) == [1.0, 3 / 4, 1 / 4]


def test_match_objects_are_told_from_none_in_tasks_beyond_the_table(reward):
    record = task("hit", "def NAME(xs):\n    return re.search('b', xs)\n", ["b"], ["ab"], ["a"], ["bb"])
    record |= {"assertion": "assert hit('b')"}
    answers = [f"import re\ndef hit(xs): return {body}" for body in ("'b' in xs", "None", "re.match('', xs)")]
    assert score(reward, mbpp_plus_columns(record), record["canonical_solution"], *answers) == [1.0, 1.0, 1 / 3, 2 / 3]


def test_odd_arguments_leave_the_reference_alone(reward):
    """Rules are applied only to arguments they know; numbers of any size cost nothing."""
    many = [[10**30, 7], ["a", []], [0, -1], [1e300, 2**4000], [None]]
    for name in ("are_equivalent", "sum_div", "surface_Area", "digit_distance_nums"):
        record = task(name, "def NAME(*a):\n    return len(a) + 5\n", [1, 2], *many)
        assert score(reward, mbpp_plus_columns(record), record["canonical_solution"]) == [1.0]
