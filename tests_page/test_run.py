"""A run on SmolLM2 from typing to answer, and all that can be done with it afterwards."""

import re

import pytest
import safetensors.torch
from playwright.sync_api import expect
from stage import HOSTILE, RIGHT_TO_LEFT, until

PROMPT = "Give me one tip for sleeping better."
SMALL = {"rollouts": 4, "steps": 3, "max_new_tokens": 16, "seed": 7}
LONG = {"rollouts": 8, "steps": 200, "max_new_tokens": 24, "seed": 7}
SHARE = 0.05  # of a core that the events of a run may cost the page
LONGEST = 240_000  # milliseconds that a run may take here


def fill(page, prompt=PROMPT, **settings):
    page.get_by_test_id("prompt").fill(prompt)
    page.get_by_test_id("settings").evaluate("(one) => { one.open = true }")
    for name, value in settings.items():
        page.get_by_test_id(f"setting-{name}").fill(str(value))


def run_of(page):
    """The id in the page's address."""
    return until(page, "location.hash").removeprefix("#run=")


def expect_state(page, state, timeout=LONGEST):
    expect(page.get_by_test_id("run-state")).to_have_attribute("data-state", state, timeout=timeout)


@pytest.fixture(scope="module")
def finished(smollm2_server):
    """A run that is done, with a steered response that can be looked at: (id, state)."""
    started = smollm2_server.post("/runs", prompt=PROMPT, reward="sentiment", held_out="reading-ease", **SMALL)
    address = f"/runs/{started['id']}"
    smollm2_server.wait_until(lambda: smollm2_server.get(address)["state"] == "completed", LONGEST / 1000)
    return started["id"], smollm2_server.get(address)


def test_from_typing_to_answer(smollm2_server, visit):
    page = visit(smollm2_server.url)
    fill(page, **SMALL)
    page.get_by_test_id("steer").click()
    expect(page.get_by_test_id("cancel")).to_be_visible()
    id = run_of(page)
    expect_state(page, "completed")
    state = smollm2_server.get(f"/runs/{id}")
    asked = state["request"]
    assert asked["prompt"] == PROMPT and {name: asked[name] for name in SMALL} == SMALL
    answer = page.get_by_test_id("answer-text").locator(".tokens")
    expect(answer).to_be_visible()
    assert answer.text_content() == state["answer"]["text"]
    nats = [float(one.get_attribute("data-nats")) for one in answer.locator("[data-place]").all()]
    assert nats == pytest.approx(state["answer"]["token_kl"], abs=1e-4)
    for series in ("mean", "max", "best"):
        expect(page.locator(f'#live path[data-series="{series}"]')).to_have_attribute("data-points", "3")
    expect(page.locator("#live [data-budget]")).to_have_attribute("data-budget", "0.1")
    expect(page.get_by_test_id("curve-charts").locator("svg")).to_have_count(2)
    pair = page.get_by_test_id("pair")
    expect(pair).to_have_attribute("data-parted", re.compile(r"never|\d+"))
    expect(page.get_by_test_id("panel").locator("table")).to_be_visible()
    expect(page.get_by_test_id("steer")).to_be_enabled()
    assert page.locator("[data-measure=reward]").count() == 1


def test_a_token_shows_what_was_promoted_there(smollm2_server, visit, finished):
    """With the mouse and with the keyboard, on a steered response."""
    id, _ = finished
    page = visit(f"{smollm2_server.url}/#run={id}")
    last = SMALL["steps"] - 1
    expect(page.get_by_test_id("answer-text").locator(".tokens")).to_be_visible()
    page.locator(f'[data-key="{last}/1"] button.text').click()
    expect(page.locator("#answer")).to_have_attribute("data-key", f"{last}/1")
    told = smollm2_server.get(f"/runs/{id}/candidates/{last}/1")
    assert "".join(told["pieces"]) == told["text"]
    tokens, moved = page.get_by_test_id("answer-text").locator("[data-place]"), page.get_by_test_id("moved")
    tokens.nth(3).hover()
    expect(moved).to_contain_text("Position 4")
    rows = moved.locator("table[data-way=up] tbody tr")
    expect(rows).to_have_count(len(told["moved"][3]["promoted"]))
    expect(rows.first).to_contain_text(re.compile(r"\d %.*→.*\d %"))
    expect(moved.locator("table[data-way=down] tbody tr")).to_have_count(len(told["moved"][3]["demoted"]))
    tokens.nth(3).focus()
    page.keyboard.press("ArrowRight")
    expect(moved).to_contain_text("Position 5")
    page.keyboard.press("Home")
    expect(moved).to_contain_text("Position 1")


