"""The settings of a steering run: one frozen dataclass, validated once at the edge. Imports no torch.

Paper symbols: K is `rollouts`, N is `steps`, T is `max_new_tokens`, η is `learning_rate`, λ is `penalty`.
"""

import dataclasses
import difflib
import math
import re
from dataclasses import dataclass

from misvo.errors import MisvoError

# What each name stands for, in the words of `misvo list`. The classes live in misvo.methods and misvo.cost.
METHODS = {
    "misvo": "Algorithm 1: reward gradient minus a KL-shaped penalty, one vector per position",
    "best-of-n": "K·N samples of the reference policy, the best one returned",
    "aisp": "sampling-based control: Gaussian vectors for each response, averaged by exponentiated reward",
    "re-control": "a value network on hidden states, climbed by gradient steps at every token",
}
COSTS = {
    "frozen-fisher": "Fisher at zero on reference prefixes (eq:surr-offoff), the paper's choice",
    "prefix-fisher": "Fisher at zero on steered prefixes (eq:surr-onoff)",
    "iterate-fisher": "Fisher at u on steered prefixes (eq:surr-onon)",
    "euclidean": "the identity: squared length of the hidden-space shift",
    "sequence-kl": "the direct gradient of the sequence KL, suffix term included (eq:seqkl-grad)",
    "none": "no penalty at all",
}
TIES = {
    "position": "one vector for each position, as in the paper",
    "shared": "one vector for all positions",
    "smooth": "vectors at positions 0, 1, 2, 4, 8, … and straight lines between them",
}
STEPS = {
    "euler": "the paper's explicit step",
    "proximal": "implicit in the penalty, stable for every learning rate",
    "natural": "a fixed number of nats in the Fisher metric",
    "dual": "the natural direction of all gradients so far, further with every step",
}
DEFAULT_PENALTY = {"misvo": 1.0, "best-of-n": 0.0, "aisp": 0.1, "re-control": 0.0}

CREDITS = {
    "response": "every token of a response earns its whole reward: the paper",
    "prefix": "tokens earn what they add to the score of a prefix: some 16 scores a response instead of one",
    "cheap": "prefix where the reward declares `scores_prefixes`, response elsewhere",
}

# What `Policy.from_pretrained` takes beside a name, and so do `misvo steer` and the models of a sweep.
LOAD_OPTIONS = ("dtype", "device", "device_map", "revision", "trust_remote_code", "quantize", "compile")

# The options that not all methods have, by method. All of them have those that are not here.
OPTIONS = {
    "misvo": (
        *("cost", "learning_rate", "penalty", "law_dtype", "explicit_fisher", "tie", "step", "standardize", "credit"),
        *("step_nats", "damping", "kl_budget", "kl_budget_per_token"),
    ),
    "best-of-n": (),
    "aisp": ("penalty", "tie", "sigma2", "alpha", "target_ess", "greedy", "mask_after_eos", "window"),
    "re-control": ("greedy", "value", "value_steps", "value_target", "value_iterations", "value_step_size"),
}

# What decides how quickly a result comes about, and nothing of the result.
SPEED = ("max_rows", "memory")

# Rules that may end a run before its last step.
STOPS = ("stop_reward", "patience", "token_budget", "seconds_budget")

# What `preset` stands for. Anything given beside it wins over it.
PRESETS = {
    "paper": {},  # Algorithm 1 as printed
    "auto": {
        "tie": "shared",
        "step": "dual",
        "standardize": True,
        "credit": "cheap",
        "step_nats": 3.0,
        "kl_budget": 10.0,
        "top_p": 0.95,
        "select": "ordinary",
    },
}


