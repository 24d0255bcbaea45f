"""The options of `misvo steer` that are settings: made of the fields of `misvo.settings.Settings`, so they stand once.

An option that is not given is not passed on, so that a preset decides it; `given` takes those that were. Imports no
torch.
"""

import dataclasses
import inspect
import json
import types
import typing
from collections.abc import Mapping
from typing import Annotated

import typer

from misvo.options import about, named
from misvo.settings import PRESETS, SAMPLER, SPEED, STOPS, Settings

# What everybody needs comes first; these have panels of their own in `misvo steer --help`.
PANELS = {
    **dict.fromkeys(STOPS, "When to stop early"),
    **dict.fromkeys((*SPEED, "law_dtype", "on_reward_error", "reward_retries"), "More options"),
    "kl_budget": None,
}
LEFT_OUT = ("kl_ref", "explicit_fisher")  # always measured; of use to a benchmark alone
SHORTER = {"max_new_tokens": 64}  # somebody at a terminal waits for the answer


def parameters() -> list[inspect.Parameter]:
    """One keyword parameter for each setting, as typer reads them."""
    return [_parameter(field) for field in dataclasses.fields(Settings) if field.name not in LEFT_OUT]


def given(values: dict) -> dict:
    """The settings that the user gave, with the few that are other here."""
    names = {field.name for field in dataclasses.fields(Settings)}
    wanted = {name: value for name, value in values.items() if name in names}
    chosen = {name: value for name, value in wanted.items() if value not in (None, []) and value is not False}
    return {**SHORTER, **chosen}


def accepts_settings(command):
    """A command `f(..., **settings)` whose signature names every setting."""
    everything = named(command, parameters())
    command.__signature__ = inspect.Signature([p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in everything])
    command.__annotations__ = {p.name: p.annotation for p in everything}
    return command


def _parameter(field):
    says, short = about(field), field.metadata["short"]
    default, auto = SHORTER.get(field.name, field.default), PRESETS["auto"].get(field.name)
    if field.name in SAMPLER:
        says = f"{says} [auto: as the model came; paper: {default or 'none'}]"
    elif auto is not None and field.type is not bool:
        says = f"{says} [auto: {auto}; paper: {'none' if default is None else default}]"
    elif default is not None and field.type is not bool:
        says = f"{says} [default: {default}]"
    flags = [f"--{field.name.replace('_', '-')}", *([short] if short else [])]
    kind = bool if field.type is bool else _plain(field.type) | None
    parser = _json_object if kind == Mapping | None else None
    option = typer.Option(*flags, help=says, rich_help_panel=_panel(field), show_default=False, parser=parser)
    return inspect.Parameter(
        field.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=False if field.type is bool else None,
        annotation=Annotated[kind, option],
    )


def _panel(field):
    methods = field.metadata["methods"]
    if field.name in PANELS:
        return PANELS[field.name]
    return None if methods is None else f"Options of {' and '.join(methods)}"


def _json_object(text: str) -> dict:
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise typer.BadParameter(f'give a JSON object such as {{"enable_thinking": false}}, not {text!r}.')
    return value


def _plain(kind):
    """int of `int | None`."""
    if isinstance(kind, types.UnionType):
        kind = next(part for part in typing.get_args(kind) if part is not types.NoneType)
    return list[str] if typing.get_origin(kind) is tuple else kind  # a tuple of texts: an option that may come again
