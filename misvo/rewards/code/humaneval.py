"""HumanEval records as rows for the code reward: its own `check` decides, out of the program's reach.

A record tests with a function `check(candidate)` full of assertions. It runs twice, each time in a cell of
its own and never with the program. First with the reference solution, writing down the arguments of every
call: those are the inputs that programs then get. Later once for each program, with a stand-in that gives
back what the program answered. Each assertion that called the candidate is one test, counted by itself;
`assert True` is none.

Calls that the prompt's docstring shows are not held out, unless it shows them all.
"""

import ast
import contextlib
import re

from misvo.errors import MisvoError
from misvo.sandbox.codec import dumps, encode

_ASK = "Complete this Python function. Answer with the complete code in one Markdown code block.\n\n"

# Runs inside a cell, after the reference solution and the rewritten check.
_STAND = '''
import copy as _copy

class _Missing:
    """Stands for an answer that never came: every look at it fails, so the assertion does."""
    def _fail(self, *_):
        raise TypeError("no answer")
    __eq__ = __ne__ = __lt__ = __gt__ = __le__ = __ge__ = __bool__ = __iter__ = __len__ = __getitem__ = _fail
    __hash__ = None

_calls, _events, _state = [], [], {"seen": 0}

def _judge(assertion):
    try:
        passed = bool(assertion())
    except Exception:
        passed = False
    fresh = list(range(_state["seen"], len(_calls)))
    _state["seen"] = len(_calls)
    if fresh:
        _events.append([fresh, passed])

def _run(answer):
    def candidate(*arguments):
        _calls.append(_copy.deepcopy(list(arguments)))
        return answer(len(_calls) - 1, arguments)
    try:
        check(candidate)
    except Exception:
        pass
    return [_calls, _events]

def _record():
    return _run(lambda index, arguments: ENTRY_POINT(*arguments))

def _replay(answers):
    def answer(index, arguments):
        came, value = answers[index] if index < len(answers) else (False, None)
        return value if came else _Missing()
    return [passed for fresh, passed in _run(answer)[1]]
'''


def humaneval_prompt(record):
    """The function header and docstring as the record has them; no held-out test."""
    return f"{_ASK}```python\n{record['prompt'].strip()}\n```"


def humaneval_columns(record):
    """The columns that `CodeReward` needs for this record."""
    prompt, entry_point = record["prompt"], record["entry_point"]
    solution = prompt + record["canonical_solution"]
    return {
        "task_id": record["task_id"],
        "entry_point": entry_point,
        "solution": solution,
        "prompt_code": prompt,
        "check": solution + "\n" + _rewrite(record["test"]) + _STAND.replace("ENTRY_POINT", entry_point),
        "shown": dumps([encode(arguments) for arguments in _shown_calls(prompt, entry_point)]),
    }


class _Assertions(ast.NodeTransformer):
    def visit_Assert(self, node):
        judge = ast.parse("_judge(lambda: 0)").body[0]
        judge.value.args[0].body = node.test
        return ast.copy_location(judge, node)


def _rewrite(test):
    """The test with `assert x` turned into `_judge(lambda: x)`, so that one failure does not end the rest."""
    tree = ast.parse(test)
    if not any(getattr(node, "name", None) == "check" for node in tree.body):
        raise MisvoError("A HumanEval record's test must define check(candidate).")
    return ast.unparse(ast.fix_missing_locations(_Assertions().visit(tree)))


def preamble(prompt, entry_point):
    """What the prompt defines before the function asked for: imports and helpers an answer may rely on."""
    tree = ast.parse(prompt + "\n    pass\n")
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name == entry_point:
            return "\n".join(prompt.split("\n")[: node.lineno - 1])
    return ""


def _shown_calls(prompt, entry_point):
    """The argument lists of the calls that the prompt writes out."""
    shown = []
    for match in re.finditer(rf"\b{re.escape(entry_point)}\(", prompt):
        for end in re.finditer(r"\)", prompt[match.start() :]):
            try:
                call = ast.parse(prompt[match.start() : match.start() + end.end()], mode="eval").body
            except (SyntaxError, ValueError):
                continue
            with contextlib.suppress(ValueError, AttributeError):  # no literals, as in the function's own header
                shown.append([ast.literal_eval(argument) for argument in call.args])
            break
    return shown
