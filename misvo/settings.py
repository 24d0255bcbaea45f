"""The settings of a steering run: one frozen dataclass, validated once at the edge. Imports no torch.

Paper symbols: K is `rollouts`, N is `steps`, T is `max_new_tokens`, η is `learning_rate`, λ is `penalty`. Each field
says what it is for, which values it takes and which methods have it; the command line, its help and the documentation
are made of that.
"""

import dataclasses
import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar, Unpack

from misvo import options as by_name
from misvo.errors import MisvoError, cut
from misvo.fields import (
    ANY,
    COUNT,
    FROM_0_TO_1,
    HEAT,
    INDEX,
    NOT_NEGATIVE,
    POSITIVE,
    SHARE,
    check,
    one_of,
    option,
    parse_bytes,
    texts,
)
from misvo.names import (
    COSTS,
    CREDITS,
    LAW_DTYPES,
    METHODS,
    POTENTIALS,
    PROPOSALS,
    REWARD_ERRORS,
    SELECTIONS,
    STEPS,
    TIES,
)
from misvo.options import SettingsOptions
from misvo.own_sampler import NOT_TAKEN_OVER, OwnSampler
from misvo.prompts import check_template

DEFAULT_PENALTY = {"misvo": 1.0, "best-of-n": 0.0, "aisp": 0.1}  # of others: 0

# What `Policy.from_pretrained` takes beside a name, and so do `misvo steer` and the models of a sweep.
LOAD_OPTIONS = ("dtype", "device", "device_map", "revision", "trust_remote_code", "quantize", "compile", "engine")

# What decides how quickly a result comes about, and nothing of the result.
SPEED = ("max_rows", "memory")

# Rules that may end a run before its last step.
STOPS = ("stop_reward", "patience", "token_budget", "seconds_budget")

# How tokens are drawn. None means: as the model came (its generation_config, see misvo.own_sampler).
SAMPLER = ("temperature", "top_p", "top_k", "min_p", "min_new_tokens", "stop")

# What `preset` stands for. Anything given beside it wins over it.
PRESETS = {
    "auto": {
        **dict.fromkeys(SAMPLER),
        "tie": "shared",
        "step": "dual",
        "standardize": True,
        "credit": "cheap",
        "kl_budget_per_token": 0.1,
        "select": "ordinary",
    },
    "paper": {},  # Algorithm 1 as printed
}

MISVO, AISP, RE_CONTROL, LORA = ("misvo",), ("aisp",), ("re-control",), ("lora",)
GRADIENT = ("misvo", "lora")  # methods that climb the gradient of the reward
PAUSING = ("particles", "blockwise")


