"""Zoom and smoothing in a real Chromium: what is drawn, by mouse, touch and keyboard, and for a long run."""

from __future__ import annotations

import json
import math
import random
import re
import threading
from pathlib import Path

import pytest
from screens import DESKTOP, PHONE, chart, drag, drawing
from test_reporting import drawn_lines, read_strictly, synthetic_step, tick_values, write_synthetic_run

from colocate.reporting import axes
from colocate.reporting.axes import Axis
from colocate.reporting.live import LiveReport, serve
from colocate.reporting.report import write_report

pytestmark = pytest.mark.browser


def expect(locator):
    from playwright.sync_api import expect

    return expect(locator)


def rewards_of(pages) -> dict[int, float]:
    records = read_strictly(pages["report"].parent / "metrics.jsonl")
    return {record["step"]: record["reward"] for record in records if not record.get("eval")}


def test_a_drag_zooms_all_charts(visit, pages):
    page = visit("report")
    drag(page, "Reward.", 1 / 3, 2 / 3)  # of steps 0 to 60: there is an evaluation before the first step
    seen = page.locator("#seen")
    expect(seen).to_have_text("Steps 20 to 40 of 60")
    for title in ("Reward.", "Entropy.", "Where each step's time went.", "Peak memory by phase."):
        chart(page, title).scroll_into_view_if_needed()
        expect(chart(page, title)).to_have_attribute("aria-label", re.compile("Shown: steps 20 to 40$"))
        ticks = tick_values(drawing(page, title), "x")
        assert len(ticks) >= 3 and all(20 <= step <= 40 and step == int(step) for step, _ in ticks)
    # What is drawn is what the run recorded, read through the ticks; and the axis fits it.
    svg = drawing(page, "Reward.")
    [line] = drawn_lines(svg, "faint s-blue")
    recorded = [(step, reward) for step, reward in rewards_of(pages).items() if 20 <= step <= 40]
    values = [value for value, _ in tick_values(svg, "y")]
    for (x, y), (step, reward) in zip(line, recorded, strict=True):
        assert x == pytest.approx(step, abs=0.05)
        assert y == pytest.approx(reward, abs=0.005 * (values[-1] - values[0]))
    tick = values[1] - values[0]
    assert values[0] > min(r for _, r in recorded) - 2 * tick and values[-1] < max(rewards_of(pages).values())
    # A link, or the file opened again, shows the same.
    assert page.url.endswith("#steps=20-40")
    page.reload()
    expect(seen).to_have_text("Steps 20 to 40 of 60")
    chart(page, "Entropy.").dblclick()
    expect(seen).to_have_text("All steps, 0 to 60")
    assert "#" not in page.url


@pytest.mark.parametrize("name", ["report", "comparison"])
def test_after_a_reset_the_charts_are_those_that_the_page_came_with(visit, name):
    page = visit(name, {"width": 1280, "height": 6000})  # all charts are on the screen
    page.locator("details").evaluate_all("all => all.forEach((details) => (details.open = true))")
    # Tag, class and text of each element, and its numbers. The memory of one step has no steps to choose.
    read = """() => [...document.querySelectorAll('svg.plot[tabindex]')]
        .filter(svg => svg.getClientRects().length)
        .map(svg => [...svg.querySelectorAll('.area > *')].map(e => [
            `${e.tagName} ${e.getAttribute('class')} ${e.tagName === 'text' ? e.textContent : ''}`,
            ['d', 'x', 'y', 'cx', 'cy', 'width', 'height'].flatMap(
                a => (e.getAttribute(a) ?? '').match(/-?[\\d.]+/g) ?? []).map(Number)]))"""
    before = page.evaluate(read)
    assert len(before) > 10
    page.get_by_label("Zoom in").click()
    shown = page.locator('svg.plot[aria-label*="Shown: steps"]')
    expect(shown).to_have_count(len(before))
    assert all(one != other for one, other in zip(page.evaluate(read), before, strict=True))
    page.keyboard.press("Escape")
    expect(shown).to_have_count(0)
    for one, other in zip(page.evaluate(read), before, strict=True):
        assert sorted(what for what, _ in one) == sorted(what for what, _ in other)
        for (what, numbers), (_, expected) in zip(sorted(one), sorted(other), strict=True):
            assert numbers == pytest.approx(expected, abs=0.35), what  # both round to tenths of a pixel


