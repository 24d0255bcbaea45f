"""/misvo/v1/runs: runs with all that is known of them: trace rows as they come, every candidate, the whole result."""

import asyncio
from collections.abc import AsyncIterator
from itertools import groupby
from typing import Annotated, Literal

from fastapi import APIRouter, Path, Query, Request
from starlette.responses import Response

from misvo import invasiveness
from misvo.alternatives import alternatives
from misvo.errors import MisvoError
from misvo.result import Result
from misvo.sampling import sampler_of
from misvo.server import answers as made
from misvo.server import orders, run_views, sse
from misvo.server.bodies import Panel, Run
from misvo.server.core import Core
from misvo.server.errors import ApiError, Reply
from misvo.server.jobs import Job
from misvo.server.openai_routes import core_of, owner_of, who_of
from misvo.server.registry import SharedEncoder
from misvo.server.shelf import steering_of
from misvo.server.steering_routes import steering_file_of

router = APIRouter(prefix="/misvo/v1/runs", tags=["runs"])
KIND = "run"
Index = Annotated[int, Path(ge=0, lt=2**31)]


@router.post("", status_code=202)
async def start(body: Run, request: Request) -> Reply:
    """Start a run; it goes on whoever reads its events, until it is done or cancelled."""
    core = core_of(request)
    core.check_model(body.model)
    order = orders.of_run(body, core.config)
    asked = body.model_dump(mode="json", by_alias=True, exclude_unset=True)
    about = {
        "seed": order.seed,
        "request": asked | {"seed": order.seed},
        "weights": core.registry.weights(order.reward),
    }
    job = await sse.attended(request, core.start(order, KIND, who_of(request), about))
    core.store.keep(job)
    return Reply(_state(request, job), 202, {"Location": f"/misvo/v1/runs/{job.id}"})


@router.get("")
async def all_runs(request: Request) -> Reply:
    """The runs that can be looked up, the newest first."""
    return Reply({"runs": [_state(request, job) for job in core_of(request).store.of(owner_of(request), KIND)]})


@router.get("/{id}")
async def state(id: str, request: Request) -> Reply:
    return Reply(_state(request, _job(request, id)))


@router.post("/{id}/cancel")
async def cancel(id: str, request: Request) -> Reply:
    job = _job(request, id)
    core_of(request).cancel(job)
    await sse.attended(request, job.finished())
    return Reply(_state(request, job))


@router.delete("/{id}")
async def delete(id: str, request: Request) -> Reply:
    core, job = core_of(request), _job(request, id)
    core.store.drop(job)
    core.cancel(job)
    return Reply({"id": id, "deleted": True})


@router.get("/{id}/events")
async def events(
    id: str, request: Request, starting_after: Annotated[int, Query(ge=-1, lt=2**31)] = -1
) -> sse.EventStream:
    """Every event as server-sent events with numbers; `Last-Event-ID`, which browsers send, goes on behind one."""
    core, job = core_of(request), _job(request, id)
    last = request.headers.get("last-event-id", "")
    after = int(last) if last.isdecimal() and len(last) < 10 else starting_after

    async def lines() -> AsyncIterator[str]:
        async for number, event in job.follow(after + 1):
            if number == 0 or event["type"] != "step":
                event = {**event, "run": _state(request, job)}
            yield sse.data(event, id=number)

    def over(left: bool) -> None:
        core.metrics.left += left

    seconds = core.config.limits.send_seconds
    return sse.EventStream(lines(), keep_alive=core.config.keep_alive, send_seconds=seconds, at_end=over)


@router.get("/{id}/candidates")
async def candidates(
    id: str,
    request: Request,
    offset: Annotated[int, Query(ge=0, lt=2**31)] = 0,
    limit: Annotated[int, Query(ge=1, le=5000)] = 100,
    step: Annotated[int | None, Query(ge=0, lt=2**31)] = None,
    fields: Annotated[Literal["all", "light"], Query(description="light: without what there is of each token.")] = (
        "all"
    ),
) -> Reply:
    """Responses with their rewards and token KLs, in the order in which they were sampled."""
    job = _job(request, id)
    result, part = _result(job), job.parts[0]
    found = [c for c in list(result.candidates) if step is None or c.step == step]

    def told() -> Reply:
        rows = [run_views.row(one, part, fields == "light") for one in found[offset : offset + limit]]
        return Reply({"total": len(found), "offset": offset, "candidates": rows})

    return await asyncio.to_thread(told)


