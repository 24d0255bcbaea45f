"""MBPP+ records as rows for the code reward: what to ask, what to hold out, how to compare.

A record has a text ("prompt"), a reference program ("canonical_solution"), inputs as JSON ("base_input",
"plus_input"), a tolerance ("atol") and three or more assertions ("assertion"). JSON has no tuples, sets or
complex numbers, and the record does not say how to compare. Tasks that EvalPlus compares in a way of its own
stand in a table (`special`); all else is read off the assertions:
  - where an assertion writes a tuple or a set and the JSON has a list, every input gets a tuple or set there;
    where it writes a number and the JSON has text, the text is read as a number;
  - `set(f(x)) == set(y)` compares sets, `assert f(x)` compares truth; and when the reference program returns
    a set poured into a list or tuple, order is no part of the answer either.
The prompt shows the first assertion, as is customary; its input is left out of the held-out tests.

Left out on purpose: "contract" (every held-out input is valid) and EvalPlus's table of tasks with special
types.
"""

import ast
import warnings

from misvo.errors import MisvoError
from misvo.rewards.code.constants import NotConstant, constant
from misvo.rewards.code.special import SPECIAL, Comparison, other_answers
from misvo.sandbox.codec import decode, dumps, encode

_ASK = "Write a Python function that solves this problem. Answer with the code in one Markdown code block.\n\n"


def mbpp_plus_prompt(record):
    """The problem with its first assertion, which names the function; no held-out test."""
    text = record["prompt"].strip().strip("'\"").strip()
    return f"{_ASK}{text}\nYour code should pass this test: `{_assertions(record)[0][0]}`"


def mbpp_plus_columns(record):
    """The columns that `CodeReward` needs for this record."""
    assertions = _assertions(record)
    inputs = _inputs(record, [arguments for _, arguments, _ in assertions])
    shown = encode(assertions[0][1])
    calls = [tree for tree in map(encode, inputs) if tree != shown]
    comparison = SPECIAL.get(record["entry_point"]) or _comparison(record, assertions[0][2])
    columns = {
        "task_id": record["task_id"],
        "entry_point": record["entry_point"],
        "solution": record["canonical_solution"],
        "calls": dumps(calls),
        "atol": float(record["atol"]),
        "match": comparison.match,
    }
    if comparison.also:
        columns["also"] = dumps([[*map(encode, other_answers(comparison, decode(tree)))] for tree in calls])
    return columns


def _comparison(record, match):
    """How a task without a row in the table is compared, given how its first assertion does."""
    if match == "equal" and _returns_poured_set(record["canonical_solution"], record["entry_point"]):
        match = "set"
    return Comparison(match)


def _inputs(record, written):
    """All inputs of the record with the types that the assertions write; `written` has their arguments."""
    rows = [*record["base_input"], *record["plus_input"]]
    if len({len(row) for row in [*rows, *written]}) != 1:
        return rows  # optional arguments: nothing to line up
    shapes, columns = {}, []
    for place, column in enumerate(zip(*rows, strict=True)):
        examples = [arguments[place] for arguments in written]
        for example, given in zip(examples, column, strict=False):
            _learn(shapes, (place,), example, given)
        restored = [_restore(shapes, (place,), value) for value in column]
        columns.append(_read_numbers(examples, restored))
    return [list(row) for row in zip(*columns, strict=True)]


def _assertions(record):
    """(source, arguments, match) of each assertion that calls the function."""
    found = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)
        tree = ast.parse(record["assertion"])
    for node in tree.body:
        if not isinstance(node, ast.Assert):
            continue
        for call in ast.walk(node.test):
            if isinstance(call, ast.Call) and getattr(call.func, "id", None) == record["entry_point"]:
                arguments = [_value(argument, record) for argument in call.args]
                source = ast.get_source_segment(record["assertion"], node)
                found.append((source, arguments, _match(node.test, call)))
                break
    if not found:
        raise MisvoError(f"{record['task_id']} has no assertion that calls {record['entry_point']}.")
    return found


def _value(argument, record):
    try:
        return constant(argument)
    except NotConstant as error:
        raise MisvoError(f"{record['task_id']} has an assertion that cannot be read: {error}.") from error


def _match(test, call):
    """How an assertion compares: "set", "truth" or "equal"."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        test = test.operand
    if test is call:
        return "truth"
    if isinstance(test, ast.Compare) and isinstance(test.left, ast.Call) and test.left.args == [call]:
        return "set" if getattr(test.left.func, "id", None) == "set" else "equal"
    return "equal"


def _learn(shapes, place, written, given):
    """Note, by place, the types that the assertions write where the JSON has a list.

    A place is the argument's number, then a * for each level of nesting: elements of one collection are alike.
    """
    if not isinstance(given, list):
        return
    if isinstance(written, list | tuple | set | dict):
        # An empty {} is a dict where a full one is a set, so emptiness is part of what is noted.
        shapes.setdefault(place, {}).setdefault(bool(given), type(written))
    if isinstance(written, list | tuple) and len(written) == len(given):
        for one, other in zip(written, given, strict=True):
            _learn(shapes, (*place, "*"), one, other)


def _restore(shapes, place, value):
    """The JSON value with the types that the assertions write."""
    if isinstance(value, dict):
        return {key: _restore(shapes, (*place, "*"), item) for key, item in value.items()}
    if not isinstance(value, list):
        return value
    items = [_restore(shapes, (*place, "*"), item) for item in value]
    shape = shapes.get(place, {})
    kind = shape.get(bool(value), shape.get(not value, list))
    try:
        return kind(items)
    except (TypeError, ValueError):  # unhashable elements in what would be a set
        return items


def _read_numbers(written, column):
    """An argument's values; text is read as numbers if the assertions write numbers and all of it can be."""
    texts = [value for value in column if isinstance(value, str)]
    if not all(isinstance(value, int | float | complex) for value in written):
        return column
    if None in map(_number, texts):
        return column
    return [_number(value) if isinstance(value, str) else value for value in column]


def _number(text):
    for kind in (int, float, complex):
        try:
            return kind(text)
        except ValueError:
            continue
    return None


def _returns_poured_set(solution, entry_point):
    """Whether the function returns `list(s)` or `tuple(s)` of a set s, whose order means nothing."""
    functions = [node for node in ast.parse(solution).body if getattr(node, "name", None) == entry_point]
    if not functions:
        return False
    returns = [node.value for node in ast.walk(functions[-1]) if isinstance(node, ast.Return)]
    return bool(returns) and all(_poured(value) for value in returns)


def _poured(node):
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _poured(node.left) and _poured(node.right)
    is_pouring = isinstance(node, ast.Call) and getattr(node.func, "id", None) in ("list", "tuple")
    return is_pouring and len(node.args) == 1 and _is_set(node.args[0])


def _is_set(node):
    if isinstance(node, ast.Set | ast.SetComp):
        return True
    if isinstance(node, ast.BinOp):
        return _is_set(node.left) or _is_set(node.right)
    if isinstance(node, ast.Call):
        names = ("set", "frozenset", "intersection", "union", "difference", "symmetric_difference")
        return getattr(node.func, "id", getattr(node.func, "attr", None)) in names
    return False
