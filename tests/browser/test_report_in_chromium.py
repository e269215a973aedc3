"""Reports in a real Chromium: crosshair, keyboard, phone, dark, the viewer, accessibility, and a long run."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))

from test_reporting import write_synthetic_run

from colocate.reporting.comparison import write_comparison
from colocate.reporting.report import write_report

pytestmark = pytest.mark.browser
DESKTOP, PHONE = {"width": 1280, "height": 900}, {"width": 390, "height": 844}


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        # Debian's own browser, as root.
        chromium = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox", "--disable-gpu"]
        )
        yield chromium
        chromium.close()


@pytest.fixture(scope="module")
def pages(tmp_path_factory) -> dict[str, Path]:
    runs = [write_synthetic_run(tmp_path_factory.mktemp(name), num_steps=60) for name in "ab"]
    beside = tmp_path_factory.mktemp("c") / "comparison.html"
    return {"report": write_report(runs[0]), "comparison": write_comparison(runs, beside)}


@pytest.fixture
def visit(browser, pages):
    """Opens a page; an error of its scripts, or anything that it asks for elsewhere, fails the test."""
    contexts, errors = [], []

    def visit(name: str, size: dict[str, int] = DESKTOP, **options: Any) -> Any:
        context = browser.new_context(viewport=size, **options)
        contexts.append(context)
        page = context.new_page()
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("request", lambda r: None if r.url.startswith(("file:", "blob:")) else errors.append(r.url))
        page.goto(pages[name].as_uri())
        return page

    yield visit
    for context in contexts:
        context.close()
    assert errors == []


@pytest.mark.parametrize("name", ["report", "comparison"])
@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_pages_fit_and_have_no_violation_of_axes_rules(visit, name, size, scheme):
    from axe_playwright_python.sync_playwright import Axe

    page = visit(name, size, color_scheme=scheme)
    assert page.evaluate("document.documentElement.scrollWidth") <= size["width"]
    found = Axe().run(page)
    assert found.violations_count == 0, found.generate_report()


def test_the_crosshair_follows_mouse_keyboard_and_touch(visit):
    page = visit("report", has_touch=True)
    chart, tip = page.locator("svg.plot:visible").first, page.locator(".tip")
    assert not tip.is_visible()
    box = chart.bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    assert re.match(r"step (29|30|31):", tip.inner_text())  # the middle of 60 steps, beside the axis
    page.mouse.move(2, 2)
    assert not tip.is_visible()
    page.keyboard.press("Tab")
    page.keyboard.press("End")
    assert tip.inner_text().startswith("step 60:")
    page.keyboard.press("ArrowLeft")
    assert tip.inner_text().startswith("step 59:")
    page.keyboard.press("Home")
    assert tip.inner_text().startswith("step 1:")
    page.keyboard.press("Escape")
    assert not tip.is_visible()
    page.touchscreen.tap(box["x"] + box["width"] - 20, box["y"] + box["height"] / 2)
    assert tip.inner_text().startswith("step 60:")


def test_the_viewer_finds_completions(visit):
    page = visit("report")
    shown, count = page.locator("#found .sample"), page.locator("#count")
    total = int(count.inner_text().split(" of ")[1].split()[0])
    assert shown.count() == min(20, total)
    page.get_by_label("Search", exact=True).fill("<SCRIPT>alert")  # what a run wrote is text
    assert 0 < shown.count() < total and "<script>alert" in shown.first.inner_text()
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


@pytest.mark.slow
def test_a_long_run_opens_fast(browser, tmp_path):
    path = write_report(write_synthetic_run(tmp_path, num_steps=50_000))
    page = browser.new_page(viewport=DESKTOP)
    page.goto(path.as_uri())
    assert page.evaluate("performance.timing.domComplete - performance.timing.navigationStart") < 5_000
    page.close()