@dataclass(frozen=True)
class Settings:
    """Everything that decides a result, besides the model, the prompt and the reward."""

    method: str = option("misvo", "How to search.", names=METHODS)
    cost: str = option("frozen-fisher", "What misvo calls far.", names=COSTS, methods=MISVO)
    rollouts: int = option(16, "Responses sampled per step (K).", COUNT, short="-k")
    steps: int = option(16, "Steps (N); K·N responses in all.", COUNT, short="-n")
    max_new_tokens: int = option(512, "Tokens per response (T).", COUNT, short="-t")
    learning_rate: float = option(
        0.1, "η of euler and proximal steps, in units of reward times head geometry.", POSITIVE, methods=MISVO
    )
    penalty: float | None = option(
        None,
        "λ, instead of a budget. [misvo: 1; aisp: 0.1; particles: set by target_ess]",
        NOT_NEGATIVE,
        methods=("misvo", "aisp", "particles"),
    )
    temperature: float | None = option(1.0, "Sampling temperature.", HEAT)
    top_p: float | None = option(1.0, "Keep the most probable tokens of this mass.", SHARE)
    top_k: int | None = option(0, "Keep so many of the most probable tokens; 0 keeps all.", INDEX)
    min_p: float | None = option(0.0, "Keep tokens with this share of the largest probability.", FROM_0_TO_1)
    min_new_tokens: int | None = option(0, "No response ends before so many tokens.", INDEX)
    stop: tuple[str, ...] | None = option((), "A text that ends a response and is cut off it.")
    seed: int = option(0, "The result is a function of this, the prompt and the settings.", INDEX)
    raw: bool = option(False, "No chat template: the prompt goes to the model as it is.")
    chat_template_kwargs: Mapping | None = option(
        None, 'What the chat template is told, such as {"enable_thinking": false}.', hash=False
    )
    kl_ref: bool = option(False, "Measure KL_ref (eq:kl-estimator) on reference rollouts at the end.")
    max_rows: int | None = option(None, "Rows decoded at once. None: what fits memory.", COUNT)
    memory: str | None = option(None, "What decoding may take, such as 8GB. None: half of what is free.")
    law_dtype: str = option("float32", "Mean laws of tie=position.", names=LAW_DTYPES, methods=MISVO)
    explicit_fisher: bool = option(False, "Form the frozen Fisher matrices (T·d² numbers).", methods=MISVO)
    # what a user without patience for sweeps wants: see PRESETS
    tie: str = option("position", "How vectors depend on the position.", names=TIES, methods=("misvo", "aisp"))
    step: str = option("euler", "How a gradient becomes a step.", names=STEPS, methods=MISVO)
    standardize: bool = option(False, "Advantages in standard deviations of the rewards so far.", methods=MISVO)
    credit: str = option("response", "What a token earns.", names=CREDITS, methods=GRADIENT)
    step_nats: float | None = option(
        None,
        "Size of a natural or dual step, ½ sᵀFs. None: a third of the budget, or 0.5.",
        POSITIVE,
        methods=(*MISVO, *PAUSING),
    )
    damping: float = option(
        0.1,
        "Of those steps: share of the direction's curvature that is added to F.",
        NOT_NEGATIVE,
        methods=(*MISVO, *PAUSING),
    )
    kl_budget: float | None = option(
        None,
        "Nats per response that the model may move, in place of a penalty.",
        POSITIVE,
        methods=(*GRADIENT, *PAUSING),
    )
    kl_budget_per_token: float | None = option(
        None, "The same in nats per token of the mean response.", POSITIVE, methods=(*GRADIENT, *PAUSING)
    )
    select: str = option("best", "Which response is returned.", names=SELECTIONS)
    on_reward_error: str = option("raise", "What a failing reward leads to.", names=REWARD_ERRORS)
    reward_retries: int = option(0, "How often a failing reward is called again first.", INDEX)
    # when to stop before the last step: best-of-n, too, then takes one step after the other
    stop_reward: float | None = option(None, "Stop when a response earns this.", ANY)
    patience: int | None = option(None, "Stop after so many steps without a better one.", COUNT)
    token_budget: int | None = option(None, "Stop when so many tokens were sampled.", COUNT)
    seconds_budget: float | None = option(None, "Stop after so many seconds.", ANY)
    # aisp, where `penalty` is its λ
    sigma2: float = option(0.5, "Variance of the noise.", POSITIVE, methods=AISP)
    alpha: float = option(0.999, "1 pulls nothing back.", FROM_0_TO_1, methods=AISP)
    target_ess: float | None = option(
        None,
        "Set λ so that this many responses count. [particles: a quarter of them]",
        COUNT,
        methods=("aisp", "particles"),
    )
    greedy: bool = option(False, "Take the most probable token.", methods=("aisp", "re-control"))
    mask_after_eos: bool = option(False, "Ignore noise behind the end.", methods=AISP)
    window: int | None = option(None, "Steer the first so many positions.", COUNT, methods=AISP)
    # particles and blockwise
    block: int = option(8, "Tokens between two looks at the rows.", COUNT, methods=PAUSING)
    branches: int | None = option(
        None,
        "Continuations of a block, of which the best goes on. None: 4 or the next that divides rollouts.",
        COUNT,
        methods=("blockwise",),
    )
    proposal: str = option("reference", "Which policy writes the rows.", names=PROPOSALS, methods=PAUSING)
    potential: str = option("auto", "What a beginning is worth.", names=POTENTIALS, methods=PAUSING)
    # re-control
    value: str | None = option(None, "Folder of a fitted value network; else one is fitted.", methods=RE_CONTROL)
    value_steps: int | None = option(
        None, "Steps that collect for the network. None: half of them.", COUNT, methods=RE_CONTROL
    )
    value_iterations: int = option(10, "Gradient steps per token.", INDEX, methods=RE_CONTROL)
    value_step_size: float = option(
        1.0, "Size of each, in units of reward per squared length of a state.", POSITIVE, methods=RE_CONTROL
    )
    # lora
    lora_rank: int = option(8, "Rank of the weights beside each layer.", COUNT, methods=LORA)
    lora_alpha: float = option(16.0, "They count by this over their rank.", POSITIVE, methods=LORA)
    lora_learning_rate: float = option(1e-3, "Of Adam, whatever the unit of the reward.", POSITIVE, methods=LORA)
    lora_targets: tuple[str, ...] | None = option(
        None, "Ends of layers' names, such as q_proj. None: all linear layers of the body.", methods=LORA
    )

    def __post_init__(self):
        for field in dataclasses.fields(self):
            check(field, getattr(self, field.name))
        if self.memory is not None:
            parse_bytes(self.memory)
        check_template(self.raw, self.chat_template_kwargs)
        object.__setattr__(self, "chat_template_kwargs", self.chat_template_kwargs or None)
        if self.stop is not None:
            object.__setattr__(self, "stop", texts("stop", self.stop))
        if self.lora_targets is not None:
            object.__setattr__(self, "lora_targets", texts("lora_targets", self.lora_targets))
        if self.min_new_tokens is not None and self.min_new_tokens > self.max_new_tokens:
            raise MisvoError(
                f"min_new_tokens is {self.min_new_tokens}, above max_new_tokens, which is {self.max_new_tokens}."
            )
        if self.select == "ordinary" and not self.starts_at_reference:
            what = "aisp" if self.method == "aisp" else "re-control with a fitted network"
            raise MisvoError(
                f"select='ordinary' compares with the first step, which {what} does not take at the reference."
            )
        budgets = [name for name in ("kl_budget", "kl_budget_per_token") if getattr(self, name) is not None]
        if budgets and self.penalty and self.method == "misvo":
            raise MisvoError(f"penalty and {budgets[0]} exclude each other: both hold the model back, so choose one.")
        if len(budgets) > 1:
            raise MisvoError("kl_budget and kl_budget_per_token exclude each other: choose one.")
        if self.penalty is None:
            object.__setattr__(
                self, "penalty", 0.0 if budgets and self.method == "misvo" else DEFAULT_PENALTY.get(self.method, 0.0)
            )
        if self.rollouts < 2 and self.method != "best-of-n":  # a baseline needs another rollout to compare with
            raise MisvoError(f"rollouts must be a whole number of at least 2, not {self.rollouts!r}.")
        if self.step in ("natural", "dual") and self.cost == "none":
            raise MisvoError(f"a {self.step} step needs a metric: choose a Fisher cost, not 'none'.")
        if self.explicit_fisher and self.tie != "position":
            raise MisvoError("explicit_fisher forms a matrix for each position, so it goes with tie='position' only.")
        if self.target_ess is not None and self.target_ess > self.rollouts:
            raise MisvoError(f"target_ess must be a number from 1 to the number of rollouts, not {self.target_ess!r}.")
        if self.method == "re-control" and self.value is None and self.steps < 2:
            raise MisvoError("re-control needs at least 2 steps: one to fit its value network, one to use it.")
        if self.method == "re-control" and self.value is None and (self.value_steps or 1) >= self.steps:
            raise MisvoError(
                f"value_steps must leave a step to steer: at most {self.steps - 1}, not {self.value_steps}."
            )
        if self.method == "blockwise":
            branches = self.branches or next(
                (n for n in range(4, self.rollouts) if self.rollouts % n == 0), self.rollouts
            )
            if branches < 2 or self.rollouts % branches:
                raise MisvoError(
                    f"rollouts must be a multiple of branches, which are 2 or more, not {self.rollouts} of {branches}."
                )
            object.__setattr__(self, "branches", branches)
        if self.greedy and self.method not in ("aisp", "re-control"):
            raise MisvoError(f"greedy tokens have no score to learn from: {self.method} samples.")

    @classmethod
    def from_preset(cls, preset: str = "auto", **options: Unpack[SettingsOptions]) -> "Settings":
        """The settings of a preset, changed by `options`.

        For lora a preset is what that method has of it, for other methods than misvo its sampler. Options of other
        methods are refused here, where somebody gives them; the dataclass itself has them all.
        """
        known = [field.name for field in dataclasses.fields(cls)]
        for name in options:
            if name in NOT_TAKEN_OVER:
                raise MisvoError(f"{name} is not a function of the next token's distribution alone: it cannot be had.")
            if name not in known:
                close = difflib.get_close_matches(name, known, n=1)
                hint = f"did you mean {close[0]!r}?" if close else f"the settings are {', '.join(known)}."
                raise MisvoError(f"unknown setting {name!r}: {hint}")
        one_of("preset", preset, PRESETS)
        method = options.get("method", "misvo")
        own, usual = options_of(method), cls(method)
        for name, value in options.items():  # what has its usual value was resolved, not wished for
            if name not in own and value not in (getattr(cls, name), getattr(usual, name)):
                has = ", ".join(option for option in own if option != "method")
                raise MisvoError(f"{name} is no option of {method}, which has {has}.")
        chosen = dict(PRESETS[preset])
        if method != "misvo":
            chosen = {name: value for name, value in chosen.items() if name in (own if method == "lora" else SAMPLER)}
        if options.get("penalty") is not None or options.get("kl_budget") is not None:
            chosen.pop("kl_budget_per_token", None)  # they take the budget's place
        if options.get("cost") == "none":
            chosen.pop("step", None)  # without a metric there is no natural step
        given: dict[str, Any] = {**options}
        return cls(**{**chosen, **given})

    def __repr__(self) -> str:
        """What is other than the defaults of the fields, cut where it is long."""
        usual = vars(type(self)(self.method))
        said = [f"{name}={cut(repr(value), 60)}" for name, value in vars(self).items() if value != usual[name]]
        return cut(f"Settings({', '.join([f'method={self.method!r}', *said])}", 290) + ")"

    def for_model(self, own: OwnSampler) -> "Settings":
        """These settings with the model's own sampler in the place of every None."""
        return dataclasses.replace(self, **own.resolve({name: getattr(self, name) for name in SAMPLER}))

    @property
    def may_stop(self) -> bool:
        """Whether some rule may end the run before its last step."""
        return any(getattr(self, name) is not None for name in STOPS)

    @property
    def starts_at_reference(self) -> bool:
        """Whether the first step samples from the model as it is."""
        learns = self.method in PAUSING and (self.proposal == "steered" or self.potential == "value")
        return self.method in ("misvo", "best-of-n", "lora") or learns or self.collecting_steps > 0

    @property
    def collecting_steps(self) -> int:
        """How many steps sample from the reference policy to fit re-control's value network."""
        if self.method != "re-control" or self.value is not None:
            return 0
        return self.value_steps or max(1, self.steps // 2)

    def to_dict(self) -> dict:
        """Plain data, as JSON has it."""
        plain = dataclasses.asdict(self)
        return {name: list(value) if isinstance(value, tuple) else value for name, value in plain.items()}


Function = TypeVar("Function", bound=Callable)


def shows_settings(function: Function) -> Function:
    """A function `f(..., **options)` whose signature and docstring name every setting, with its default."""
    by_name.show(function, dataclasses.fields(Settings), "auto", PRESETS["auto"])
    return function


shows_settings(Settings.from_preset.__func__)  # type: ignore[attr-defined]


def options_of(method: str) -> list[str]:
    """The settings that a method has."""
    one_of("method", method, METHODS)
    fields = dataclasses.fields(Settings)
    return [field.name for field in fields if method in (field.metadata["methods"] or METHODS)]


def deciding(settings: dict) -> dict:
    """What of a run's settings decides its rows: all but options of other methods and what only decides speed."""
    idle = {field.name for field in dataclasses.fields(Settings)} - set(options_of(settings["method"])) | set(SPEED)
    return {name: value for name, value in settings.items() if name not in idle}
