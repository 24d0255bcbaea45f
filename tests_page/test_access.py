"""Names, labels, references and contrast, computed from what the browser made of the page, in light and dark."""

from pathlib import Path

import pytest
from playwright.sync_api import expect
from test_view import of, run_is_shown

CHECKS = (Path(__file__).parent / "checks.js").read_text(encoding="utf-8")
FAULTS = ("nameless", "twice", "dangling", "skipped", "faint")
PLANTED = """() => {
    const add = (tag, props) => document.body.append(Object.assign(document.createElement(tag), props));
    add("button", { className: "" });
    add("p", { id: "view", textContent: "twice" });
    add("label", { htmlFor: "nobody", textContent: "label" });
    add("h4", { textContent: "deep" });
    add("p", { textContent: "pale" });
    document.body.lastElementChild.style.color = "#999";
    document.body.lastElementChild.style.backgroundColor = "#aaa";
}"""


def faults(page):
    for details in page.locator("details").all():
        details.evaluate("(one) => { one.open = true }")
    found = page.evaluate(CHECKS)
    return {name: found[name] for name in FAULTS}, found


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_run_is_for_everybody(viewer, visit, scheme):
    page = visit(of(viewer, "real"), color_scheme=scheme)
    run_is_shown(page)
    wrong, found = faults(page)
    assert wrong == {name: [] for name in FAULTS}
    assert (found["language"], found["firsts"]) == ("en", 1)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_form_is_for_everybody(smollm2_server, visit, scheme):
    page = visit(smollm2_server.url, color_scheme=scheme)
    expect(page.get_by_test_id("steer")).to_be_visible()
    wrong, _ = faults(page)
    assert wrong == {name: [] for name in FAULTS}


def test_the_checks_find_what_is_wrong(viewer, visit):
    page = visit(of(viewer, "real"))
    run_is_shown(page)
    page.evaluate(PLANTED)
    wrong, _ = faults(page)
    assert len(wrong["nameless"]) == 1 and wrong["twice"] == ["view"] and wrong["dangling"] == ["for=nobody"]
    assert any("pale" in one for one in wrong["faint"])


def test_nothing_moves_where_that_is_not_wanted(viewer, visit):
    page = visit(of(viewer, "real"), reduced_motion="reduce")
    run_is_shown(page)
    assert faults(page)[1]["moving"] == []
