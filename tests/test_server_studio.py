"""The files of the studio: which there are, under which headers, open where a key guards the rest."""

import re

import pytest
from conftest import make_policy
from serving import served

from misvo.server import Config
from misvo.server.studio_routes import FOLDER, TYPES


@pytest.fixture(scope="module")
def closed():
    with served(make_policy(), {}, Config(name="tiny", keys=("sesame",))) as server, server.http() as http:
        yield http


def test_the_page_and_every_file_of_it_are_open_and_guarded_by_headers(closed):
    files = sorted(path for path in FOLDER.iterdir() if path.is_file())
    assert {path.suffix for path in files} <= set(TYPES), "a file of the studio that nobody serves"
    addresses = {"/": FOLDER / "index.html", **{f"/studio/{path.name}": path for path in files}}
    for address, path in addresses.items():
        answer = closed.get(address)
        assert answer.status_code == 200 and answer.content == path.read_bytes(), address
        assert answer.headers["content-type"] == TYPES[path.suffix]
        rules = dict(rule.split(" ", 1) for rule in answer.headers["content-security-policy"].split("; "))
        assert rules["default-src"] == "'self'" and not any("unsafe" in rule for rule in rules.values())
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["referrer-policy"] == "no-referrer"
        known = closed.get(address, headers={"If-None-Match": answer.headers["etag"]})
        assert (known.status_code, known.content) == (304, b"")
        assert closed.get(address, headers={"If-None-Match": '"other"'}).status_code == 200


def test_the_page_is_small_and_asks_no_other_address():
    files = [path for path in FOLDER.iterdir() if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 150_000
    for path in files:
        addresses = set(re.findall(r"https?://[^\s\"'`<>)]+", path.read_text(encoding="utf-8")))
        assert addresses <= {"http://www.w3.org/2000/svg", "https://…"}, path.name  # a name, and a hint in a field


def test_no_other_file_and_no_route_behind_it(closed):
    for name in ("..%2fpy.typed", "%2e%2e", "%2e%2e%2fpy.typed", "", "index.html%00", "%2fetc%2fpasswd", "x.js"):
        assert closed.get(f"/studio/{name}").status_code == 404, name
    for path in ("/studio", "/index.html", "/misvo/v1/status", "/studio/../misvo/v1/status"):
        assert closed.get(path).status_code in (401, 404), path
    assert closed.get("/misvo/v1/status").status_code == 401
    assert closed.post("/studio/index.html").status_code == 405
