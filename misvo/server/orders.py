"""From what a body says to work for the engine: prompts, settings, weight. Cheap, and done before a place is taken."""

import secrets
from dataclasses import dataclass, field, replace

from misvo.errors import MisvoError
from misvo.prompts import Prompt
from misvo.server.bodies import Chat, Completion, Generate, Message, Response, Run, Steer, Stop
from misvo.server.config import Config
from misvo.server.errors import ApiError
from misvo.server.terms import RewardBody
from misvo.settings import Settings
from misvo.steering import Steering
from misvo.text_policy import sample_settings

CHARACTERS = 64  # of a prompt for each token that it may have: more is refused before it is read
BESIDE = {"reward", "held_out", "columns", "preset", "steering", "strength"}  # of Steer, no settings


@dataclass(frozen=True)
class Order:
    """What a client wants, in plain data."""

    prompts: list[Prompt]
    settings: dict  # options of misvo.Settings
    explicit: bool  # whether the client gave a length
    preset: str = "auto"
    reward: RewardBody | None = None
    columns: dict = field(default_factory=dict)
    steering: str | None = None  # the name of a saved one
    vectors: Steering | None = None  # or itself
    strengths: tuple[float, ...] = (1.0,)
    greedy: bool = False
    n: int = 1
    record: bool = False
    held_out: RewardBody | None = None  # scores the responses too, and is not optimised
    stream: bool = False

    @property
    def seed(self) -> int:
        return self.settings["seed"]

    @property
    def live(self) -> bool:
        """Whether text is told while it is being written: of samples, since a run chooses its answer at the end."""
        return self.stream and self.reward is None

    def resolve(self, steering: Steering | None) -> Settings:
        if self.reward is not None:
            return Settings.from_preset(self.preset, **self.settings)
        return sample_settings(steering, **self.settings)

    def tokens(self, settings: Settings) -> int:
        """K·N·T, of all prompts and strengths."""
        steps = settings.steps if self.reward is not None else 1
        each = settings.rollouts * steps * settings.max_new_tokens
        return each * len(self.prompts) * len(self.strengths)


def _sampler(temperature, top_p, stop: Stop | None) -> tuple[dict, bool]:
    """Options of settings, and whether every token is to be the most probable one."""
    greedy = temperature is not None and temperature < 1e-3
    options = {"temperature": None if greedy else temperature, "top_p": top_p}
    if stop is not None:
        options["stop"] = (stop,) if isinstance(stop, str) else tuple(stop)
    return {name: value for name, value in options.items() if value is not None}, greedy


def _order(
    prompts: list[Prompt], steer: Steer | None, config: Config, n: int, seed, length, sampler, raw: bool, record: bool
) -> Order:
    options, greedy = sampler
    steer = steer or Steer.model_validate({})
    given = {name: getattr(steer, name) for name in type(steer).model_fields if name in Steer.model_fields}
    given = {name: value for name, value in given.items() if value is not None and name not in BESIDE}
    if seed is not None and "seed" in given and given["seed"] != seed:
        raise ApiError(400, "there are two different seeds: give one.", param="seed")
    for prompt in prompts:
        _check_size(prompt, config.limits.prompt_tokens * CHARACTERS)
    settings = {
        **options,
        **given,
        "raw": raw,
        "seed": given.get("seed", secrets.randbelow(2**31) if seed is None else seed),
        "max_new_tokens": length or config.default_tokens,
    }
    if steer.reward is None:
        useless = [name for name in given if name not in ("seed", "top_k", "min_p", "min_new_tokens")]
        for name in (*useless, *(["columns"] if steer.columns is not None else [])):
            raise ApiError(400, f"{name} goes with a reward: give one.", param=f"misvo.{name}")
        if steer.strength is not None and steer.steering is None:
            raise ApiError(400, "strength goes with a steering: give one.", param="misvo.strength")
        settings["rollouts"] = n
    else:
        if steer.steering is not None:
            raise ApiError(400, "give a reward or a steering, not both.", param="misvo.steering")
        if steer.strength is not None:
            raise ApiError(400, "strength goes with a steering, not with a reward.", param="misvo.strength")
        if greedy:
            raise ApiError(
                400, "temperature 0 leaves nothing to choose from: with a reward, it is above 0.", param="temperature"
            )
    return Order(
        prompts,
        settings,
        length is not None,
        steer.preset,
        steer.reward,
        steer.columns or {},
        steer.steering,
        strengths=(1.0 if steer.strength is None else steer.strength,),
        greedy=greedy,
        n=n,
        record=record,
    )


