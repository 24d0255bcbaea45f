"""Settings by name, as `misvo.steer(..., rollouts=8)` takes them: typed for an IDE, and shown by `help()`.

An IDE and a type checker read names and types from `SettingsOptions`, so they have to stand here as text once more;
a test holds them equal to the fields of `misvo.settings.Settings`. What `help()` shows is made of those fields. Imports
no torch.
"""

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import Field
from typing import TypedDict


class SettingsOptions(TypedDict, total=False):
    """The fields of `misvo.settings.Settings`; what each is for stands there."""

    method: str
    cost: str
    rollouts: int
    steps: int
    max_new_tokens: int
    learning_rate: float
    penalty: float | None
    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    min_new_tokens: int | None
    stop: tuple[str, ...] | None
    seed: int
    raw: bool
    chat_template_kwargs: Mapping | None
    kl_ref: bool
    max_rows: int | None
    memory: str | None
    law_dtype: str
    explicit_fisher: bool
    tie: str
    step: str
    standardize: bool
    credit: str
    step_nats: float | None
    damping: float
    kl_budget: float | None
    kl_budget_per_token: float | None
    select: str
    on_reward_error: str
    reward_retries: int
    stop_reward: float | None
    patience: int | None
    token_budget: int | None
    seconds_budget: float | None
    sigma2: float
    alpha: float
    target_ess: float | None
    greedy: bool
    mask_after_eos: bool
    window: int | None
    block: int
    branches: int | None
    proposal: str
    potential: str
    value: str | None
    value_steps: int | None
    value_iterations: int
    value_step_size: float
    lora_rank: int
    lora_alpha: float
    lora_learning_rate: float
    lora_targets: tuple[str, ...] | None


class Options(SettingsOptions, total=False):
    """What `misvo.steer` and `misvo.steer_many` take by name: a preset, and settings that win over it."""

    preset: str


def named(function: Callable, parameters: Iterable[inspect.Parameter]) -> list[inspect.Parameter]:
    """The parameters of `f(..., **options)` with these in the place of `options`; those that it has already stay."""
    own = [p for p in inspect.signature(function).parameters.values() if p.kind is not p.VAR_KEYWORD]
    return [*own, *(parameter for parameter in parameters if parameter.name not in {p.name for p in own})]


def show(function: Callable, fields: Iterable[Field], preset: str, chosen: dict) -> None:
    """Let `help()` and `inspect` see every option of `f(..., **options)`: its type, default and purpose.

    `chosen` is what the preset that is used by default sets; a field's own default holds where it is silent.
    """
    shown = [_parameter("preset", preset, str)]
    lines = [f'Options; the defaults above are those of preset="{preset}":']
    for field in fields:
        shown.append(_parameter(field.name, chosen.get(field.name, field.default), field.type))
        methods = field.metadata["methods"]
        lines.append(f"    {field.name}: {about(field)}" + (f" ({' and '.join(methods)} only)" if methods else ""))
    signature = inspect.signature(function)
    vars(function)["__signature__"] = signature.replace(parameters=named(function, shown))
    function.__doc__ = "\n".join([inspect.cleandoc(function.__doc__ or ""), "", *lines])


def about(field: Field) -> str:
    """What a setting is for, and the names that it may have."""
    says, names = field.metadata["about"], field.metadata["names"]
    return says if names is None else f"{says.rstrip('.')}: {', '.join(names)}."


def _parameter(name, default, kind):
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)
