"""`misvo fit-reward`: a preference reward out of pairs. Imports no torch by itself."""

import json
import re
from pathlib import Path
from typing import Annotated

import typer

from misvo.cli_process import quiet_libraries
from misvo.errors import MisvoError


def fit_reward(
    pairs: Annotated[Path, typer.Argument(help="JSONL file with `chosen` and `rejected` in each line (.gz too).")],
    out: Annotated[Path, typer.Option("--out", help="Folder to write; use it as `--reward preference:FOLDER`.")],
    part: Annotated[
        str,
        typer.Option(help="Fit on one of several disjoint parts, such as `1/2`; the other makes a held-out reward."),
    ] = "all",
    held_out: Annotated[float, typer.Option(min=0.01, max=0.9, help="Share of the pairs to measure on.")] = 0.2,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Take the place of what is there.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON and nothing else.")] = False,
):
    """Fit a reward on preference pairs: a Bradley–Terry head on sentence embeddings, in about a minute.

    Example: `misvo fit-reward pairs.jsonl --out taste`, then `misvo steer "Why?" --reward preference:taste`
    """
    wanted = _part(part)
    if out.exists() and not overwrite and (not out.is_dir() or any(out.iterdir())):
        raise MisvoError(f"{out} is there already: give another name, or --overwrite.")
    quiet_libraries()
    from misvo import preference_fit, preference_pairs, view

    read = preference_pairs.read(pairs)
    if wanted is not None:
        read = read.part(*wanted)
    batches = -(-len(preference_fit.texts_of(read.rows)) // preference_fit.BATCH)
    with view.counting("Reading", batches) as count:
        fitted = preference_fit.fit(read, held_out, progress=count)
    preference_fit.save(fitted, out, pairs.name, part)
    if as_json:
        typer.echo(json.dumps(fitted.about()))
        return
    held = fitted.held_out
    typer.echo(
        f"{out}: fitted on {fitted.fitted.pairs} pairs; on {held.pairs} others it is right in {held.accuracy:.3f} "
        f"± {held.standard_error:.3f} (a coin: 0.5).\n"
        f"Use it as --reward preference:{out}; {out / 'README.md'} says more."
    )


def _part(text: str) -> tuple[int, int] | None:
    """`2/3` as (1, 3): parts are counted from 0 inside."""
    if text == "all":
        return None
    found = re.fullmatch(r"(\d{1,3})/(\d{1,3})", text)
    if not found or not 1 <= int(found[1]) <= int(found[2]):
        raise MisvoError(f"write --part as 1/2 or 2/2, not {text!r}.")
    return int(found[1]) - 1, int(found[2])
