"""/misvo/v1/steerings, /misvo/v1/generate and what there is to choose from: rewards, models, settings, status."""

import asyncio
import dataclasses
import typing

from fastapi import APIRouter, Request
from starlette.responses import Response

from misvo.numbers import mean_of
from misvo.options import about
from misvo.rewards import score
from misvo.server import answers as made
from misvo.server import orders, sse, steering_file
from misvo.server.bodies import Generate, Method, Run, SaveSteering
from misvo.server.core import Core
from misvo.server.errors import Reply
from misvo.server.jobs import Job
from misvo.server.openai_routes import core_of, owner_of, raise_where_failed, who_of
from misvo.server.shelf import steering_of
from misvo.settings import PRESETS, SAMPLER, STOPS, Settings
from misvo.steering import Steering
from misvo.text_policy import Samples

router = APIRouter(prefix="/misvo/v1")
FIRST = ("rollouts", "steps", "max_new_tokens", "kl_budget_per_token", "seed")
METHODS = typing.get_args(Method)


@router.get("/steerings", tags=["steerings"])
async def steerings(request: Request) -> Reply:
    return Reply({"steerings": core_of(request).shelf.list()})


@router.post("/steerings", tags=["steerings"], status_code=201)
async def save(body: SaveSteering, request: Request) -> Reply:
    """Keep the steering of a run under a name."""
    core = core_of(request)
    job = core.store.get(body.run, owner_of(request), "run")
    steering = steering_of(job)
    await asyncio.to_thread(core.shelf.save, body.name, steering)
    return Reply(core.shelf.describe(body.name), 201)


@router.get("/steerings/{name}", tags=["steerings"])
async def steering(name: str, request: Request) -> Reply:
    return Reply(core_of(request).shelf.describe(name))


@router.get("/steerings/{name}/safetensors", tags=["steerings"])
async def weights(name: str, request: Request) -> Response:
    """The vectors as a file."""
    return await steering_file_of(core_of(request).shelf.get(name), name)


@router.put(
    "/steerings/{name}/safetensors",
    tags=["steerings"],
    status_code=201,
    openapi_extra={
        "requestBody": {
            "required": True,
            "content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}},
        }
    },
)
async def load(name: str, request: Request) -> Reply:
    """Keep what was downloaded once, here or elsewhere, under a name; it must have been made for this model's head."""
    core, content = core_of(request), await request.body()
    policy = core.policy

    def keep() -> None:
        steering = steering_file.decode(content)
        steering.check(policy)
        core.shelf.save(name, steering)

    await asyncio.to_thread(keep)
    return Reply(core.shelf.describe(name), 201)


async def steering_file_of(steering: Steering, name: str) -> Response:
    content = await asyncio.to_thread(steering_file.encode, steering)
    headers = {"Content-Disposition": f'attachment; filename="{name}.safetensors"'}
    return Response(content, media_type="application/octet-stream", headers=headers)


@router.delete("/steerings/{name}", tags=["steerings"])
async def delete(name: str, request: Request) -> Reply:
    await asyncio.to_thread(core_of(request).shelf.delete, name)
    return Reply({"name": name, "deleted": True})


@router.post("/generate", tags=["steerings"])
async def generate(body: Generate, request: Request) -> Reply:
    """Samples under a steering at one or several strengths, with the same noise at each, perhaps scored."""
    core = core_of(request)
    core.check_model(body.model)
    vectors = None
    if body.run is not None:
        job = core.store.get(body.run, owner_of(request), "run")
        vectors = steering_of(job)
    elif body.steering is not None:
        vectors = core.shelf.get(body.steering)
    order = orders.of_generate(body, core.config, vectors)
    job = await sse.attended(request, core.start(order, "gen", who_of(request)))
    try:
        await sse.attended(request, job.finished())
    finally:
        core.cancel(job)
    raise_where_failed(job)
    told = asyncio.to_thread(_strengths, core, job, body)
    return Reply({"seed": body.seed, "strengths": await sse.attended(request, told)})


def _strengths(core: Core, job: Job, body: Generate) -> list[dict]:
    reward = None if body.reward is None else core.registry.make(body.reward)
    rows = []
    for part in job.parts:
        assert isinstance(part.result, Samples)
        given = made.samples(part.result)
        rewards: list = [None] * len(given)
        if reward is not None:
            texts, ids = [answer.text for answer in given], [answer.tokens for answer in given]
            rewards = list(score(reward, part.work.prompt, texts, ids, body.columns or {}))
        tokens = max(1, sum(len(answer.tokens) for answer in given))
        rows.append(
            {
                "strength": part.work.strength if part.work.steering is not None else 0.0,
                "reward": mean_of(rewards),
                "kl_per_token": sum(sum(answer.token_kl) for answer in given) / tokens,
                "changed": sum(len(answer.changed or []) for answer in given) / tokens,
                "samples": [
                    {
                        **{name: getattr(answer, name) for name in ("text", "tokens", "token_kl", "changed")},
                        **{name: getattr(answer, name) for name in ("logprobs", "ref_logprobs", "finish_reason")},
                        "pieces": made.pieces_of(core.policy, answer.tokens, answer.text),
                        "parts_at": answer.changed[0] if answer.changed else None,
                        "reward": value,
                    }
                    for answer, value in zip(given, rewards, strict=True)
                ],
            }
        )
    return rows


@router.get("/rewards", tags=["about"])
async def rewards(request: Request) -> Reply:
    """The names that a reward may have, and the kinds that a request may declare."""
    return Reply(core_of(request).registry.describe())


@router.get("/models", tags=["about"])
async def models(request: Request) -> Reply:
    """The model of this server; none where it only shows finished runs."""
    core = core_of(request)
    return Reply({"models": [core.describe()] if core.has_model else []})


@router.get("/settings", tags=["about"])
async def settings(request: Request) -> Reply:
    """What each setting of a request is for, its default, and the names that it may have."""
    fields = [field for field in dataclasses.fields(Settings) if field.name in Run.model_fields]
    here = {"max_new_tokens": core_of(request).config.default_tokens}
    rows = [
        {
            "name": field.name,
            "about": about(field),
            "default": (PRESETS["auto"] | here).get(field.name, field.default),
            "defaults": {preset: (own | here).get(field.name, field.default) for preset, own in PRESETS.items()},
            "group": _group(field.name),
            "methods": field.metadata["methods"],
            "names": [name for name in field.metadata["names"] or [] if field.name != "method" or name in METHODS],
            "type": str(getattr(field.type, "__name__", field.type)),
        }
        for field in fields
    ]
    return Reply({"presets": list(PRESETS), "settings": rows})


def _group(name: str) -> str:
    """Where a setting belongs: what a first visitor needs, how tokens are drawn, when to stop, and the rest."""
    if name in FIRST:
        return "first"
    return "sampling" if name in SAMPLER else "stopping" if name in STOPS else "search"


@router.get("/status", tags=["about"])
async def status(request: Request) -> Reply:
    """Rows in flight, tokens per second, requests that run or wait."""
    return Reply(core_of(request).status())
