"""The page in a real browser: `make test-page` runs these tests. One browser, a fresh profile for every test.

Every page fails its test on a request to any other address and on any error in the console; a test that provokes one
says which.
"""

import shutil
from contextlib import ExitStack
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Page, expect, sync_playwright
from stage import hostile_run, large_run, real_run, running, tiny_checkpoint

FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"]
FLAGS += ["--disable-sync", "--no-first-run"]
PATIENCE = 60_000  # milliseconds: two busy cores share themselves between a model and a browser

expect.set_options(timeout=PATIENCE)


@pytest.fixture(scope="session")
def browser():
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    assert chromium, "there is no chromium: `apt-get install chromium`"
    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=chromium, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture
def visit(browser):
    """visit(address, allow=(), ready=True, **context) gives a page; what it did wrong fails the test at its end."""
    wrong, contexts = [], []

    def open_page(address: str, allow: tuple[str, ...] = (), ready: bool = True, **options) -> Page:
        origin = urlsplit(address)[:2]
        context = browser.new_context(**options)
        context.set_default_timeout(PATIENCE)
        contexts.append(context)
        page = context.new_page()

        def on_request(request):
            if not request.url.startswith(("data:", "blob:")) and urlsplit(request.url)[:2] != origin:
                wrong.append(f"a request to {request.url}")

        def on_console(message):
            if message.type in ("error", "warning") and not any(word in message.text for word in allow):
                wrong.append(f"in the console: {message.text}")

        page.on("request", on_request)
        page.on("console", on_console)
        page.on("pageerror", lambda error: wrong.append(f"an error: {error}"))
        page.goto(address)
        if ready:
            page.wait_for_selector("body[data-ready=yes]")
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert not wrong, wrong


@pytest.fixture(scope="session")
def smollm2_server():
    """`misvo serve` on the embedded model."""
    with running(
        "serve", "--reward", "sentiment", "--reward", "reading-ease=reading-ease", "--keep-alive", 2
    ) as server:
        yield server


@pytest.fixture(scope="session")
def viewer(tmp_path_factory):
    """`misvo studio --view` on three folders, without a model. Its runs are by the names of their folders."""
    root = tmp_path_factory.mktemp("runs")
    for name, result in (("real", real_run()), ("hostile", hostile_run()), ("large", large_run())):
        result.save(root / name)
    folders = [root / name for name in ("real", "hostile", "large")]
    with running("studio", "--view", "--no-browser", *folders) as server:
        server.ids = {run["name"]: run["id"] for run in server.get("/runs")["runs"]}
        yield server


@pytest.fixture
def tiny(tmp_path):
    """A way to servers on a tiny model with a slow reward; they end after the pages of a test."""
    with ExitStack() as servers:
        yield lambda *options: servers.enter_context(running("serve", *tiny_checkpoint(tmp_path), *options))
