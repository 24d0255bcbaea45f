"""The converted models in the cache folder: which they are, how large, and how to be rid of them. Imports no torch."""

import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from misvo import embedded
from misvo.errors import MisvoError


@dataclass(frozen=True)
class Converted:
    """One folder that `embedded.model_folder` made, or began to make."""

    name: str  # as `--model` takes it
    folder: Path
    size: int  # bytes
    whole: bool  # False: what a conversion that was killed left


def models() -> list[Converted]:
    """What this machine holds, also of other versions of a wheel; other things in that folder are not ours."""
    cache = embedded.cache_folder()
    folders = sorted(path for path in cache.iterdir() if path.is_dir()) if cache.is_dir() else []
    found = []
    for name, entry in embedded.MODELS.items():
        package = re.escape(entry.package.split("==")[0])
        for folder in folders:
            match = re.fullmatch(rf"(\.?){package}-\d[\w.]*?(\.building)?", folder.name)
            if match and bool(match[1]) == bool(match[2]):
                found.append(Converted(name, folder, _size(folder), not match[1]))
    return found


def remove(model: Converted) -> None:
    """Delete one; a process that is killed meanwhile leaves nothing that could be mistaken for a model."""
    target = model.folder.name.removeprefix(".").removesuffix(".building")
    building = model.folder.with_name(f".{target}.building")
    try:
        with FileLock(model.folder.with_name(f".{target}.lock"), timeout=0):
            if model.whole:
                shutil.rmtree(building, ignore_errors=True)  # of a conversion that was killed
                os.replace(model.folder, building)
            if building.exists():
                shutil.rmtree(building)
    except Timeout as error:
        raise MisvoError(f"another misvo is converting {model.name} now: wait for it, then clear the cache.") from error


def shown_size(size: int) -> str:
    """As in "538 MB"."""
    value, unit = next(((size / scale, unit) for scale, unit in ((1e9, "GB"), (1e6, "MB")) if size >= scale), (0, ""))
    return f"{value:.3g} {unit}" if unit else f"{size / 1e3:.3g} kB"


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
