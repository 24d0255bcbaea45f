"""What clients are told when something is wrong: errors in OpenAI's shape, with the headers that its client heeds."""

import json
from typing import Any

from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from misvo.errors import MisvoError, RewardError, cut

LONGEST = 600  # characters of a message


class ApiError(Exception):
    """Something that a client is told: a status, a sentence, and the field that it is about."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
        retry: bool | None = None,
    ):
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, cut(message, LONGEST), param, code
        self.headers = {}
        if retry_after is not None:
            self.headers["Retry-After"] = str(retry_after)
        if retry is not None:
            self.headers["x-should-retry"] = "true" if retry else "false"

    @property
    def kind(self) -> str:
        known = {401: "authentication_error", 403: "permission_error", 404: "not_found_error"}
        known |= {429: "rate_limit_error", 503: "overloaded_error"}
        return known.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")

    def body(self) -> dict:
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}


class Reply(Response):
    """JSON that any client can read: ASCII, so that half a surrogate pair passes, and no NaN."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return dumps(content).encode("ascii")


def dumps(content: Any) -> str:
    return json.dumps(plain(content), ensure_ascii=True, allow_nan=False, separators=(",", ":"))


def plain(thing: Any) -> Any:
    """Plain data with null in the place of what is not a finite number, as it is in JSON."""
    if isinstance(thing, float):
        return thing if thing - thing == 0 else None
    if isinstance(thing, dict):
        return {str(name): plain(value) for name, value in thing.items()}
    if isinstance(thing, list | tuple):
        return [plain(value) for value in thing]
    return thing


def of(error: BaseException) -> ApiError:
    """What a client may know of an error. What an operator's reward or a library says may hold secrets, and stays."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RewardError):
        what = f"the reward could not score the responses{began_with(error)}."
        return ApiError(500, what, code="reward_failed", retry=False)
    if isinstance(error, MisvoError):
        return ApiError(400, str(error))
    return ApiError(500, "something went wrong in the server.", code="internal_error", retry=False)


def root(error: BaseException) -> BaseException:
    """What an error began with."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def began_with(error: BaseException) -> str:
    """The kind of a foreign error that an error of ours began with, as the end of a sentence; without its words."""
    cause = root(error)
    return "" if isinstance(cause, MisvoError) else f" ({type(cause).__name__})"


def reply(error: ApiError) -> Reply:
    return Reply(error.body(), error.status, error.headers)


async def on_api_error(request: Request, error: Exception) -> Reply:
    return reply(of(error))


async def on_http(request: Request, error: Exception) -> Reply:
    assert isinstance(error, HTTPException)
    answer = reply(ApiError(error.status_code, str(error.detail)))
    for name, value in (error.headers or {}).items():
        answer.headers[name] = value
    return answer


async def on_validation(request: Request, error: Exception) -> Reply:
    """400 with the name of the field, never its value."""
    assert isinstance(error, RequestValidationError)
    found = max(error.errors(), key=lambda one: len(one["loc"]))
    place = [str(part) for part in found["loc"] if part not in ("body", "query", "path")]
    param = cut(".".join(place), 200) or None
    if found["type"] == "extra_forbidden":
        return reply(ApiError(400, f"the field {param!r} is not supported.", param=param, code="unknown_parameter"))
    if found["type"] == "missing":
        return reply(ApiError(400, f"the field {param!r} is missing.", param=param, code="missing_parameter"))
    if found["type"] == "json_invalid":
        return reply(ApiError(400, "the body is not JSON.", code="invalid_json"))
    said = cut(str(found["msg"]), 200).removeprefix("Value error, ")
    return reply(ApiError(400, f"{param or 'the body'}: {said}", param=param, code="invalid_value"))
