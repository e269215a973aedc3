"""The documentation's site, opened from disk in a real Chromium."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.browser
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("the site & more")  # as a directory may be called
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(directory)]
    done = subprocess.run(
        words, cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return directory


def test_the_search_finds_a_page_and_goes_there(site: Path, browser: Any) -> None:
    from playwright.sync_api import expect

    errors: list[str] = []
    context = browser.new_context()
    page = context.new_page()
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("request", lambda r: None if r.url.startswith(("file:", "data:")) else errors.append(r.url))
    page.goto((site / "zh-Hant" / "glossary.html").as_uri())
    field = page.get_by_role("textbox", name="Search")
    field.click()
    expect(page.get_by_text("Type to start searching")).to_be_visible()  # the index is read
    field.press_sequentially("Gymnasium")
    found = page.locator(".md-search-result__link[href*='turns.html'][href$='#environments']")
    expect(found).to_be_visible()
    found.click()
    expect(page).to_have_url((site / "turns.html").as_uri() + "?h=gymnasium#environments")
    context.close()
    assert errors == []
