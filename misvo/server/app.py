"""The application: one core, all routes, and the doors around them."""

from collections.abc import Mapping
from contextlib import asynccontextmanager

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware

from misvo import __version__
from misvo.errors import MisvoError
from misvo.policy import Policy, as_policy
from misvo.rewards import AnyReward
from misvo.server import (
    errors,
    openai_routes,
    ops_routes,
    responses_routes,
    runs_routes,
    steering_routes,
    studio_routes,
)
from misvo.server.config import Config
from misvo.server.core import Core
from misvo.server.doors import BodyLimit, Doors, Watch


def create_app(
    policy: Policy | str | None, rewards: Mapping[str, AnyReward] | None = None, config: Config | None = None
) -> FastAPI:
    """An ASGI application that answers for a model; without one it shows finished runs, those of `config.runs`.

    `rewards` maps the names that clients may use to rewards: specs such as "sentiment", or functions.
    """
    config = config or Config()
    core = Core(None if policy is None else as_policy(policy), rewards or {}, config)

    @asynccontextmanager
    async def lifespan(app: FastAPI):
        core.open()
        try:
            yield
        finally:
            core.close()

    cors = [
        Middleware(
            CORSMiddleware,
            allow_origins=list(config.origins),
            allow_methods=["GET", "POST", "PUT", "DELETE"],
            allow_headers=["Authorization", "Content-Type", "Last-Event-ID"],
        )
    ]
    app = FastAPI(
        title="misvo serve",
        version=__version__,
        description="Steered answers of a language model: OpenAI's routes, and all that is known of a run.",
        docs_url=None,
        redoc_url=None,
        lifespan=lifespan,
        redirect_slashes=False,
        middleware=[
            Middleware(Watch, metrics=core.metrics, shows_paths=config.log_requests),
            *(cors if config.origins else []),
            Middleware(Doors, config=config),
            Middleware(BodyLimit, limits=config.limits),
        ],
        exception_handlers={
            errors.ApiError: errors.on_api_error,
            MisvoError: errors.on_api_error,
            HTTPException: errors.on_http,
            RequestValidationError: errors.on_validation,
        },
    )
    app.state.core = core
    for room in (openai_routes, responses_routes, runs_routes, steering_routes, ops_routes, studio_routes):
        app.include_router(room.router)
    return app
