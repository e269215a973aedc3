"""A real Chromium, and the pages that it opens."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from screens import DESKTOP  # isort: skip # finds the tests that the next is imported from
from test_reporting import write_synthetic_run

from colocate.reporting.comparison import write_comparison
from colocate.reporting.report import write_report


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    from playwright.sync_api import expect, sync_playwright

    expect.set_options(timeout=30_000)  # of a machine that other tests load
    with sync_playwright() as playwright:
        # Debian's own browser, as root.
        chromium = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox", "--disable-gpu"]
        )
        yield chromium
        chromium.close()


@pytest.fixture(scope="session")
def pages(tmp_path_factory) -> dict[str, Path]:
    runs = [
        write_synthetic_run(tmp_path_factory.mktemp(name), num_steps=num_steps)
        for name, num_steps in (("a", 60), ("b", 24))
    ]
    beside = tmp_path_factory.mktemp("c") / "comparison.html"
    return {"report": write_report(runs[0]), "comparison": write_comparison(runs, beside)}


@pytest.fixture
def visit(browser, pages):
    """Opens a page; an error of its scripts, or anything that it asks for elsewhere, fails the test."""
    contexts, errors = [], []

    def visit(name: str, size: dict[str, int] = DESKTOP, hash: str = "", **options: Any) -> Any:
        context = browser.new_context(viewport=size, **options)
        contexts.append(context)
        page = context.new_page()
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("request", lambda r: None if r.url.startswith(("file:", "blob:")) else errors.append(r.url))
        page.goto(pages[name].as_uri() + hash)
        return page

    yield visit
    for context in contexts:
        context.close()
    assert errors == []
