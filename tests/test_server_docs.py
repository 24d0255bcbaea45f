"""docs/server.md names every route and every option of `misvo serve`, with their defaults, and no others."""

import re
from pathlib import Path

import typer
from fastapi.routing import APIRoute

from misvo.cli import app as cli
from misvo.server import create_app

PAGE = (Path(__file__).parent.parent / "docs" / "server.md").read_text(encoding="utf-8")


def section(title: str) -> str:
    return PAGE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def rows(title: str) -> list[list[str]]:
    """The cells of a section's table, without its head."""
    lines = [line for line in section(title).splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def routes_of(routes) -> list[APIRoute]:
    """Also those of routers that were included."""
    return [found for route in routes for found in ([route] if isinstance(route, APIRoute) else _inside(route))]


def _inside(route):
    inner = getattr(route, "original_router", None) or getattr(route, "app", None)
    return routes_of(getattr(inner, "routes", []))


def test_every_route_is_documented_and_no_other():
    application = create_app(None)
    known = {f"{method} {route.path}" for route in routes_of(application.routes) for method in route.methods}
    known |= {f"{method.upper()} {path}" for path, ways in application.openapi()["paths"].items() for method in ways}
    known.add(f"GET {application.openapi_url}")
    names = {re.sub(r"\{(\w+)(?::\w+)?\}", lambda match: match[1].upper(), route) for route in known}
    told = {route for row in rows("All routes") for route in re.findall(r"`([A-Z]+ /[^`]*)`", row[0])}
    assert len(names) > 30
    assert told == names


def test_every_option_is_documented_with_its_default():
    options = {one.opts[0]: one.default for one in typer.main.get_command(cli).commands["serve"].params}
    told = {}
    for names, defaults, _ in rows("All options"):
        told |= dict.fromkeys(re.findall(r"`(--[\w-]+)`", names), defaults)
    assert set(told) == set(options) - {"--help"}
    for name, default in options.items():
        if isinstance(default, int | float) and not isinstance(default, bool):
            assert float(told[name].replace(",", "")) == default, name
