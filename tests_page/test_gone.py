"""Servers that go away and come back, and servers that ask for a key."""

import re

from playwright.sync_api import expect
from stage import until
from test_run import expect_state, fill, run_of

SMALL = {"rollouts": 2, "steps": 40, "max_new_tokens": 4, "seed": 1}


def test_a_server_that_is_killed_and_started_again(tiny, visit):
    server = tiny()
    page = visit(server.url, allow=("ERR_CONNECTION_REFUSED", "ERR_INCOMPLETE_CHUNKED_ENCODING", "404", "ERR_EMPTY"))
    fill(page, prompt="a b c", **SMALL)
    page.get_by_test_id("steer").click()
    lost = run_of(page)
    steps = page.locator('#live [data-fact="step"]')
    expect(steps).to_have_text(re.compile(r"^[2-9] of 40"))
    server.kill()
    banner = page.locator("#banner")
    expect(banner).to_be_visible()
    expect(banner).to_contain_text("does not answer")
    expect(steps).to_have_text(re.compile(r"^\d+ of 40"))  # what was seen stays
    server.start()
    expect(banner).to_be_hidden()
    assert page.get_by_test_id("prompt").input_value() == "a b c"
    expect_state(page, "failed")
    expect(page.get_by_test_id("run-note")).to_contain_text("began anew")
    page.get_by_test_id("setting-steps").fill("2")
    expect(page.get_by_test_id("steer")).to_be_enabled()
    page.get_by_test_id("steer").click()
    until(page, "(old) => !location.hash.endsWith(old)", lost)
    expect_state(page, "completed")


def test_a_key_is_asked_for(tiny, visit):
    server = tiny("--api-key", "sesame")
    page = visit(server.url, allow=("401",), ready=False)
    expect(page.locator("#door")).to_be_visible()
    page.locator("#door-key").fill("wrong")
    page.keyboard.press("Enter")
    expect(page.locator("#door")).to_be_visible()
    page.locator("#door-key").fill("sesame")
    page.keyboard.press("Enter")
    page.wait_for_selector("body[data-ready=yes]")
    fill(page, prompt="a b", **{**SMALL, "steps": 1})
    page.get_by_test_id("steer").click()
    expect_state(page, "completed")
