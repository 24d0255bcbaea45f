"""Plain ASGI middleware, one idea each: errors become JSON, keys and origins are checked, bodies have a limit.

Checks read `scope["path"]`, never an address that was put together from the Host header.
"""

import asyncio
import hashlib
import hmac
import ipaddress
import logging
import time
import traceback
from dataclasses import dataclass

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from misvo.errors import MisvoError
from misvo.server.config import Config, Limits
from misvo.server.errors import ApiError, of, reply
from misvo.server.metrics import Metrics
from misvo.server.sse import Left

log = logging.getLogger("misvo-server")
OPEN = ("/", "/health")  # and the files of the studio, which hold no secrets
OPEN_FOLDER = "/studio/"
UPLOADS = "/misvo/v1/steerings/"  # what is PUT there may be larger than other bodies


@dataclass(frozen=True)
class Who:
    """Whose request this is."""

    owner: str  # a digest of its key, or nothing where there are no keys: who may see what comes of it
    client: str  # the same, or its address where there are no keys: whose places it takes


class Watch:
    """Counts requests, and turns what is raised inside into an answer. Of an error, the log has the place alone."""

    def __init__(self, app: ASGIApp, metrics: Metrics, shows_paths: bool):
        self.app, self.metrics, self.shows_paths = app, metrics, shows_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        status, started = 0, time.monotonic()

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self.app(scope, receive, watched)
        except Left:
            self.metrics.left += 1
            status = status or 499
        except (ApiError, MisvoError) as error:
            if not status:
                await reply(of(error))(scope, receive, watched)
        except Exception as error:
            log.error("%s in a request\n%s", type(error).__name__, "".join(traceback.format_tb(error.__traceback__)))
            if not status:
                await reply(of(error))(scope, receive, watched)
        finally:
            route = getattr(scope.get("route"), "path", "other")
            self.metrics.count(route, status, time.monotonic() - started)
            if self.shows_paths:
                log.info("%s %s %d", scope["method"], scope["path"], status)


class Doors:
    """Who may come in: a known Host, no page of a foreign origin, one of the keys."""

    def __init__(self, app: ASGIApp, config: Config):
        self.app, self.hosts, self.origins = app, config.hosts, config.origins
        self.keys = {_digest(key.encode()): key for key in config.keys}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
        elif scope["type"] != "http":  # a websocket: there are none here
            await receive()
            await send({"type": "websocket.close", "code": 1008})
        else:
            try:
                owner = self._owner(scope)
                who = Who(owner, owner or _address(scope))
            except ApiError as error:
                await reply(error)(scope, receive, send)
            else:
                scope["state"] = {**scope.get("state", {}), "who": who}
                await self.app(scope, receive, send)

    def _owner(self, scope: Scope) -> str:
        """A digest of the key, or nothing where there are no keys."""
        hosts, origins, keys = (_header(scope, name) for name in (b"host", b"origin", b"authorization"))
        if self.hosts and (len(hosts) != 1 or _name(hosts[0]) not in self.hosts):
            raise ApiError(403, "this server does not answer to this name.", code="host_not_allowed")
        for origin in origins:
            own = hosts and origin.partition("://")[2] == hosts[0]
            if not own and origin not in self.origins:
                raise ApiError(403, "pages of this origin may not call this server.", code="origin_not_allowed")
        if not self.keys or scope["path"] in OPEN or scope["path"].startswith(OPEN_FOLDER):
            return ""
        given = keys[0].partition(" ")[2] if len(keys) == 1 and keys[0][:7].lower() == "bearer " else ""
        digest = _digest(given.strip().encode("utf-8", "surrogateescape"))
        found = [known for known in self.keys if hmac.compare_digest(known, digest)]  # all of them, every time
        if not found:
            raise ApiError(401, "a key is needed: Authorization: Bearer KEY.", code="invalid_api_key", retry=False)
        return found[0].hex()[:16]


def _address(scope: Scope) -> str:
    """Where a request comes from; of IPv6 the part that a network is given, since a client can have all of the rest."""
    host = (scope.get("client") or ("", 0))[0]
    try:
        address = ipaddress.ip_address(host)
    except ValueError:  # a socket of this machine, which has no address
        return host
    return str(address if address.version == 4 else ipaddress.ip_network((int(address) >> 64 << 64, 64)))


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _header(scope: Scope, name: bytes) -> list[str]:
    return [value.decode("latin-1") for key, value in scope["headers"] if key == name]


def _name(host: str) -> str:
    """A Host header without its port."""
    return host.rpartition("]")[0] + "]" if host.startswith("[") else host.partition(":")[0].lower()


class BodyLimit:
    """Refuses bodies that are too large, before they are read where their size is told, and ones that trickle in."""

    def __init__(self, app: ASGIApp, limits: Limits):
        self.app, self.limits = app, limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        upload = scope["method"] == "PUT" and scope["path"].startswith(UPLOADS)
        most = self.limits.upload if upload else self.limits.body
        too_large = ApiError(413, f"the body is larger than {most} bytes.", code="body_too_large")
        told = _header(scope, b"content-length")
        if any(not text.isdecimal() or int(text[:20]) > most for text in told):
            await _refuse(too_large, scope, receive, send)
            return
        # The body is gathered here, so that whatever reads it later reads a whole one or none.
        body, deadline = bytearray(), asyncio.get_running_loop().time() + self.limits.body_seconds
        more = True
        while more:
            try:
                async with asyncio.timeout_at(deadline):
                    message = await receive()
            except TimeoutError:
                await _refuse(ApiError(408, "the body did not come in time.", code="slow_body"), scope, receive, send)
                return
            if message["type"] == "http.disconnect":
                return
            body += message.get("body", b"")
            more = message.get("more_body", False)
            if len(body) > most:
                await _refuse(too_large, scope, receive, send)
                return
        whole: list[Message] = [{"type": "http.request", "body": bytes(body), "more_body": False}]
        del body

        async def replay() -> Message:
            return whole.pop() if whole else await receive()

        await self.app(scope, replay, send)


async def _refuse(error: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
    answer = reply(error)
    answer.headers["Connection"] = "close"  # the rest of the body is not read
    await answer(scope, receive, send)
