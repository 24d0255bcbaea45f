"""/health, /metrics, and a page that documents the routes without asking any other address for anything."""

from html import escape

from fastapi import APIRouter, Request
from starlette.responses import HTMLResponse, PlainTextResponse

from misvo.server.errors import Reply
from misvo.server.openai_routes import core_of

router = APIRouter()
POLICY = "default-src 'none'; style-src 'unsafe-inline'"
STYLE = (
    "body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}"
    "code,pre{font-family:ui-monospace,monospace}h2{margin-top:2rem}td{padding:.1rem 1rem .1rem 0;vertical-align:top}"
    "@media(prefers-color-scheme:dark){body{background:#111;color:#ddd}a{color:#8bf}}"
)


@router.get("/health", tags=["about"])
async def health(request: Request) -> Reply:
    """200 while the engine's thread lives and the server takes requests, else 503."""
    core = core_of(request)
    alive = core.alive
    state = "stopping" if core.stopping else "ok" if alive else "the engine has stopped"
    return Reply({"status": state}, 200 if alive and not core.stopping else 503)


@router.get("/metrics", tags=["about"])
async def metrics(request: Request) -> PlainTextResponse:
    """Figures for Prometheus."""
    core = core_of(request)
    tally, places = core.tally, core.places
    text = core.metrics.text(tally, places.taken, places.tokens, len(core.store), core.alive)
    return PlainTextResponse(text, media_type="text/plain; version=0.0.4")


@router.get("/docs", include_in_schema=False)
async def docs(request: Request) -> HTMLResponse:
    """The routes and what their bodies take, made of the OpenAPI description."""
    return HTMLResponse(page(request.app.openapi()), headers={"Content-Security-Policy": POLICY})


def page(description: dict) -> str:
    bodies = description.get("components", {}).get("schemas", {})
    parts = [f"<h1>{escape(description['info']['title'])}</h1>"]
    parts.append('<p>The same as data: <a href="openapi.json">openapi.json</a>.</p>')
    for path, methods in description["paths"].items():
        for method, route in methods.items():
            parts.append(f"<h2><code>{method.upper()} {escape(path)}</code></h2>")
            parts.append(f"<p>{escape(route.get('description') or route.get('summary') or '')}</p>")
            rows = [(one["name"], one.get("schema", {})) for one in route.get("parameters", [])]
            content = route.get("requestBody", {}).get("content", {}).get("application/json", {})
            named = content.get("schema", {}).get("$ref", "").rpartition("/")[2]
            parts.append(_table(rows))
            if named:
                parts.append(f'<p>A body of the kind <a href="#{escape(named)}">{escape(named)}</a>.</p>')
    for name, schema in bodies.items():
        if schema.get("properties"):
            parts.append(f'<h2 id="{escape(name)}">{escape(name)}</h2><p>{escape(schema.get("description", ""))}</p>')
            parts.append(_table(list(schema["properties"].items())))
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>misvo</title><style>{STYLE}</style>{''.join(parts)}"
    )


def _table(rows: list[tuple[str, dict]]) -> str:
    cells = (
        f"<tr><td><code>{escape(name)}</code><td>{escape(_kind(schema))}<td>{escape(schema.get('description', ''))}"
        for name, schema in rows
    )
    return f"<table>{''.join(cells)}</table>" if rows else ""


def _kind(schema: dict) -> str:
    if "$ref" in schema:
        return schema["$ref"].rpartition("/")[2]
    if "anyOf" in schema:
        return " or ".join(_kind(one) for one in schema["anyOf"] if one.get("type") != "null")
    if "enum" in schema or "const" in schema:
        return ", ".join(map(str, schema.get("enum", [schema.get("const")])))
    kind = str(schema.get("type", "anything"))
    return f"list of {_kind(schema['items'])}" if kind == "array" and "items" in schema else kind