def test_smoothing_by_hand_is_the_moving_average_over_the_faint_values(visit, pages):
    page = visit("report")
    page.get_by_label("Smoothing").select_option("0.9")
    expect(page.locator("#seen")).to_have_text("All steps, 0 to 60, smoothed by EMA 0.9")
    assert page.url.endswith("#smoothing=0.9")
    rewards = list(rewards_of(pages).values())
    # By its definition, with the weights of a value k steps ago being 0.9**k, divided by their sum.
    expected = [
        math.fsum(0.9**k * rewards[i - k] for k in range(i + 1)) / math.fsum(0.9**k for k in range(i + 1))
        for i in range(len(rewards))
    ]
    svg = drawing(page, "Reward.")
    [mean], [raw] = drawn_lines(svg, "curve s-blue"), drawn_lines(svg, "faint s-blue")
    assert [y for _, y in mean] == pytest.approx(expected, abs=0.004)
    assert [y for _, y in raw] == pytest.approx(rewards, abs=0.004)
    assert "EMA 0.9" in page.locator("svg.plot:visible").first.text_content()
    page.reload()
    expect(page.get_by_label("Smoothing")).to_have_value("0.9")
    page.get_by_label("Smoothing").select_option("none")
    svg = drawing(page, "Reward.")
    [line] = drawn_lines(svg, "curve s-blue")
    assert [y for _, y in line] == pytest.approx(rewards, abs=0.004) and not drawn_lines(svg, "faint s-blue")


def test_the_address_on_the_page_of_the_documentation_opens_that_view(visit):
    text = (Path(__file__).parents[2] / "docs" / "report.md").read_text(encoding="utf-8")
    [hash] = re.findall(r"`report\.html(#[^`]+)`", text)
    page = visit("report", hash=hash)
    expect(page.locator("#seen")).to_have_text("Steps 10 to 20 of 60, smoothed by EMA 0.9")
    # What no control could have set is not taken: the page says what it shows.
    page.goto(page.url.split("#")[0] + "#steps=70-90&smoothing=7")
    expect(page.locator("#seen")).to_have_text("Steps 59 to 60 of 60")


def test_everything_can_be_done_by_keyboard(visit):
    page = visit("report")
    seen = page.locator("#seen")
    page.keyboard.press("Tab")
    expect(page.get_by_label("Steps from")).to_be_focused()
    page.keyboard.press("Control+a")
    page.keyboard.type("11")
    page.keyboard.press("Tab")
    page.keyboard.type("30")
    page.keyboard.press("Enter")
    expect(seen).to_have_text("Steps 11 to 30 of 60")
    page.keyboard.press("Escape")
    expect(seen).to_have_text("All steps, 0 to 60")
    svg = chart(page, "Reward.")
    for _ in range(12):
        page.keyboard.press("Tab")
        if svg.evaluate("svg => svg === document.activeElement"):
            break
    expect(svg).to_be_focused()
    for key, text in (
        ("Home", "All steps, 0 to 60"),
        ("+", "Steps 1 to 31 of 60"),  # around the crosshair, at the first step
        ("Shift+ArrowRight", "Steps 16 to 46 of 60"),
        ("-", "All steps, 0 to 60"),  # twice as many, and moved so that none is missed
    ):
        page.keyboard.press(key)
        expect(seen).to_have_text(text)
    assert page.locator("#seen").get_attribute("role") == "status"


