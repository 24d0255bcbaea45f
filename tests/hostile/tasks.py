"""Handmade tasks in the forms of MBPP+ and HumanEval, and a shorthand for scoring answers to one of them."""

MARK = "verifier_reference_"


def mbpp(task_id, text, solution, assertion, base, plus, atol=0):
    entry_point = solution.split("def ")[-1].split("(")[0]
    return {
        "task_id": task_id,
        "prompt": f"'''\n{text}\n'''",
        "entry_point": entry_point,
        "canonical_solution": solution,
        "base_input": base,
        "plus_input": plus,
        "atol": atol,
        "assertion": assertion,
    }


SQUARE = mbpp(
    "Hand/square",
    "Write a function to square a number and add seven.",
    f"\n# {MARK}0123abcd\ndef solve(n):\n    return n * n + 7\n",
    "assert solve(2) == 11\nassert solve(3) == 16",
    [[2], [3]],
    [[n] for n in (1, 4, 5, 6, 7, 8, 9, 10)],
)
SHARED = mbpp(
    "Hand/shared",
    "Write a function to find the elements two tuples share.",
    "def shared(a, b):\n    return tuple(set(a) & set(b))\n",
    "assert shared((1, 2), (2, 3)) == (2,)",
    [[[1, 2], [2, 3]]],
    [[[], []], [["x", "y", "z"], ["z", "y"]], [[1, 2, 3], [3, 2, 1]]],
)
ANGLE = mbpp(
    "Hand/angle",
    "Write a function to get the angle of a complex number.",
    "import cmath\ndef angle(z):\n    return cmath.phase(z)\n",
    "import math\nassert math.isclose(angle(1j), 1.5707963, rel_tol=0.001)",
    [["1j"]],
    [["(1+2j)"], ["-3"], ["0.5j"]],
    atol=1e-4,
)
SPLIT = mbpp(
    "Hand/lists",
    "Write a function to count the lists in a tuple.",
    "def count_lists(t):\n    assert isinstance(t, tuple)\n    return sum(isinstance(x, list) for x in t)\n",
    "assert count_lists(([1], [2, 3])) == 2\nassert count_lists((1, [2])) == 1",
    [[[[1], [2, 3]]], [[1, [2]]]],
    [[[]], [[[], 5]], [["a", ["j"], [["b"]]]]],
)
MEAN = mbpp(
    "Hand/mean",
    "Write a function to compute the mean of a list.",
    "def mean(xs):\n    return sum(xs) / len(xs)\n",
    "assert mean([1, 2]) == 1.5",
    [[[1, 2]]],
    [[[]], [[1]], [[0.1, 0.2, 0.3]]],
)
RENAMED = {
    "canonical_solution": "def decode(n):\n    return [n]\n",
    "assertion": "assert decode(2) == [2]",
}
TASKS = [SQUARE, SHARED, ANGLE, SPLIT, MEAN]

HUMANEVAL = {
    "task_id": "Hand/0",
    "entry_point": "decode",
    "prompt": (
        "from typing import List\n\n\ndef encode(s: str) -> str:\n    return s[::-1]\n\n\n"
        'def decode(s: str) -> str:\n    """Undo encode.\n    >>> decode("ab")\n    \'ba\'\n    """\n'
    ),
    "canonical_solution": "    return s[::-1]\n",
    "test": (
        "METADATA = {}\n\n\ndef check(candidate):\n    from random import choice\n    import math\n"
        '    assert candidate("ab") == "ba"\n    assert True, "free"\n    assert candidate("abc") == "cba", "no"\n'
        "    for _ in range(3):\n        s = ''.join(choice('abc') for _ in range(9))\n"
        "        assert candidate(encode(s)) == s\n    assert not candidate('')\n"
        "    got = candidate('xyz')\n    assert math.fabs(len(got) - 3) < 1e-6\n"
        "    assert tuple(candidate('q')) == ('q',)\n"
    ),
}


def score(reward, columns, *answers):
    rows = {name: [value] * len(answers) for name, value in columns.items()}
    return reward(prompts=["?"] * len(answers), completions=list(answers), **rows)