def of_chat(body: Chat, config: Config) -> Order:
    if body.max_tokens is not None and body.max_completion_tokens not in (None, body.max_tokens):
        raise ApiError(400, "max_tokens and max_completion_tokens differ: give one.", param="max_tokens")
    sampler = _sampler(body.temperature, body.top_p, body.stop)
    length = body.max_completion_tokens or body.max_tokens
    prompt = messages(body.messages)
    order = _order([prompt], body.misvo, config, body.n, body.seed, length, sampler, False, body.logprobs)
    return replace(order, stream=body.stream)


def of_completion(body: Completion, config: Config) -> Order:
    """The prompt goes to the model as it is, without a chat template, as this route has always had it."""
    prompts: list = [body.prompt] if isinstance(body.prompt, str) else list(body.prompt)
    if prompts and isinstance(prompts[0], int):
        prompts = [prompts]
    if not 1 <= len(prompts) <= config.limits.prompts:
        raise ApiError(400, f"there may be 1 to {config.limits.prompts} prompts.", param="prompt")
    if any(prompt == [] for prompt in prompts):
        raise ApiError(400, "a prompt is empty.", param="prompt")
    sampler = _sampler(body.temperature, body.top_p, body.stop)
    record = body.logprobs is not None
    order = _order(prompts, body.misvo, config, body.n, body.seed, body.max_tokens, sampler, True, record)
    return replace(order, stream=body.stream)


def of_response(body: Response, config: Config) -> Order:
    said = messages(body.input)
    if body.instructions is not None:
        said = [{"role": "user", "content": said}] if isinstance(said, str) else said
        said = [{"role": "system", "content": body.instructions}, *said]
    elif isinstance(said, str):
        said = [{"role": "user", "content": said}]
    sampler = _sampler(body.temperature, body.top_p, None)
    order = _order([said], body.misvo, config, 1, body.seed, body.max_output_tokens, sampler, False, False)
    return replace(order, stream=body.stream or body.background)  # whoever comes later may want to follow it


def of_run(body: Run, config: Config) -> Order:
    if body.reward is None:
        raise ApiError(400, "a run needs a reward: /misvo/v1/generate samples without one.", param="reward")
    sampler = _sampler(body.temperature, body.top_p, body.stop)
    prompt = messages(body.prompt)
    order = _order([prompt], body, config, 1, None, body.max_new_tokens, sampler, body.raw, True)
    return replace(order, held_out=body.held_out)


def of_generate(body: Generate, config: Config, vectors: Steering | None) -> Order:
    strengths = body.strength if isinstance(body.strength, list) else [body.strength]
    if len(strengths) > config.limits.strengths:
        raise ApiError(400, f"there may be {config.limits.strengths} strengths at once.", param="strength")
    if body.reference and 0.0 not in strengths:
        strengths = [0.0, *strengths]
    if vectors is None and body.steering is None:
        strengths = [0.0]
    options, greedy = _sampler(body.temperature, body.top_p, body.stop)
    if body.top_k is not None:
        options["top_k"] = body.top_k
    prompt = messages(body.prompt)
    _check_size(prompt, config.limits.prompt_tokens * CHARACTERS)
    length = body.max_new_tokens or (len(vectors) if vectors is not None else config.default_tokens)
    settings = {"rollouts": body.samples, "max_new_tokens": length, "seed": body.seed, "raw": body.raw, **options}
    return Order(
        [prompt],
        settings,
        body.max_new_tokens is not None,
        steering=body.steering,
        vectors=vectors,
        strengths=tuple(strengths),
        greedy=greedy,
        columns=body.columns or {},
    )


def messages(said: str | list[Message]) -> Prompt:
    """As misvo has them: parts of text in a row, `developer` by its older name."""
    if isinstance(said, str):
        return said
    if not said:
        raise MisvoError("the prompt is empty.")
    return [
        {
            "role": "system" if message.role == "developer" else message.role,
            "content": message.content
            if isinstance(message.content, str)
            else "\n".join(part.text for part in message.content),
        }
        for message in said
    ]


def _check_size(prompt: Prompt, most: int) -> None:
    if isinstance(prompt, str):
        size = len(prompt)
    else:
        size = sum(len(one["content"]) if isinstance(one, dict) else 1 for one in prompt)
    if size > most:
        raise ApiError(400, "the prompt is too long for this server.", code="prompt_too_long")
