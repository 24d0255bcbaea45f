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
from misvo.settings import LOAD_OPTIONS, PRESETS, SAMPLER, SPEED, STOPS, Settings

# What everybody needs comes first; these have panels of their own in `misvo steer --help`.
PANELS = {
    **dict.fromkeys(STOPS, "When to stop early"),
    **dict.fromkeys((*SPEED, "law_dtype", "on_reward_error", "reward_retries"), "More options"),
    "kl_budget": None,
}
LEFT_OUT = ("kl_ref", "explicit_fisher")  # always measured; of use to a benchmark alone
SHORTER = {"max_new_tokens": 64}  # somebody at a terminal waits for the answer

# Of `Policy.from_pretrained`, in a panel of its own, too: name -> kind, default, flag where it has no opposite, help
LOAD = {
    "dtype": (str, "auto", (), "Precision of the weights: auto, float32, bfloat16, float16."),
    "device": (str | None, None, (), "Where the model runs, such as `cpu` or `cuda:0`."),
    "device_map": (str | None, None, (), "Spread a large model, such as `auto`."),
    "revision": (str | None, None, (), "Branch, tag or commit on the hub."),
    "trust_remote_code": (bool, False, (), "Run code that comes with the checkpoint."),
    "quantize": (str | None, None, (), "`int8`: quicker on a CPU, and another model."),
    "compile": (bool, False, ("--compile",), "Compile the body, for GPUs; minutes, once."),
    "engine": (str, "torch", (), "What decodes: `torch`, or `vllm` for GPUs (docs/vllm.md)."),
    "engine_option": (list[str], [], (), "`name=value` for vLLM, such as `max_model_len=4096`. May come again."),
}
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


def _engine_options(engine: str, given: list[str]) -> dict:
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


def load_parameters() -> list[inspect.Parameter]:
    """One keyword parameter for each option of loading a model, as typer reads them."""
    made = []
    for name, (kind, default, flags, says) in LOAD.items():
        option = typer.Option(*flags, help=says, rich_help_panel="The model")
        keyword = inspect.Parameter.KEYWORD_ONLY
        made.append(inspect.Parameter(name, keyword, default=default, annotation=Annotated[kind, option]))
    return made


def to_load(values: dict) -> dict:
    """What `Policy.from_pretrained` is given of these options."""
    load = {name: values[name] for name in LOAD_OPTIONS}
    return load | _engine_options(load["engine"], values["engine_option"])


def accepts_load_options(command):
    """A command `f(..., **options)` whose signature names every option of loading a model."""
    return accepts(command, load_parameters())


def accepts_settings(command):
    """A command `f(..., **options)` whose signature names those of loading a model and every setting."""
    return accepts(command, [*load_parameters(), *parameters()])


def accepts(command, more):
    """A command `f(..., **options)` whose signature names these parameters in the place of `options`."""
    everything = named(command, more)
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
