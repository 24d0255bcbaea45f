"""A saved run: a folder with the whole of a result in it, and why it survives a process that is killed.

    result.json                             what `Result.to_dict` says
    steering.safetensors, steering.json     the vectors, where there are some: `Steering.from_pretrained(folder)`
    value/                                  the value network of re-control, where there is one

A new run is built in `.saving`. Renaming that to `.saved` is the one moment at which it takes the place of the old
one; then its files move up, result.json last. A process that dies while they do leaves the rest to whoever reads or
writes the folder next. Files of other names stay where they are. This file knows plain data and vectors, no results.
"""

import json
import os
import shutil
from pathlib import Path

import safetensors

from misvo import steering as steering_files
from misvo import value as value_files
from misvo.errors import MisvoError
from misvo.steering import Steering
from misvo.value import ValueNetwork

RESULT, BUILDING, COMMITTED = "result.json", ".saving", ".saved"
VALUE = "value"  # the folder of the value network
STEERING_PARTS = (steering_files.WEIGHTS, steering_files.METADATA)
VALUE_PARTS = (f"{VALUE}/{value_files.WEIGHTS}", f"{VALUE}/{value_files.METADATA}")


def write(folder, plain: dict, steering: Steering | None, value: ValueNetwork | None, overwrite: bool) -> None:
    """Save a run, all of it or nothing; OSError where the disk is in the way."""
    folder = Path(folder)
    try:
        text = json.dumps(plain) + "\n"
    except TypeError as error:
        raise MisvoError(f"the result cannot be saved: it holds what JSON cannot ({error}).") from error
    if not overwrite and holds_run(folder):
        raise MisvoError(f"{folder} already holds a run or a steering: give another folder, or overwrite=True.")
    building = folder / BUILDING
    shutil.rmtree(building, ignore_errors=True)  # of a process that was killed
    building.mkdir(parents=True)
    try:
        if steering is not None:
            steering.save_pretrained(building)
        if value is not None:
            value.save_pretrained(building / VALUE)
            (folder / VALUE).mkdir(exist_ok=True)
        (building / RESULT).write_text(text, encoding="utf-8")
        _settle(folder)
        os.replace(building, folder / COMMITTED)
    except Exception as error:
        shutil.rmtree(building, ignore_errors=True)
        if isinstance(error, safetensors.SafetensorError):  # how it reports a full disk
            raise OSError(f"{folder} could not be written: {error}") from error
        raise
    _settle(folder)


def holds_run(folder: Path) -> bool:
    """Whether saving there would take the place of something."""
    return any((folder / name).exists() for name in (RESULT, COMMITTED, *STEERING_PARTS, *VALUE_PARTS))


def read(folder) -> tuple[dict, Steering | None, ValueNetwork | None]:
    """What `write` was given; MisvoError where that cannot be had."""
    folder = Path(folder)
    plain = read_plain(folder)
    if not isinstance(plain, dict):
        raise MisvoError(f"{folder / RESULT} holds no result of a run.")
    parts = _parts(plain)
    try:
        steering = Steering.from_pretrained(folder) if parts.issuperset(STEERING_PARTS) else None
        value = ValueNetwork.from_pretrained(folder / VALUE) if parts.issuperset(VALUE_PARTS) else None
    except OSError as error:
        raise MisvoError(f"{folder} could not be read: {error}") from error
    return plain, steering, value


def read_plain(path: Path):
    """The content of a run's result.json, by its folder or by its own name."""
    try:
        if path.is_dir():
            _settle(path)
            path = path / RESULT
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise MisvoError(f"there is no {path}: give a folder that `misvo steer --save` wrote.") from None
    except (OSError, ValueError, RecursionError) as error:
        raise MisvoError(f"{path} could not be read: {error}") from error


def _parts(plain: dict) -> set[str]:
    """The files that belong to a run, beside result.json; a folder may hold others of such names."""
    parts = set() if plain.get("norm") is None else set(STEERING_PARTS)
    return parts | set(VALUE_PARTS) if plain.get("value_network") else parts


def _settle(folder: Path) -> None:
    """Move a committed run into its place, or go on with that: each file is either still below or already there."""
    committed = folder / COMMITTED
    if (committed / RESULT).is_file():
        for name in _parts_of(folder) - _parts_of(committed):
            (folder / name).unlink(missing_ok=True)  # the run before had it, this one has not
        for name in (*STEERING_PARTS, *VALUE_PARTS, RESULT):
            if (committed / name).is_file():
                os.replace(committed / name, folder / name)
    shutil.rmtree(committed, ignore_errors=True)


def _parts_of(folder: Path) -> set[str]:
    try:
        return _parts(json.loads((folder / RESULT).read_text(encoding="utf-8")))
    except (OSError, ValueError, RecursionError, AttributeError):  # no run, or not one that can be read
        return set()