def test_strength(smollm2_server, visit, finished):
    id, _ = finished
    page = visit(f"{smollm2_server.url}/#run={id}")
    pair, slider = page.get_by_test_id("pair"), page.get_by_test_id("alpha")
    expect(pair).to_have_attribute("data-strength", "1")
    expect(pair).to_have_attribute("data-parted", re.compile(r"never|\d+"))
    slider.fill("0")
    expect(page.locator("[data-testid=pair][data-strength='0']:not(.waiting)")).to_have_attribute(
        "data-parted", "never"
    )
    slider.fill("2")
    expect(page.locator("[data-testid=pair][data-strength='2']:not(.waiting)")).to_be_visible()
    both = [one.locator(".tokens").text_content() for one in pair.locator("article").all()]
    parted = pair.get_attribute("data-parted")
    assert (both[0] == both[1]) == (parted == "never")
    body = {"prompt": PROMPT, "run": id, "strength": [0, 2], "seed": 1000, "max_new_tokens": SMALL["max_new_tokens"]}
    drawn = smollm2_server.post("/generate", **body)["strengths"]
    assert both == [one["samples"][0]["text"] for one in drawn]
    at = drawn[1]["samples"][0]["parts_at"]
    assert parted == ("never" if at is None else str(at))
    before = pair.text_content()
    page.get_by_test_id("other-noise").click()
    until(page, "(was) => document.querySelector('[data-testid=pair]:not(.waiting)')?.textContent !== was", before)


def test_a_held_out_reward_stands_beside_the_other(smollm2_server, visit, finished):
    id, state = finished
    page = visit(f"{smollm2_server.url}/#run={id}")
    expect(page.locator('[data-sort="held_out"]')).to_be_visible()
    expect(page.locator('#live path[data-series="held-out"]')).to_have_attribute("data-points", "3")
    expect(page.locator("[data-measure=held_out]")).to_be_visible()
    assert state["request"]["held_out"] == "reading-ease"


def test_a_steering_is_saved_downloaded_loaded_and_tried(smollm2_server, visit, finished, tmp_path):
    id, _ = finished
    page = visit(f"{smollm2_server.url}/#run={id}", allow=("400",), accept_downloads=True)
    expect(page.get_by_test_id("save-steering")).to_be_enabled()
    page.get_by_test_id("steering-name").fill("calm")
    page.get_by_test_id("save-steering").click()
    kept = page.get_by_test_id("steerings")
    expect(kept.locator('[data-steering="calm"]')).to_be_visible()
    with page.expect_download() as download:
        page.get_by_role("button", name="Download calm").click()
    file = tmp_path / "again.safetensors"
    download.value.save_as(file)
    assert safetensors.torch.load_file(file)["vectors"].shape == (SMALL["max_new_tokens"], 576)
    page.get_by_test_id("steering-file").set_input_files(file)
    expect(kept.locator('[data-steering="again"]')).to_be_visible()
    own, back = (smollm2_server.get(f"/steerings/{name}") for name in ("calm", "again"))
    assert {**own, "name": 0, "created": 0} == {**back, "name": 0, "created": 0}
    kept.locator('[data-steering="again"]').get_by_role("button", name="Try").click()
    expect(page.locator("#strength")).to_contain_text("again")
    expect(page.get_by_test_id("pair").locator("article")).to_have_count(2)
    for name in ("calm", "again"):
        page.get_by_role("button", name=f"Delete {name}").click()
        expect(kept.locator(f'[data-steering="{name}"]')).to_have_count(0)
    (tmp_path / "bad.safetensors").write_bytes(b"no file at all")
    page.get_by_test_id("steering-file").set_input_files(tmp_path / "bad.safetensors")
    expect(page.get_by_text(re.compile("not the file of a steering"))).to_be_visible()


def test_a_reload_in_mid_run_finds_it_and_cancel_frees_the_engine(smollm2_server, visit):
    page = visit(smollm2_server.url)
    fill(page, **LONG)
    page.get_by_test_id("steer").click()
    id = run_of(page)
    done = page.locator('#live [data-fact="step"]')
    expect(done).to_have_text(re.compile(r"^[1-9]\d* of 200"), timeout=LONGEST)
    cost = costs(page, seconds=8)
    page.reload()
    page.wait_for_selector("body[data-ready=yes]")
    assert page.url.endswith(id) and page.get_by_test_id("prompt").input_value() == PROMPT
    expect_state(page, "in_progress")
    expect(done).to_have_text(re.compile(r"^[1-9]\d* of 200"))
    assert smollm2_server.get("/status")["requests"] >= 1
    page.get_by_test_id("cancel").click()
    expect_state(page, "cancelled")
    smollm2_server.wait_until(lambda: smollm2_server.get("/status")["requests"] == 0)
    assert smollm2_server.get("/status")["rows_in_flight"] == 0
    expect(page.get_by_test_id("steer")).to_be_enabled()
    print(f"the events of a run cost the page {100 * cost:.1f} % of a core")
    assert cost < SHARE