def test_on_a_phone_a_finger_and_buttons_zoom_and_the_page_still_scrolls(visit):
    page = visit("report", PHONE, has_touch=True, is_mobile=True)
    seen, svg = page.locator("#seen"), chart(page, "Reward.")
    svg.scroll_into_view_if_needed()
    box = svg.bounding_box()
    session = page.context.new_cdp_session(page)

    def swipe(*points: tuple[float, float]) -> None:
        kinds = ["touchStart", *["touchMove"] * (len(points) - 1)]
        for kind, (x, y) in zip(kinds, points, strict=True):
            session.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": [{"x": x, "y": y}]})
        session.send("Input.dispatchTouchEvent", {"type": "touchEnd", "touchPoints": []})

    left, y = box["x"] + 60, box["y"] + box["height"] / 2
    swipe(*((left + 30 * i, y + i) for i in range(6)))
    expect(seen).to_have_text(re.compile(r"^Steps (\d+) to (\d+) of 60$"))
    page.get_by_role("button", name="Reset").tap()
    expect(seen).to_have_text("All steps, 0 to 60")
    for name, text in (
        ("Zoom in", "Steps 15 to 45 of 60"),
        ("Later steps", "Steps 30 to 60 of 60"),
        ("Earlier steps", "Steps 15 to 45 of 60"),
        ("Zoom out", "All steps, 0 to 60"),
    ):
        page.get_by_role("button", name=name).tap()
        expect(seen).to_have_text(text)
    before = page.evaluate("scrollY")
    box = svg.bounding_box()
    swipe(*((left + 60, box["y"] + 180 - 30 * i) for i in range(6)))
    page.wait_for_function("before => scrollY > before", arg=before)
    expect(seen).to_have_text("All steps, 0 to 60")  # a swipe up is not a choice of steps


def test_axes_and_numbers_are_those_of_the_page_without_scripts(visit):
    rng, cases = random.Random(3), []
    for _ in range(400):
        size = 10 ** rng.uniform(-9, 10)
        low, high = sorted(rng.choice([0.0, 1.0, 3.0]) * size + size * rng.uniform(-1, 1) for _ in "ab")
        kind = rng.choice(["plain", "whole", "percent", "log"])
        low, high = (abs(low) + 1e-9, abs(low) + abs(high) + 1e-8) if kind == "log" else (low, high)
        cases.append((kind, low, high))
    got = visit("report").evaluate(
        """cases => cases.map(([kind, low, high]) => {
            const axis = Axis.around(low, high, {log: kind === 'log', percent: kind === 'percent',
                whole: kind === 'whole', tight: kind === 'whole'});
            return [axis.ticks, axis.ticks.map(tick => axis.text(tick)), compact(low), compact(high, 4)];
        })""",
        cases,
    )
    for (kind, low, high), (ticks, texts, *numbers) in zip(cases, got, strict=True):
        options = {"whole": {"whole": True, "tight": True}, "log": {"log": True}}.get(kind, {})
        axis = Axis.around([low, high], format=axes.percent if kind == "percent" else None, **options)
        assert ticks == pytest.approx(axis.ticks, rel=1e-9, abs=1e-12 * (high - low))
        assert texts == [axis.text(tick) for tick in axis.ticks], (kind, low, high)
        assert numbers == [axes.compact(low), axes.compact(high, 4)]


def test_a_page_that_follows_a_run_keeps_what_is_seen(browser, tmp_path):
    log = write_synthetic_run(tmp_path, num_steps=30)
    with serve(LiveReport([tmp_path], lambda: write_report(tmp_path)), 0) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        page = browser.new_page(viewport=DESKTOP)
        page.goto(server.url)
        drag(page, "Reward.", 1 / 3, 2 / 3)
        page.get_by_label("Smoothing").select_option("0.8")
        expect(page.locator("#seen")).to_have_text("Steps 10 to 20 of 30, smoothed by EMA 0.8")
        page.wait_for_timeout(2_100)  # until it has asked for the version once
        with (log / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"step": 31, "reward": 0.5}) + "\n")
        expect(page.locator("#seen")).to_have_text("Steps 10 to 20 of 31, smoothed by EMA 0.8")
        page.close()
        server.shutdown()


