"""`mbpp-plus`: MBPP+ programs (EvalPlus); the reward is the fraction of held-out tests that an answer passes.

A file has EvalPlus's own records (`base_input`, `plus_input`, `assertion`, ...), as its release does. The hub's copy
keeps the inputs inside a test script instead; they are read off its syntax tree, never run. A record that cannot be
read is left out, with a warning that names it.
"""

import ast
import warnings
from pathlib import Path

from misvo.errors import MisvoError
from misvo.rewards.code.constants import constant
from misvo.rewards.code.mbpp import mbpp_plus_columns, mbpp_plus_prompt
from misvo.tasks.files import read_hub, read_jsonl
from misvo.tasks.row import CODE, Row

REWARD = CODE
DATASET, SPLIT = "evalplus/mbppplus", "test"


def read(data=None):
    if data is None:
        records, form = read_hub(DATASET, SPLIT, "give EvalPlus's JSONL file by --data"), from_hub
        source = f"{DATASET} ({SPLIT})"
    else:
        records, form, source = read_jsonl(data), dict, Path(data).name
    rows, left_out = [], []
    for number, record in enumerate(records, 1):
        try:
            rows.append(_row(form(record)))
        except Exception as error:  # one odd record must not stop a file, and it may break anywhere
            left_out.append(f"record {number} ({record.get('task_id', 'without a task_id')}): {_reason(error)}")
    if left_out and not rows:
        raise MisvoError(f"no record of {source} could be read. {left_out[0]}")
    if left_out:
        message = f"{len(left_out)} of {len(records)} tasks of {source} are left out. {' '.join(left_out)}"
        warnings.warn(message, stacklevel=3)
    return source, rows


def _row(record):
    return Row(str(record["task_id"]), mbpp_plus_prompt(record), mbpp_plus_columns(record))


def _reason(error):
    if isinstance(error, KeyError):
        return f"it has no field {error}: it is no MBPP+ record."
    return str(error) if isinstance(error, MisvoError) else f"{type(error).__name__}: {error}."


def from_hub(record: dict) -> dict:
    """A record of the hub's copy in the form of EvalPlus's release."""
    name = f"Mbpp/{record['task_id']}"
    tree = ast.parse(record["test"])
    inputs = [node.value for node in tree.body if isinstance(node, ast.Assign) and _names(node) == ["inputs"]]
    # The script ends in `assertion(f(*inp), ..., atol)`, which names the function and the tolerance.
    judged = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and _called(node) == "assertion"]
    if not inputs or not judged or not isinstance(judged[-1].args[0], ast.Call):
        raise MisvoError(
            f"the test script of {name} on the hub has another form than misvo knows: give a file by --data."
        )
    return {
        "task_id": name,
        "prompt": record["prompt"],
        "entry_point": _called(judged[-1].args[0]),
        "canonical_solution": record["code"],
        "base_input": constant(inputs[-1]),
        "plus_input": [],
        "atol": constant(judged[-1].args[-1]),
        "assertion": "\n".join(record["test_list"]),
    }


def _names(node):
    return [getattr(target, "id", None) for target in node.targets]


def _called(node):
    return getattr(node.func, "id", None)
