"""Finished vectors for a server that has no LM head at hand: Wu by position, in a folder with a name for each.

    export(head, vectors, goes_on=True, folder=Path("steerings/calm"))
    shelf = Shelf(Path("steerings")); shelf.load("calm").at(3)          # what is added to the logits of token 3

A folder holds `shift.safetensors`, the different rows (n, V) and which of them each position has (T,), and
`shift.json`.
"""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import safetensors
import safetensors.torch
import torch

from misvo.errors import MisvoError
from misvo.head import Head

ROWS, ABOUT, FORMAT = "shift.safetensors", "shift.json", "misvo-shift-1"
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
STRONGEST = 4.0  # times the vectors as they were made: a bound against accidents, chosen and not measured


@dataclass(frozen=True)
class NamedShift:
    """What is added to logits, at strength 1."""

    rows: torch.Tensor  # (n, V) fp32
    index: list[int]  # of each position
    goes_on: bool  # whether the last position's holds for all later ones

    def at(self, position: int) -> torch.Tensor | None:
        """(V,), or None where the model is left alone."""
        if position >= len(self.index) and not self.goes_on:
            return None
        return self.rows[self.index[min(position, len(self.index) - 1)]]


def export(head: Head, vectors: torch.Tensor, goes_on: bool, folder: Path, about: Mapping | None = None) -> None:
    """Write Wu of vectors (T, d); equal vectors are written once."""
    if not NAME.fullmatch(folder.name):
        raise MisvoError(
            f"{folder.name!r} cannot be a name: take letters, digits, dots, dashes, and at most 64 of them."
        )
    different, index = torch.unique(vectors, dim=0, return_inverse=True)
    folder.mkdir(parents=True, exist_ok=True)
    rows = head.shift(different).float().cpu().contiguous()
    safetensors.torch.save_file({"rows": rows, "index": index.cpu().contiguous()}, folder / ROWS)
    described = {**(about or {}), "format": FORMAT, "vocabulary": head.vocab_size, "goes_on": goes_on}
    (folder / ABOUT).write_text(json.dumps(described, indent=2) + "\n", encoding="utf-8")


class Shelf:
    """The exported steerings of one folder, by name, as they were when this was made; nothing else can be reached."""

    def __init__(self, folder: Path):
        self.folder = folder.resolve()
        if not self.folder.is_dir():
            raise MisvoError(f"there is no folder {folder} of exported steerings.")
        found = [
            path for path in sorted(self.folder.iterdir()) if NAME.fullmatch(path.name) and (path / ABOUT).is_file()
        ]
        self.about = {path.name: _described(path) for path in found}

    def check(self, name) -> None:
        """Refuse what is not a name of a steering that is here."""
        if not isinstance(name, str) or name not in self.about:
            shown = repr(name)[:80]
            known = ", ".join(self.about) or "none"
            raise MisvoError(f"there is no steering called {shown}; this server has: {known[:500]}.")

    def check_vocabulary(self, size: int) -> None:
        """Refuse a shelf that holds something made for another model."""
        for name, about in self.about.items():
            if about["vocabulary"] != size:
                raise MisvoError(f"{name} was made for a model of {about['vocabulary']} tokens; this one has {size}.")

    def load(self, name: str, device: torch.device | str = "cpu") -> NamedShift:
        self.check(name)
        try:
            tensors = safetensors.torch.load_file(self.folder / name / ROWS)
            rows, index = tensors["rows"].to(device), tensors["index"].tolist()
        except (OSError, KeyError, safetensors.SafetensorError) as error:
            raise MisvoError(f"{self.folder / name / ROWS} cannot be read ({error}).") from error
        return NamedShift(rows, index, self.about[name]["goes_on"])


def check_strength(strength) -> float:
    """A factor that a client asked for."""
    number = isinstance(strength, int | float) and not isinstance(strength, bool)
    if not number or not math.isfinite(strength) or abs(strength) > STRONGEST:
        raise MisvoError(f"a strength is a number from −{STRONGEST:g} to {STRONGEST:g}, not {repr(strength)[:40]}.")
    return float(strength)


def _described(folder: Path) -> dict:
    try:
        about = json.loads((folder / ABOUT).read_text(encoding="utf-8"))
        if about["format"] == FORMAT and type(about["vocabulary"]) is int and type(about["goes_on"]) is bool:
            return about
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise MisvoError(f"{folder / ABOUT} is not the description of an exported steering.") from error
    raise MisvoError(f"{folder / ABOUT} is not the description of an exported steering.")
