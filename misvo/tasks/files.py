"""Reading prompt files and data sets of the hub, with errors that name the file and the line."""

import gzip
import json
from pathlib import Path

from misvo.errors import MisvoError, first_line


def read_jsonl(path) -> list[dict]:
    """The records of a JSONL file, gzipped or not; blank lines are skipped."""
    path = Path(path)
    if not path.is_file():
        raise MisvoError(f"there is no file {path} to read prompts from.")
    records = []
    try:
        with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                try:
                    record = json.loads(line)
                except json.JSONDecodeError as error:
                    raise MisvoError(f"line {number} of {path} is not JSON ({error.msg}).") from error
                if not isinstance(record, dict):
                    raise MisvoError(f"line {number} of {path} is not a JSON object.")
                records.append(record)
    except (UnicodeDecodeError, gzip.BadGzipFile, EOFError) as error:
        raise MisvoError(f"{path} could not be read ({error}).") from error
    return records


def read_hub(dataset: str, split: str, how_else: str) -> list[dict]:
    """The records of a data set on the Hugging Face hub."""
    try:
        import datasets
    except ImportError as error:
        raise MisvoError(
            f"the hub needs the package datasets (pip install 'misvo[bench]'); else {how_else}."
        ) from error
    try:
        return list(datasets.load_dataset(dataset, split=split))
    except Exception as error:  # offline, moved, gated: each library of the stack raises its own kind
        raise MisvoError(f"{dataset} could not be loaded from the hub ({first_line(error)}); {how_else}.") from error


def first_field(record: dict, names: tuple[str, ...], where: str):
    """The first of these fields that a record has; an error where it has none."""
    for name in names:
        if record.get(name) not in (None, ""):
            return record[name]
    raise MisvoError(f"{where} has no field {' or '.join(repr(name) for name in names)}.")