@router.get("/{id}/candidates/{step}/{rollout}")
async def candidate(
    id: str, step: Index, rollout: Index, request: Request, tokens: Annotated[int, Query(ge=0, le=20)] = 5
) -> Reply:
    """One response, token by token: its text, KL, log-probabilities, and the tokens promoted and demoted there."""
    core, job = core_of(request), _job(request, id)
    result, part = _result(job), job.parts[0]
    recorder = part.recorder
    found = [c for c in result.candidates if (c.step, c.rollout) == (step, rollout)]
    if not found:
        raise ApiError(404, "there is no such response in this run.", code="not_found")
    answer = made.of_candidate(found[0], recorder)
    vectors = None if recorder is None else recorder.vectors.get(step)
    moved = None
    if tokens and vectors is not None and answer.tokens:
        sampler, read = sampler_of(result.settings, core.policy.ends), tuple(result.prompt_ids)
        moved = await core.call(lambda: alternatives(core.policy, read, answer.tokens, vectors, sampler, tokens))
    pieces = await asyncio.to_thread(run_views.pieces, core, part, found[0])
    told = run_views.row(found[0], part) | {"pieces": pieces, "moved": moved}
    return Reply(told | {"logprobs": answer.logprobs, "ref_logprobs": answer.ref_logprobs})


@router.get("/{id}/result")
async def result(id: str, request: Request) -> Reply:
    """The whole result, as `misvo.Result.to_dict` has it."""
    job = _job(request, id)
    return await asyncio.to_thread(lambda: Reply(_finished(job).to_dict()))


@router.post("/{id}/panel")
async def panel(id: str, body: Panel, request: Request) -> Reply:
    """What steering did to the responses: reward, a held-out one, KL, fluency, coherence, diversity."""
    core, job = core_of(request), _job(request, id)
    finished = _finished(job)
    core.places.take(who_of(request).client, job.tokens, core.tally.tokens_per_second)
    try:
        return await asyncio.to_thread(_panel, core, finished, body, job)
    finally:
        core.places.give_back(who_of(request).client, job.tokens)


@router.post("/{id}/fluency")
async def fluency(id: str, request: Request) -> Reply:
    """How fluent the judge (`--judge`) finds every response, in nats per token; rows of candidates then have it too."""
    core, job = core_of(request), _job(request, id)
    finished, part = _finished(job), job.parts[0]
    if core.config.judge is None:
        raise ApiError(409, "this server has no judge: start it with --judge MODEL.", code="no_judge", retry=False)
    core.places.take(who_of(request).client, job.tokens, core.tally.tokens_per_second)
    try:
        judge = await sse.attended(request, asyncio.to_thread(core.judge))
        assert judge is not None
        for _, group in groupby(
            finished.candidates, key=lambda candidate: candidate.step
        ):  # a client may leave between
            some = [one for one in group if (one.step, one.rollout) not in part.fluency]
            asked = [finished.prompt] * len(some), [one.text for one in some]
            found = await sse.attended(request, asyncio.to_thread(judge.fluency, *asked))
            part.fluency |= {(one.step, one.rollout): value for one, value in zip(some, found, strict=True)}
    finally:
        core.places.give_back(who_of(request).client, job.tokens)
    rows = [{"step": step, "rollout": rollout, "fluency": value} for (step, rollout), value in part.fluency.items()]
    return Reply({"judge": judge.name, "candidates": rows})


@router.get("/{id}/safetensors")
async def weights(id: str, request: Request) -> Response:
    """The vectors of a run that is over, as a file."""
    return await steering_file_of(steering_of(_job(request, id)), id)


def _state(request: Request, job: Job) -> dict:
    return run_views.state(core_of(request), job)


def _panel(core: Core, finished: Result, body: Panel, job: Job) -> Reply:
    held_out = None if body.held_out is None else core.registry.make(body.held_out)
    encoder: SharedEncoder | str
    try:
        encoder = core.registry.encoder()
    except MisvoError:  # not installed: there is no row of coherence
        encoder = "none"
    made_panel = invasiveness.panel(finished, core.judge(), held_out, encoder, job.works[0].columns)
    return Reply({"measures": made_panel.to_dict()})


def _job(request: Request, id: str) -> Job:
    return core_of(request).store.get(id, owner_of(request), KIND)


def _result(job: Job) -> Result:
    """The result as far as it came."""
    result = job.parts[0].result if job.parts else None
    if not isinstance(result, Result):
        raise ApiError(409, "the run has no result.", code="no_result", retry=False)
    return result


def _finished(job: Job) -> Result:
    """The result of a run that is over, be it done, cancelled or failed."""
    if not job.over:
        raise ApiError(409, "the run is not over yet.", code="not_over", retry=True)
    if job.parts and job.parts[0].best is None:
        raise MisvoError("no response of this run has a reward.")
    return _result(job)
