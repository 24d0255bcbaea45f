"""/v1/models, /v1/chat/completions and /v1/completions, as the stock `openai` client speaks them."""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

from fastapi import APIRouter, Request
from starlette.responses import Response

from misvo.server import answers as made
from misvo.server import orders, sse
from misvo.server.answers import Answer
from misvo.server.bodies import Chat, Completion
from misvo.server.core import Core
from misvo.server.doors import Who
from misvo.server.errors import ApiError, Reply
from misvo.server.jobs import Job
from misvo.server.orders import Order

router = APIRouter()
PIECE = 2048  # characters of a chunk of text


@dataclass(frozen=True)
class Shape:
    """How a route writes its answers: whole, and as pieces of a stream."""

    object: str
    chunk: str
    choice: Callable[[int, Answer, dict | None], dict]
    begin: Callable[[int], dict]
    piece: Callable[[int, str], dict]
    logprobs: Callable


def _chat_choice(index: int, answer: Answer, logprobs: dict | None) -> dict:
    message = {"role": "assistant", "content": answer.text, "refusal": None}
    return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": answer.finish_reason}


def _text_choice(index: int, answer: Answer, logprobs: dict | None) -> dict:
    return {"index": index, "text": answer.text, "logprobs": logprobs, "finish_reason": answer.finish_reason}


CHAT = Shape(
    "chat.completion",
    "chat.completion.chunk",
    _chat_choice,
    lambda index: {"index": index, "delta": {"role": "assistant", "content": ""}, "finish_reason": None},
    lambda index, text: {"index": index, "delta": {"content": text} if text else {}, "finish_reason": None},
    made.chat_logprobs,
)
TEXT = Shape(
    "text_completion",
    "text_completion",
    _text_choice,
    lambda index: {"index": index, "text": "", "logprobs": None, "finish_reason": None},
    lambda index, text: {"index": index, "text": text, "logprobs": None, "finish_reason": None},
    made.text_logprobs,
)


def core_of(request: Request) -> Core:
    return request.app.state.core


def who_of(request: Request) -> Who:
    return request.scope["state"]["who"]


def owner_of(request: Request) -> str:
    return who_of(request).owner


@router.get("/v1/models", tags=["OpenAI"])
async def models(request: Request) -> Reply:
    """The model of this server."""
    core = core_of(request)
    return Reply({"object": "list", "data": [_model(core)] if core.has_model else []})


@router.get("/v1/models/{name:path}", tags=["OpenAI"])
async def model(name: str, request: Request) -> Reply:
    core_of(request).check_model(name)
    return Reply(_model(core_of(request)))


def _model(core: Core) -> dict:
    return {"id": core.name, "object": "model", "created": core.created, "owned_by": "misvo"}


@router.post("/v1/chat/completions", tags=["OpenAI"])
async def chat(body: Chat, request: Request) -> Response:
    """An answer to a chat: a plain sample, one under a saved steering, or the best of a steering run."""
    core = core_of(request)
    core.check_model(body.model)
    order = orders.of_chat(body, core.config)
    options = body.stream_options
    return await _answer(core, request, order, CHAT, "chatcmpl", body.stream, bool(options and options.include_usage))


@router.post("/v1/completions", tags=["OpenAI"])
async def completions(body: Completion, request: Request) -> Response:
    """The same for texts that go to the model as they are."""
    core = core_of(request)
    core.check_model(body.model)
    order = orders.of_completion(body, core.config)
    options = body.stream_options
    return await _answer(core, request, order, TEXT, "cmpl", body.stream, bool(options and options.include_usage))


async def _answer(core: Core, request: Request, order: Order, shape: Shape, kind: str, stream: bool, usage: bool):
    job = await sse.attended(request, core.start(order, kind, who_of(request)))
    if stream:
        return sse.EventStream(
            _chunks(core, job, order, shape, usage),
            keep_alive=core.config.keep_alive,
            send_seconds=core.config.limits.send_seconds,
            at_end=lambda left: _over(core, job, left),
            headers={"X-Request-Id": job.id},
        )
    try:
        await sse.attended(request, job.finished())
    finally:
        core.cancel(job)
    raise_where_failed(job)
    return Reply(await asyncio.to_thread(_whole, core, job, order, shape), headers={"X-Request-Id": job.id})


def _over(core: Core, job: Job, left: bool) -> None:
    core.metrics.left += left
    core.cancel(job)


def raise_where_failed(job: Job) -> None:
    if job.error is not None:
        raise job.error
    if job.state == "cancelled":
        raise ApiError(409, "the request was cancelled.", code="cancelled", retry=False)


def _head(core: Core, job: Job, kind: str) -> dict:
    return {"id": job.id, "object": kind, "created": int(job.created), "model": core.name}


def _given(job: Job, order: Order) -> list[Answer]:
    return [answer for part in job.parts for answer in made.answers(part, order.n)]


def _whole(core: Core, job: Job, order: Order, shape: Shape) -> dict:
    given = _given(job, order)
    return {
        **_head(core, job, shape.object),
        "choices": [
            shape.choice(index, answer, shape.logprobs(core.policy, answer) if order.record else None)
            for index, answer in enumerate(given)
        ],
        "usage": made.usage(job),
        "misvo": made.about(job, given, order.seed, order.record),
    }


async def _chunks(core: Core, job: Job, order: Order, shape: Shape, usage: bool) -> AsyncIterator[str]:
    """Progress as chunks without text, the answers' texts, what they cost. Samples are told as they are written."""
    head = _head(core, job, shape.chunk)
    nothing = shape.piece(0, "")
    told = {0: ""}  # of each answer
    yield sse.data({**head, "choices": [shape.begin(0)], "misvo": {"state": job.state, "seed": order.seed}})
    async for _, event in job.follow():
        if event["type"] == "step":
            row = made.progress(event, job.parts[event["prompt"]].settings.steps)
            if len(job.parts) > 1:
                row["prompt"] = event["prompt"]
            yield sse.data({**head, "choices": [nothing], "misvo": row})
        elif event["type"] == "text":
            index = event["prompt"] * order.n + event["sample"]
            if index not in told:
                yield sse.data({**head, "choices": [shape.begin(index)]})
            told[index] = told.get(index, "") + event["text"]
            yield sse.data({**head, "choices": [shape.piece(index, event["text"])]})
    try:
        raise_where_failed(job)
        given = await asyncio.to_thread(_given, job, order)
        rests = [made.rest(answer.text, told.get(index, "")) for index, answer in enumerate(given)]
    except ApiError as error:
        yield sse.data(error.body())
        return
    for index, (answer, rest) in enumerate(zip(given, rests, strict=True)):
        if index not in told:
            yield sse.data({**head, "choices": [shape.begin(index)]})
        for start in range(0, len(rest), PIECE):
            yield sse.data({**head, "choices": [shape.piece(index, rest[start : start + PIECE])]})
        logprobs = shape.logprobs(core.policy, answer) if order.record else None
        last = {**shape.piece(index, ""), "logprobs": logprobs, "finish_reason": answer.finish_reason}
        if index < len(given) - 1:
            yield sse.data({**head, "choices": [last]})
        else:
            about = made.about(job, given, order.seed, order.record)
            cost = {} if usage else {"usage": made.usage(job)}
            yield sse.data({**head, "choices": [last], **cost, "misvo": about})
    if usage:
        yield sse.data({**head, "choices": [], "usage": made.usage(job)})
    yield sse.DONE
