"""Reports in a real Chromium: crosshair, keyboard, phone, dark, the viewer, accessibility, and a long run."""

from __future__ import annotations

import re

import pytest
from screens import DESKTOP, PHONE

pytestmark = pytest.mark.browser


@pytest.mark.parametrize("name", ["report", "comparison"])
@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_pages_fit_and_have_no_violation_of_axes_rules(visit, name, size, scheme):
    from axe_playwright_python.sync_playwright import Axe

    page = visit(name, size, color_scheme=scheme)
    assert page.evaluate("document.documentElement.scrollWidth") <= size["width"]
    if scheme == "dark":  # as it is read: zoomed, smoothed, with a value shown
        page.goto(page.url + "#steps=10-20&smoothing=0.9")
        page.locator("svg.plot:visible").first.focus()
        page.keyboard.press("End")
        page.locator(".tip").wait_for(state="visible")
    found = Axe().run(page)
    assert found.violations_count == 0, found.generate_report()


def test_a_phone_shows_all_that_the_table_of_runs_has(visit):
    page = visit("comparison", PHONE)
    cells = page.locator(".runs td")
    assert cells.count() == 2 * 7
    for cell in cells.all():
        box = cell.bounding_box()
        assert box["x"] >= 0 and box["x"] + box["width"] <= PHONE["width"]


def test_the_crosshair_follows_mouse_keyboard_and_touch(visit):
    from playwright.sync_api import expect

    page = visit("report", has_touch=True)
    chart, tip = page.locator("svg.plot:visible").first, page.locator(".tip")
    expect(tip).to_be_hidden()
    box = chart.bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    expect(tip).to_contain_text(re.compile(r"^step (29|30|31)\s*reward"))  # the middle of 60, beside the axis
    page.mouse.move(2, 2)
    expect(tip).to_be_hidden()
    chart.focus()
    for key, step in (("End", 60), ("ArrowLeft", 59), ("Home", 1)):
        page.keyboard.press(key)
        expect(tip).to_contain_text(re.compile(rf"^step {step}\s*reward"))
    page.keyboard.press("Escape")
    expect(tip).to_be_hidden()
    page.touchscreen.tap(box["x"] + box["width"] - 20, box["y"] + box["height"] / 2)
    expect(tip).to_contain_text("step 60")


def test_the_viewer_finds_completions(visit):
    page = visit("report")
    shown, count = page.locator("#found .sample"), page.locator("#count")
    total = int(count.inner_text().split(" of ")[1].split()[0])
    assert shown.count() == min(20, total)
    page.get_by_label("Search", exact=True).fill("<SCRIPT>alert")  # what a run wrote is text
    assert 0 < shown.count() < total and "<script>alert" in shown.first.inner_text()
    # The prompt is a question in English, the completion no language.
    assert [pre.get_attribute("lang") for pre in shown.first.locator("pre").all()] == ["en", ""]
    page.get_by_label("Search", exact=True).fill("")
    page.get_by_label("Step", exact=True).select_option(index=1)
    texts = shown.all_inner_texts()
    assert texts and len({text.split()[1] for text in texts}) == 1
    page.get_by_label("Step", exact=True).select_option("")
    page.get_by_label("Order", exact=True).select_option("worst")
    advantages = [float(t.split("advantage ")[1].split()[0]) for t in shown.all_inner_texts()]
    assert advantages == sorted(advantages)
    page.get_by_role("button", name="Show more").click()
    assert shown.count() == min(40, total)


def test_without_scripts_every_chart_is_there(visit):
    page = visit("report", java_script_enabled=False)
    assert page.locator("svg.plot:visible").count() >= 10
