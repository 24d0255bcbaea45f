"""/v1/responses: answers that may be computed in the background, looked up, followed from any event on, and cancelled.

Events have numbers that depend on what happened alone: a reader who comes back with `starting_after=N` misses nothing.
"""

from collections.abc import AsyncIterator
from typing import Annotated

from fastapi import APIRouter, Query, Request
from starlette.responses import Response as Answer

from misvo.server import answers as made
from misvo.server import orders, sse
from misvo.server.bodies import Response
from misvo.server.core import Core
from misvo.server.errors import ApiError, Reply
from misvo.server.jobs import Job
from misvo.server.openai_routes import core_of, owner_of, who_of

router = APIRouter(tags=["OpenAI"])
KIND = "resp"


@router.post("/v1/responses")
async def create(body: Response, request: Request) -> Answer:
    """An answer; with `background`, its id at once."""
    core = core_of(request)
    core.check_model(body.model)
    if body.background and not body.store:
        raise ApiError(400, "what runs in the background has to be stored: leave store out.", param="store")
    order = orders.of_response(body, core.config)
    names = ("instructions", "metadata", "temperature", "top_p", "max_output_tokens", "background")
    about = {**{name: getattr(body, name) for name in names}, "seed": order.seed}
    job = await sse.attended(request, core.start(order, KIND, who_of(request), about))
    if body.store:
        core.store.keep(job)
    if body.stream:
        return _stream(core, job, -1, at_end=not body.background)
    if not body.background:
        try:
            await sse.attended(request, job.finished())
        finally:
            core.cancel(job)
        if job.error is not None:
            core.store.drop(job)
            raise job.error
    return Reply(_response(core, job), headers={"X-Request-Id": job.id})


@router.get("/v1/responses/{id}")
async def retrieve(
    id: str,
    request: Request,
    stream: bool = False,
    starting_after: Annotated[int | None, Query(ge=-1, lt=2**31)] = None,
) -> Answer:
    """How a response stands; with `stream`, its events behind number `starting_after`."""
    core = core_of(request)
    job = core.store.get(id, owner_of(request), KIND)
    if not stream:
        return Reply(_response(core, job))
    return _stream(core, job, -1 if starting_after is None else starting_after, at_end=False)


@router.post("/v1/responses/{id}/cancel")
async def cancel(id: str, request: Request) -> Reply:
    core = core_of(request)
    job = core.store.get(id, owner_of(request), KIND)
    core.cancel(job)
    await sse.attended(request, job.finished())
    return Reply(_response(core, job))


@router.delete("/v1/responses/{id}")
async def delete(id: str, request: Request) -> Reply:
    core = core_of(request)
    job = core.store.get(id, owner_of(request), KIND)
    core.cancel(job)
    core.store.drop(job)
    return Reply({"id": id, "object": "response.deleted", "deleted": True})


def _stream(core: Core, job: Job, after: int, at_end: bool) -> sse.EventStream:
    """`at_end`: whether the job ends when this reader leaves."""

    def over(left: bool) -> None:
        core.metrics.left += left
        if at_end:
            core.cancel(job)

    return sse.EventStream(
        _events(core, job, after),
        keep_alive=core.config.keep_alive,
        send_seconds=core.config.limits.send_seconds,
        at_end=over,
        headers={"X-Request-Id": job.id},
    )


async def _events(core: Core, job: Job, after: int) -> AsyncIterator[str]:
    number = -1
    async for event in _all_events(core, job):
        number += 1
        if number > after:
            yield sse.data({**event, "sequence_number": number})
    yield sse.DONE


async def _all_events(core: Core, job: Job) -> AsyncIterator[dict]:
    """The events of a response; samples are told as they are written, the answer of a run at its end."""
    id = job.id.replace(KIND, "msg", 1)
    content = {"item_id": id, "output_index": 0, "content_index": 0}
    empty = {"type": "output_text", "text": "", "annotations": []}
    message = {"type": "message", "id": id, "role": "assistant"}
    opening: list[dict] = [
        {
            "type": "response.output_item.added",
            "output_index": 0,
            "item": {**message, "status": "in_progress", "content": []},
        },
        {"type": "response.content_part.added", **content, "part": empty},
    ]
    told = ""
    yield {"type": "response.created", "response": _response(core, job, "queued")}
    yield {"type": "response.queued", "response": _response(core, job, "queued")}
    async for _, event in job.follow():
        if event["type"] == "started":
            yield {"type": "response.in_progress", "response": _response(core, job, "in_progress")}
        elif event["type"] == "step":
            yield {"type": "response.misvo.progress", "misvo": made.progress(event, job.parts[0].settings.steps)}
        elif event["type"] == "text":
            for one in opening if not told else []:
                yield one
            told += event["text"]
            yield {"type": "response.output_text.delta", **content, "delta": event["text"], "logprobs": []}
    if job.state == "completed":
        item = _items(job)[0]
        text = item["content"][0]["text"]
        for one in opening if not told else []:
            yield one
        try:
            rest = made.rest(text, told)
        except ApiError as error:
            yield {"type": "error", "code": error.code, "message": error.message, "param": None}
            return
        if rest:
            yield {"type": "response.output_text.delta", **content, "delta": rest, "logprobs": []}
        yield {"type": "response.output_text.done", **content, "text": text, "logprobs": []}
        yield {"type": "response.content_part.done", **content, "part": {**empty, "text": text}}
        yield {"type": "response.output_item.done", "output_index": 0, "item": item}
    yield {"type": f"response.{job.state}", "response": _response(core, job)}


def _items(job: Job) -> list[dict]:
    text = made.answers(job.parts[0], 1)[0].text
    content = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    message = {"type": "message", "id": job.id.replace(KIND, "msg", 1), "status": "completed", "role": "assistant"}
    return [{**message, "content": [content]}]


def _response(core: Core, job: Job, state: str | None = None) -> dict:
    """The response as it stands, or, for an event, as it stood."""
    state = state or job.state
    error = None if job.error is None or state != "failed" else job.error
    told = {
        "id": job.id,
        "object": "response",
        "created_at": int(job.created),
        "status": state,
        "model": core.name,
        "output": [],
        "error": error and {"code": error.code or "server_error", "message": error.message},
        "incomplete_details": None,
        "parallel_tool_calls": False,
        "tool_choice": "none",
        "tools": [],
        "usage": None,
        **{name: value for name, value in job.about.items() if name != "seed"},
        "misvo": {"seed": job.about["seed"]},
    }
    if state == "completed":
        given = made.answers(job.parts[0], 1)
        used = made.usage(job)
        told["output"] = _items(job)
        told["usage"] = {
            "input_tokens": used["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": used["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": used["total_tokens"],
        }
        told["misvo"] = made.about(job, given, job.about["seed"], False)
    return told