@dataclass(frozen=True)
class Settings:
    """Everything that decides a result, besides the model, the prompt and the reward."""

    method: str = "misvo"
    cost: str = "frozen-fisher"
    rollouts: int = 16
    steps: int = 16
    max_new_tokens: int = 512
    learning_rate: float = 0.1
    penalty: float | None = None  # None: the method's own default, see DEFAULT_PENALTY
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int = 0
    kl_ref: bool = False  # measure eq:kl-estimator on the first step's rollouts at the end
    max_rows: int | None = None  # rows decoded at once; None: as many as memory allows
    memory: str | None = None  # what decoding may take, such as "8GB"; None: half of what is free
    law_dtype: str = "float32"  # or "bfloat16": mean laws at half the memory, see misvo.head.Fisher for the error
    explicit_fisher: bool = False  # frozen-fisher: form the T matrices of d×d instead of multiplying without them
    # what a user without patience for sweeps wants: see PRESETS
    tie: str = "position"  # how vectors depend on the position
    step: str = "euler"  # how a gradient becomes a step
    standardize: bool = False  # advantages in standard deviations of rewards within the steps so far
    credit: str = "response"  # what a token earns: its response's reward, or a share of it; see CREDITS
    step_nats: float = 0.5  # natural, dual: size of a step, ½ sᵀFs
    damping: float = 0.1  # natural, dual: share of the direction's curvature that is added to F
    kl_budget: float | None = None  # nats per response that the sequence KL may reach; excludes `penalty`
    kl_budget_per_token: float | None = None  # the same per token, times the mean length of a step's responses
    select: str = "best"  # which response is returned: the best, or the best of those that are ordinary
    # when to stop before the last step: best-of-n, too, then takes one step after the other
    stop_reward: float | None = None
    patience: int | None = None  # steps without a better response
    token_budget: int | None = None
    seconds_budget: float | None = None
    # aisp, where `penalty` is its λ
    sigma2: float = 0.5  # variance of the noise
    alpha: float = 0.999
    target_ess: float | None = None  # set λ each step so that this many responses count, instead of `penalty`
    greedy: bool = False  # take the most probable token, so that all randomness is the noise
    mask_after_eos: bool = False  # noise behind the end of a response counts for nothing
    window: int | None = None  # steer only the first so many positions
    # re-control
    value: str | None = None  # folder of a fitted value network; None: fit one on the first steps
    value_steps: int | None = None  # how many steps collect for it; None: half of them
    value_target: str = "last"  # the state that carries the reward; "first" repeats a slip of the public code
    value_iterations: int = 10  # gradient steps per token
    value_step_size: float = 1.0  # size of each, in units of reward per squared length of a state

    def __post_init__(self):
        _one_of("method", self.method, METHODS)
        _one_of("cost", self.cost, COSTS)
        _one_of("tie", self.tie, TIES)
        _one_of("step", self.step, STEPS)
        _one_of("credit", self.credit, CREDITS)
        _one_of("law_dtype", self.law_dtype, ("float32", "bfloat16"))
        _one_of("select", self.select, ("best", "ordinary"))
        if self.select == "ordinary" and self.method in ("aisp", "re-control") and not self.collecting_steps:
            who = "re-control with a given value network" if self.method == "re-control" else self.method
            raise MisvoError(
                f"select='ordinary' compares with the first step, which {who} does not take at the reference."
            )
        budgets = [name for name in ("kl_budget", "kl_budget_per_token") if getattr(self, name) is not None]
        for name in budgets:
            _real(name, getattr(self, name), lambda x: x > 0, "above 0")
            if self.penalty:
                raise MisvoError(f"penalty and {name} exclude each other: both hold the model back, so choose one.")
        if len(budgets) > 1:
            raise MisvoError("kl_budget and kl_budget_per_token exclude each other: choose one.")
        if self.penalty is None:
            object.__setattr__(self, "penalty", 0.0 if budgets else DEFAULT_PENALTY[self.method])
        # A leave-one-out baseline needs another rollout to compare with.
        _whole("rollouts", self.rollouts, 1 if self.method == "best-of-n" else 2)
        _one_of("value_target", self.value_target, ("last", "first"))
        _whole("steps", self.steps, 1)
        _whole("max_new_tokens", self.max_new_tokens, 1)
        _whole("seed", self.seed, 0)
        for name in ("max_rows", "window", "value_steps", "patience", "token_budget"):
            if getattr(self, name) is not None:
                _whole(name, getattr(self, name), 1)
        _whole("value_iterations", self.value_iterations, 0)
        _real("learning_rate", self.learning_rate, lambda x: x > 0, "above 0")
        _real("penalty", self.penalty, lambda x: x >= 0, "0 or above")
        _real("sigma2", self.sigma2, lambda x: x > 0, "above 0")
        _real("alpha", self.alpha, lambda x: 0 <= x <= 1, "from 0 to 1")
        _real("value_step_size", self.value_step_size, lambda x: x > 0, "above 0")
        _real("step_nats", self.step_nats, lambda x: x > 0, "above 0")
        _real("damping", self.damping, lambda x: x >= 0, "0 or above")
        if self.memory is not None:
            parse_bytes(self.memory)
        for name in ("stop_reward", "seconds_budget"):
            if getattr(self, name) is not None:
                _real(name, getattr(self, name), lambda x: True, "that is finite")
        if self.step in ("natural", "dual") and self.cost == "none":
            raise MisvoError(f"a {self.step} step needs a metric: choose a Fisher cost, not 'none'.")
        if self.explicit_fisher and self.tie != "position":
            raise MisvoError("explicit_fisher forms a matrix for each position, so it goes with tie='position' only.")
        if self.target_ess is not None:
            _real("target_ess", self.target_ess, lambda x: 1 <= x <= self.rollouts, "from 1 to the number of rollouts")
        if self.method == "re-control" and self.value is None and self.steps < 2:
            raise MisvoError("re-control needs at least 2 steps: one to fit its value network, one to use it.")
        if self.method == "re-control" and self.value is None and (self.value_steps or 1) >= self.steps:
            raise MisvoError(
                f"value_steps must leave a step to steer: at most {self.steps - 1}, not {self.value_steps}."
            )
        if self.greedy and self.method not in ("aisp", "re-control"):
            raise MisvoError(f"greedy tokens have no score to learn from: {self.method} samples.")
        _real("temperature", self.temperature, lambda x: x > 0, "above 0")
        _real("top_p", self.top_p, lambda x: 0 < x <= 1, "above 0 and at most 1")

    @classmethod
    def from_preset(cls, preset: str = "paper", **options) -> "Settings":
        """The settings of a preset, changed by `options`. For methods other than misvo a preset is its sampler.

        Options of other methods are refused here, where somebody gives them; the dataclass itself has them all.
        """
        known = [field.name for field in dataclasses.fields(cls)]
        for name in options:
            if name not in known:
                close = difflib.get_close_matches(name, known, n=1)
                hint = f"did you mean {close[0]!r}?" if close else f"the settings are {', '.join(known)}."
                raise MisvoError(f"unknown setting {name!r}: {hint}")
        _one_of("preset", preset, PRESETS)
        method = options.get("method", cls.method)
        own, usual = options_of(method), cls(method)
        for name, value in options.items():  # what has its usual value was resolved, not wished for
            if name not in own and value not in (getattr(cls, name), getattr(usual, name)):
                has = ", ".join(option for option in own if option != "method")
                raise MisvoError(f"{name} is no option of {method}, which has {has}.")
        chosen = dict(PRESETS[preset])
        if method != "misvo":
            chosen = {name: value for name, value in chosen.items() if name == "top_p"}
        if options.get("penalty") is not None or options.get("kl_budget_per_token") is not None:
            chosen.pop("kl_budget", None)  # they take the budget's place
        if options.get("cost") == "none":
            chosen.pop("step", None)  # without a metric there is no natural step
        return cls(**{**chosen, **options})

    @property
    def may_stop(self) -> bool:
        """Whether some rule may end the run before its last step."""
        return any(getattr(self, name) is not None for name in STOPS)

    @property
    def collecting_steps(self) -> int:
        """How many steps sample from the reference policy to fit re-control's value network."""
        if self.method != "re-control" or self.value is not None:
            return 0
        return self.value_steps or max(1, self.steps // 2)

    def to_dict(self) -> dict:
        return dataclasses.asdict(self)


def options_of(method: str) -> list[str]:
    """The settings that a method has."""
    of_others = _options_of_others(method)
    return [field.name for field in dataclasses.fields(Settings) if field.name not in of_others]


def deciding(settings: dict) -> dict:
    """What of a run's settings decides its rows: all but options of other methods and what only decides speed."""
    idle = {*_options_of_others(settings["method"]), *SPEED}
    return {name: value for name, value in settings.items() if name not in idle}


def _options_of_others(method):
    _one_of("method", method, METHODS)
    return {name for names in OPTIONS.values() for name in names if name not in OPTIONS[method]}


def parse_bytes(text: str) -> int:
    """A size such as "8GB", "512 MiB" or "1e9", in bytes."""
    match = re.fullmatch(r"\s*([0-9.]+(?:e[0-9]+)?)\s*([kmgt]?)(i?)b?\s*", str(text).lower())
    try:
        number = float(match[1]) * (1024 if match[3] else 1000) ** " kmgt".index(match[2] or " ")
    except (TypeError, ValueError):
        number = 0
    if number < 1:
        raise MisvoError(f"memory must be a size such as '8GB' or '512MiB', not {text!r}.")
    return int(number)


def _one_of(name, value, known):
    if value not in known:
        raise MisvoError(f"unknown {name} {value!r}: choose one of {', '.join(known)}.")


def _whole(name, value, least):
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise MisvoError(f"{name} must be a whole number of at least {least}, not {value!r}.")


def _real(name, value, holds, wish):
    number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not number or not holds(value):
        raise MisvoError(f"{name} must be a number {wish}, not {value!r}.")
