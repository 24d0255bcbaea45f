"""`mbpp-plus`: MBPP+ programs (EvalPlus); the reward is the fraction of held-out tests that an answer passes.

A file has EvalPlus's own records (`base_input`, `plus_input`, `assertion`, ...), as its release does. The hub's copy
keeps the inputs inside a test script instead; they are read off its syntax tree, never run.
"""

import ast
from pathlib import Path

from misvo.errors import MisvoError
from misvo.rewards.code_mbpp import mbpp_plus_columns, mbpp_plus_prompt
from misvo.tasks import CODE, Row
from misvo.tasks.files import read_hub, read_jsonl

REWARD = CODE
DATASET, SPLIT = "evalplus/mbppplus", "test"


def read(data=None):
    if data is None:
        records = [from_hub(record) for record in read_hub(DATASET, SPLIT, "give EvalPlus's JSONL file by --data")]
        source = f"{DATASET} ({SPLIT})"
    else:
        records, source = read_jsonl(data), Path(data).name
    rows = []
    for number, record in enumerate(records, 1):
        try:
            rows.append(Row(str(record["task_id"]), mbpp_plus_prompt(record), mbpp_plus_columns(record)))
        except KeyError as error:
            raise MisvoError(f"record {number} of {source} has no field {error}: it is no MBPP+ record.") from error
    return source, rows


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
        "base_input": _literal(inputs[-1]),
        "plus_input": [],
        "atol": ast.literal_eval(judged[-1].args[-1]),
        "assertion": "\n".join(record["test_list"]),
    }


def _names(node):
    return [getattr(target, "id", None) for target in node.targets]


def _called(node):
    return getattr(node.func, "id", None)


def _literal(node):
    """The value of a literal in which `inf`, `nan` and `-inf` may stand as names."""
    source = ast.unparse(node)
    tree = ast.parse(source, mode="eval")
    return ast.literal_eval(_Infinities().visit(tree).body)


class _Infinities(ast.NodeTransformer):
    def visit_Name(self, node):
        return ast.Constant(float(node.id)) if node.id in ("inf", "nan") else node