# ── A long run ───────────────────────────────────────────────────────────────────────────────────────────

NUM_STEPS, SPIKE_AT = 50_000, 23_457


@pytest.fixture(scope="module")
def long_report(tmp_path_factory):
    """A report of 50,000 steps with all metrics and phases, whose reward has a spike of one step."""
    directory, rng = tmp_path_factory.mktemp("long"), random.Random(1)
    pool = []
    for step in range(1, 301):
        metrics, timeline = synthetic_step(step, 300, rng)
        del timeline["memory"]
        pool.append(json.dumps({**timeline, **metrics})[1:-1])
    with open(directory / "metrics.jsonl", "w") as file:
        for step in range(1, NUM_STEPS + 1):
            # The later of two equal keys counts.
            reward = 9.5 if step == SPIKE_AT else rng.random()
            file.write(f'{{"step": {step}, {rng.choice(pool)}, "reward": {reward}}}\n')
    return write_report(directory)


def test_a_long_run_opens_fast_and_keeps_its_spike(browser, long_report, record_property):
    page = browser.new_page(viewport=DESKTOP)
    page.goto(long_report.as_uri())
    first_paint_s = page.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime") / 1e3
    drag(page, "Reward.", 0.4, 0.6)
    expect(page.locator("#seen")).to_have_text(re.compile(r"^Steps (199|200)\d\d to (299|300)\d\d of 50000$"))
    [line] = drawn_lines(drawing(page, "Reward."), "faint s-blue")
    assert max(y for _, y in line) == pytest.approx(9.5, abs=0.1)
    assert len(line) < 5_000  # points of 10,000 steps over 1,100 pixels
    page.goto(long_report.as_uri() + f"#steps={SPIKE_AT - 30}-{SPIKE_AT + 30}")
    expect(page.locator("#seen")).to_have_text(f"Steps {SPIKE_AT - 30} to {SPIKE_AT + 30} of 50000")
    [line] = drawn_lines(drawing(page, "Reward."), "faint s-blue")
    assert len(line) == 61 and max(line, key=lambda at: at[1])[0] == pytest.approx(SPIKE_AT, abs=0.1)
    page.keyboard.press("Escape")
    # From a move of the mouse to the frame that shows the values; and from a choice to the drawn charts.
    hover_s, redraw_s = (
        page.evaluate(
            """async (act) => {
                const svg = [...document.querySelectorAll('svg.plot')].find((s) => s.getClientRects().length);
                const box = svg.getBoundingClientRect();
                const times = [];
                for (let i = 0; i < 10; i++) {
                    await new Promise(requestAnimationFrame);
                    const start = performance.now();
                    if (act === 'hover') {
                        const at = { clientX: box.left + 100 + 40 * i, clientY: box.top + 90, bubbles: true };
                        svg.dispatchEvent(new PointerEvent('pointermove', at));
                    } else {
                        const select = document.getElementById('smoothing');
                        select.value = ['0.9', '0.99'][i % 2];
                        select.dispatchEvent(new Event('change', { bubbles: true }));
                    }
                    await new Promise((done) => setTimeout(done)); // what awaits numbers has run
                    times.push(performance.now() - start);
                }
                return times.sort((a, b) => a - b)[5] / 1e3;
            }""",
            act,
        )
        for act in ("hover", "redraw")
    )
    page.close()
    figures = {"first_paint_s": first_paint_s, "hover_s": hover_s, "redraw_s": redraw_s}
    for name, seconds in figures.items():
        record_property(name, seconds)
    print({name: round(seconds, 4) for name, seconds in figures.items()}, long_report.stat().st_size)
    assert first_paint_s < 60 and hover_s < 3 and redraw_s < 30, (
        figures
    )  # far from what an idle machine takes
