"""The studio: the page at `/` and what it is made of at `/studio/FILE`, as files of this package and nothing else.

There are no secrets in them, so they are open where a key guards the rest. A name is looked up among the files that
are there, never joined to a path, and the browser is told to run and load what comes from here alone.
"""

import hashlib
from pathlib import Path

from fastapi import APIRouter, Request
from starlette.responses import Response

import misvo
from misvo.server.errors import ApiError

router = APIRouter()
FOLDER = Path(misvo.__file__).parent / "studio"
PAGE = "index.html"
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
}
HEADERS = {
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",  # asked for again, and answered by 304 where nothing has changed
}


@router.get("/", include_in_schema=False)
async def page(request: Request) -> Response:
    return _file(PAGE, request)


@router.get("/studio/{name}", include_in_schema=False)
async def part(name: str, request: Request) -> Response:
    return _file(name, request)


def _file(name: str, request: Request) -> Response:
    found = {path.name: path for path in FOLDER.iterdir() if path.suffix in TYPES and path.is_file()}
    if name not in found:
        raise ApiError(404, "the studio has no such file.", code="not_found")
    content = found[name].read_bytes()
    headers = {**HEADERS, "ETag": f'"{hashlib.sha256(content).hexdigest()[:32]}"'}
    if headers["ETag"] in [tag.strip() for tag in request.headers.get("if-none-match", "").split(",")]:
        return Response(status_code=304, headers=headers)
    return Response(content, headers=headers, media_type=TYPES[found[name].suffix])
