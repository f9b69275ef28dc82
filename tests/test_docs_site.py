"""The documentation, built and read from files in a browser: search finds pages, and nothing is fetched."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.mark.slow
def test_search_works_from_files_and_nothing_is_fetched(tmp_path):
    pytest.importorskip("mkdocs", reason="pip install 'laplace-redux[docs]'")
    pytest.importorskip("material", reason="pip install 'laplace-redux[docs]'")
    playwright = pytest.importorskip("playwright.sync_api", reason="pip install playwright")
    if CHROMIUM is None:
        pytest.skip("there is no Chromium here: apt-get install chromium")
    build = [sys.executable, "-m", "mkdocs", "build", "--quiet", "-d", str(tmp_path)]
    subprocess.run(build, cwd=ROOT, check=True, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"})
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        for start in ("index.html", "api/laplace.html"):
            tab, wrong = browser.new_page(), []
            tab.on("console", lambda message, wrong=wrong: wrong.append(message.text))
            tab.on(
                "request", lambda r, wrong=wrong: None if r.url.startswith(("file:", "data:")) else wrong.append(r.url)
            )
            tab.goto((tmp_path / start).as_uri())
            tab.click(".md-search__input")
            tab.keyboard.type("temperature scaling", delay=20)
            tab.wait_for_selector(".md-search-result__item", timeout=60_000)
            assert "matching document" in tab.inner_text(".md-search-result__meta")
            assert wrong == []
        browser.close()