def costs(page, seconds: float) -> float:
    """The share of a core that the page's main thread takes while a run goes on, by its own CPU time."""
    session = page.context.new_cdp_session(page)
    session.send("Performance.enable", {"timeDomain": "threadTicks"})

    def spent():
        metrics = {one["name"]: one["value"] for one in session.send("Performance.getMetrics")["metrics"]}
        return metrics["TaskDuration"]

    before = spent()
    page.wait_for_timeout(1000 * seconds)
    return (spent() - before) / seconds


def test_hostile_requests_come_back_as_texts(smollm2_server, visit):
    page = visit(smollm2_server.url)
    fill(page, prompt=RIGHT_TO_LEFT + HOSTILE, **{**SMALL, "steps": 1})
    page.get_by_test_id("reward-kind").first.select_option("contains")
    page.get_by_test_id("reward-argument").first.fill(HOSTILE)
    page.get_by_test_id("steer").click()
    id = run_of(page)
    expect_state(page, "completed")
    assert smollm2_server.get(f"/runs/{id}")["prompt"] == RIGHT_TO_LEFT + HOSTILE
    expect(page.locator("#live-title")).to_contain_text("onerror")
    expect(page.get_by_test_id("panel").locator("table")).to_be_visible()
    page.reload()
    page.wait_for_selector("body[data-ready=yes]")
    expect(page.locator("#live-title")).to_contain_text("onerror")
    expect(page.get_by_test_id("prompt")).to_have_value(RIGHT_TO_LEFT + HOSTILE)
    assert page.evaluate("window.hacked") is None and page.locator("img").count() == 0


def test_what_the_server_refuses_is_said_beside_the_form(smollm2_server, visit):
    page = visit(smollm2_server.url, allow=("400",))
    fill(page, **{**SMALL, "rollouts": 1})
    page.get_by_test_id("steer").click()
    expect(page.locator("#ask .problem, .ask .problem")).to_contain_text("Rollouts must be")
    page.get_by_test_id("prompt").fill("  ")
    page.get_by_test_id("steer").click()
    expect(page.locator("#ask .problem, .ask .problem")).to_contain_text("prompt")


def test_with_the_keyboard_alone(smollm2_server, visit):
    """Tab to the prompt, type, tab to the button, press it; every stop on the way shows where it is."""
    page = visit(smollm2_server.url)
    fill(page, **{**SMALL, "steps": 1, "rollouts": 2})
    page.evaluate("document.activeElement.blur()")

    def tab_to(testid):
        for _ in range(60):
            page.keyboard.press("Tab")
            here = page.evaluate(
                """() => {
                    const one = document.activeElement, style = getComputedStyle(one);
                    const marked = style.outlineStyle !== "none" && parseFloat(style.outlineWidth) > 0;
                    return [one.dataset.testid ?? "", marked || style.boxShadow !== "none", one.outerHTML.slice(0, 80)];
                }"""
            )
            assert here[1] or here[2].startswith("<body"), f"nothing shows that the focus is at {here[2]}"
            if here[0] == testid:
                return
        raise AssertionError(f"the keyboard does not reach {testid}")

    tab_to("prompt")
    page.keyboard.press("Control+A")
    page.keyboard.type("Say hello.")
    tab_to("steer")
    page.keyboard.press("Enter")
    id = run_of(page)
    expect_state(page, "completed")
    assert smollm2_server.get(f"/runs/{id}")["prompt"] == "Say hello."


def test_a_run_as_code(smollm2_server, visit):
    page = visit(smollm2_server.url, permissions=["clipboard-read", "clipboard-write"])
    fill(page, **SMALL)
    for kind, said in (("python", "from openai import OpenAI"), ("curl", f"{smollm2_server.url}/misvo/v1/runs")):
        page.get_by_test_id(f"copy-{kind}").click()
        expect(page.locator("#said")).to_contain_text("Copied")
        code = page.evaluate("navigator.clipboard.readText()")
        assert said in code and PROMPT in code
        page.evaluate("document.getElementById('said').textContent = ''")
