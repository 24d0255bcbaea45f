"""Options that several commands have, and those of `misvo steer` that are settings, so that each stands once.

Settings are made of the fields of `misvo.settings.Settings`. One that is not given is not passed on, so that a preset
decides it; `given` takes those that were. Imports no torch.
"""

import dataclasses
import inspect
import json
import types
import typing
from collections.abc import Mapping
from typing import Annotated

import typer

from misvo.errors import MisvoError
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

MODEL = "The model"  # a panel of its own, too
Dtype = Annotated[
    str, typer.Option(help="Precision of the weights: auto, float32, bfloat16, float16.", rich_help_panel=MODEL)
]
Device = Annotated[
    str | None, typer.Option(help="Where the model runs, such as `cpu` or `cuda:0`.", rich_help_panel=MODEL)
]
DeviceMap = Annotated[str | None, typer.Option(help="Spread a large model, such as `auto`.", rich_help_panel=MODEL)]
Revision = Annotated[str | None, typer.Option(help="Branch, tag or commit on the hub.", rich_help_panel=MODEL)]
TrustRemoteCode = Annotated[bool, typer.Option(help="Run code that comes with the checkpoint.", rich_help_panel=MODEL)]
Quantize = Annotated[
    str | None, typer.Option(help="`int8`: quicker on a CPU, and another model.", rich_help_panel=MODEL)
]
Compile = Annotated[
    bool, typer.Option("--compile", help="Compile the body, for GPUs; minutes, once.", rich_help_panel=MODEL)
]
Engine = Annotated[
    str, typer.Option(help="What decodes: `torch`, or `vllm` for GPUs (docs/vllm.md).", rich_help_panel=MODEL)
]
EngineOptions = Annotated[
    list[str],
    typer.Option(help="`name=value` for vLLM, such as `max_model_len=4096`. May come again.", rich_help_panel=MODEL),
]
Columns = Annotated[
    list[str],
    typer.Option(
        "--column",
        help="`name=value`, handed to the reward: JSON where it can be read as such, else text. May come again.",
    ),
]


def columns(given: list[str]) -> dict:
    """The columns of `--column name=value`."""
    return _named_values("--column", "answer=42", given)


def engine_options(engine: str, given: list[str]) -> dict:
    """The options of `--engine-option name=value`, which only vLLM has."""
    if given and engine != "vllm":
        raise MisvoError("--engine-option goes with --engine vllm.")
    return _named_values("--engine-option", "max_model_len=4096", given)


def _named_values(option: str, example: str, given: list[str]) -> dict:
    found = {}
    for entry in given:
        name, equals, text = entry.partition("=")
        if not equals or not name.isidentifier():
            raise MisvoError(f"{option} takes name=value, such as {option} {example}, not {entry!r}.")
        if name in found:
            raise MisvoError(f"{option} {name} was given twice: a list is written as {name}='[1, 2]'.")
        found[name] = _json_or_text(text)
    return found


def _json_or_text(text: str):
    def refuse(_):  # NaN and Infinity are words: JSON has no such numbers
        raise ValueError

    try:
        return json.loads(text, parse_constant=refuse)
    except ValueError:
        return text


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
