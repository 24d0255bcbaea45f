"""What requests may say, as types: these are the OpenAPI description, and what is not in them is refused by name."""

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from misvo.server.strict import Body, Strict
from misvo.server.terms import RewardBody

# Without lora, which trains weights, and without networks from folders: these are for the command line.
Method = Literal["misvo", "best-of-n", "aisp", "re-control", "particles", "blockwise"]
Count = Annotated[int, Field(ge=1, le=2**31)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]
Text = Annotated[str, Field(min_length=1, max_length=200)]
StopText = Annotated[str, Field(min_length=1, max_length=200)]
Stop = StopText | Annotated[list[StopText], Field(max_length=16)]
Positive = Annotated[float, Field(gt=0, le=1e9)]
Heat = Annotated[float, Field(ge=0, le=100)]
Share = Annotated[float, Field(gt=0, le=1)]
Strength = Annotated[float, Field(ge=-100, le=100)]

# Fields of OpenAI's API that are not supported, and the values that ask for nothing: these pass, others are refused.
IDLE: dict[str, tuple] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logit_bias": ({},),
    "top_logprobs": (0,),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "text": ({"format": {"type": "text"}},),
    "modalities": (["text"],),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "service_tier": ("auto", "default"),
    "truncation": ("disabled",),
    "include": ([],),
}


class Idle(Body):
    """A body of OpenAI's: fields that ask for nothing are passed over."""

    @model_validator(mode="before")
    @classmethod
    def _without_idle(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        return {
            name: value
            for name, value in given.items()
            if name in cls.model_fields or name not in IDLE or not (value is None or value in IDLE[name])
        }


class Steer(Strict):
    """How to steer: a reward and settings, or a saved steering. Without it, an answer is a plain sample."""

    reward: RewardBody | None = Field(None, description="A name, a declared reward, or a list of them: their sum.")
    columns: dict[str, Any] | None = Field(None, description="What the reward is told beside the responses.")
    preset: Literal["auto", "paper"] = "auto"
    method: Method | None = None
    rollouts: Count | None = Field(None, description="Responses per step (K).")
    steps: Count | None = Field(None, description="Steps (N).")
    kl_budget_per_token: Positive | None = Field(None, description="Nats per token that the model may move.")
    kl_budget: Positive | None = Field(None, description="The same per response.")
    penalty: Annotated[float, Field(ge=0, le=1e9)] | None = None
    learning_rate: Positive | None = None
    cost: str | None = Field(None, max_length=32)
    tie: str | None = Field(None, max_length=32)
    step: str | None = Field(None, max_length=32)
    step_nats: Positive | None = None
    credit: str | None = Field(None, max_length=32)
    select: str | None = Field(None, max_length=32)
    standardize: bool | None = None
    on_reward_error: str | None = Field(None, max_length=32)
    stop_reward: float | None = None
    patience: Count | None = None
    token_budget: Count | None = None
    seconds_budget: Positive | None = None
    top_k: Annotated[int, Field(ge=0, le=10**6)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    min_new_tokens: Annotated[int, Field(ge=0, le=10**6)] | None = None
    kl_ref: bool | None = None
    damping: Annotated[float, Field(ge=0, le=1e9)] | None = None
    sigma2: Positive | None = Field(None, description="aisp: variance of the noise.")
    alpha: Annotated[float, Field(ge=0, le=1)] | None = Field(None, description="aisp: 1 pulls nothing back.")
    window: Count | None = Field(None, description="aisp: steer the first so many positions.")
    mask_after_eos: bool | None = None
    target_ess: Annotated[float, Field(ge=1, le=1e6)] | None = Field(None, description="Responses that count.")
    greedy: bool | None = Field(None, description="aisp and re-control: take the most probable token.")
    block: Count | None = Field(None, description="particles and blockwise: tokens between two looks at the rows.")
    branches: Count | None = Field(None, description="blockwise: continuations of a block.")
    proposal: str | None = Field(None, max_length=32)
    potential: str | None = Field(None, max_length=32)
    value_steps: Count | None = Field(None, description="re-control: steps that collect for its network.")
    value_iterations: Annotated[int, Field(ge=0, le=100)] | None = None
    value_step_size: Positive | None = None
    seed: Seed | None = None
    steering: Text | None = Field(None, description="The name of a saved steering.")
    strength: Strength | None = Field(None, description="What multiplies its vectors; 1 where it is left out.")


class Part(Strict):
    type: Literal["text", "input_text", "output_text"]
    text: str
    annotations: list | None = None


class Message(Strict):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[Part]
    type: Literal["message"] | None = None


class StreamOptions(Strict):
    include_usage: bool = False
    include_obfuscation: bool = False


class Chat(Idle):
    model: Text
    messages: list[Message] = Field(min_length=1, max_length=1000)
    misvo: Steer | None = None
    n: Count = 1
    seed: Seed | None = None
    stop: Stop | None = None
    temperature: Heat | None = None
    top_p: Share | None = None
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    logprobs: bool = False
    stream: bool = False
    stream_options: StreamOptions | None = None
    user: str | None = None
    metadata: dict[str, str] | None = None
    store: Literal[False] = False


class Completion(Idle):
    model: Text
    prompt: str | list[str] | list[int] | list[list[int]]
    misvo: Steer | None = None
    n: Count = 1
    seed: Seed | None = None
    stop: Stop | None = None
    temperature: Heat | None = None
    top_p: Share | None = None
    max_tokens: Count | None = None
    logprobs: Literal[0] | None = Field(None, description="0: of the chosen tokens. Others cannot be had.")
    stream: bool = False
    stream_options: StreamOptions | None = None
    user: str | None = None


class Response(Idle):
    model: Text
    input: str | list[Message]
    instructions: str | None = None
    misvo: Steer | None = None
    seed: Seed | None = None
    temperature: Heat | None = None
    top_p: Share | None = None
    max_output_tokens: Count | None = None
    background: bool = False
    stream: bool = False
    stream_options: StreamOptions | None = None
    store: bool = True
    metadata: dict[str, str] | None = None
    user: str | None = None


class Run(Steer, Body):
    """A run: what `Steer` says, with a prompt; `reward` is needed."""

    prompt: str | list[Message]
    held_out: RewardBody | None = Field(None, description="A reward that is measured and not steered toward.")
    model: Text | None = None
    raw: bool = False
    temperature: Annotated[float, Field(gt=0, le=100)] | None = None
    top_p: Share | None = None
    stop: Stop | None = None
    max_new_tokens: Count | None = None


class Generate(Body):
    prompt: str | list[Message]
    model: Text | None = None
    raw: bool = False
    steering: Text | None = None
    run: Text | None = Field(None, description="A finished run whose steering is used, in the place of a saved one.")
    strength: Strength | Annotated[list[Strength], Field(min_length=1, max_length=64)] = 1.0
    reference: bool = Field(False, description="Also the model as it is, with the same noise.")
    samples: Count = 1
    seed: Seed = 0
    temperature: Heat | None = None
    top_p: Share | None = None
    top_k: Annotated[int, Field(ge=0, le=10**6)] | None = None
    stop: Stop | None = None
    max_new_tokens: Count | None = None
    reward: RewardBody | None = Field(None, description="What scores the samples.")
    columns: dict[str, Any] | None = None


class SaveSteering(Body):
    run: Text = Field(description="The id of a run that has a steering.")
    name: str = Field(max_length=64, description="Letters, digits and . _ -")


class Panel(Body):
    held_out: RewardBody | None = None
