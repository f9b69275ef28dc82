"""The page in a real browser: phone and desktop, light and dark; no error, no request, no overflow, nothing missing.

Needs Chromium (Debian's package `chromium`) and Playwright's Python client. `make test` installs both where it may.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest

import laplace

sys.path.insert(0, str(Path(__file__).parent))
from cases import KINDS, given

CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)
SIZES = {"phone": (400, 800), "desktop": (1280, 900)}
EVIL = "<script>document.title = 'changed'</script><img src=x onerror=alert(1)>"


@pytest.fixture(scope="module")
def browser():
    playwright = pytest.importorskip("playwright.sync_api", reason="pip install playwright")
    if CHROMIUM is None:
        pytest.skip("there is no Chromium here: apt-get install chromium")
    with playwright.sync_playwright() as driver:
        opened = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture(scope="module", params=KINDS)
def page(request, tmp_path_factory):
    """A page of each kind, with everything on it, and its JSON."""
    case = given(request.param)
    names = [EVIL, "a class with an unreasonably-long-name-that-does-not-break", "c"]
    out = tmp_path_factory.mktemp("report") / "page.html"
    laplace.report(
        case.la,
        case.test,
        ood={"far": case.outside, EVIL: case.outside / 2},
        val_loader=case.val,
        train_loader=case.train,
        shifts={"moved": {s: [(case.x + s, case.y)] for s in (0.5, 1)}},
        sources={"a source with a rather long name": case.la},
        class_names=names[: case.la.n_outputs],
        out=out,
        n_bootstrap=20,
    )
    return out


def opened(browser, path, size, scheme):
    """Open the page. Return it, and all that it should not do: errors, messages, requests beyond the file."""
    width, height = SIZES[size]
    context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
    tab, wrong = context.new_page(), []
    tab.on("console", lambda message: wrong.append(message.text))
    tab.on("pageerror", lambda error: wrong.append(str(error)))
    tab.on("dialog", lambda dialog: wrong.append(dialog.message))
    tab.on("request", lambda r: None if r.url == path.as_uri() or r.url.startswith("data:") else wrong.append(r.url))
    tab.goto(path.as_uri())
    return tab, wrong


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", SIZES)
def test_the_page_is_whole_at_every_size_and_in_both_schemes(browser, page, size, scheme):
    tab, wrong = opened(browser, page, size, scheme)
    assert wrong == []
    assert tab.title() == "How far can this network be trusted?"
    wide, height = tab.evaluate("[document.documentElement.scrollWidth, document.documentElement.scrollHeight]")
    assert wide <= SIZES[size][0]
    assert height > 2000
    # Only what scrolls by itself may be wider than the page.
    over = """[...document.querySelectorAll('main *, header *')]
      .filter(e => !e.closest('.scroll, pre, details:not([open])'))
      .filter(e => e.getBoundingClientRect().right > innerWidth + 1).map(e => e.outerHTML.slice(0, 90))"""
    assert tab.evaluate(over) == []
    ground = tab.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, ground.strip("rgb()").split(","))) > 380) == (scheme == "light")
    tab.context.close()


@pytest.mark.parametrize("size", SIZES)
def test_no_figure_is_empty_and_no_label_is_cut_or_covered(browser, page, size):
    tab, _ = opened(browser, page, size, "light")
    figures = tab.evaluate(
        """[...document.querySelectorAll('figure')].map(f => {
          const svg = f.querySelector('svg[role=img]'), box = svg.getBoundingClientRect();
          const texts = [...svg.querySelectorAll('text')].map(t => [t.textContent, t.getBoundingClientRect()]);
          const cut = texts.filter(([_, b]) => b.left < box.left - 1 || b.right > box.right + 1 || b.top < box.top - 1
            || b.bottom > box.bottom + 1).map(([t]) => t);
          const covered = texts.flatMap(([t, a], i) => texts.slice(i + 1).filter(([_, b]) =>
            Math.min(a.right, b.right) - Math.max(a.left, b.left) > 1 &&
            Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 3).map(([u]) => t + ' / ' + u));
          const size = Math.min(...[...svg.querySelectorAll('text.t')].map(t => parseFloat(getComputedStyle(t).fontSize)
            * box.width / svg.viewBox.baseVal.width));
          return {id: f.id, width: box.width, height: box.height, cut, covered, size,
            marks: svg.querySelectorAll('.line, .dot, .bar').length,
            caption: f.querySelector('figcaption').textContent};
        })"""
    )
    assert len(figures) >= 6
    for figure in figures:
        assert figure["width"] > 250, figure
        assert figure["height"] > 150, figure
        assert figure["marks"] > 0, figure
        assert figure["cut"] == [], figure
        assert figure["covered"] == [], figure
        assert figure["size"] > 9.5, figure
        assert figure["caption"].count(". ") == 0, figure
    tab.context.close()


def test_the_numbers_of_all_tables_are_those_of_the_json(browser, page):
    data = json.loads(page.with_suffix(".json").read_text())
    tab, _ = opened(browser, page, "desktop", "light")
    cells = tab.evaluate("[...document.querySelectorAll('[data-path]')].map(e => [e.dataset.path, e.textContent])")
    assert len(cells) > 60
    for path, text in cells:
        value = data
        for key in json.loads(path):
            value = value[key]
        if value is None:
            assert text == "–"
            continue
        shown = text.replace("−", "-").removesuffix(" %")
        number = float(shown) / (100 if text.endswith("%") else 1)
        digits = len(shown.partition(".")[2]) + (2 if text.endswith("%") else 0)
        assert number == pytest.approx(value, abs=0.5001 * 10.0**-digits, rel=1e-3), path
    shown = tab.evaluate("[...document.querySelectorAll('.findings li p:first-child')].map(e => e.textContent)")
    assert shown == [verdict["text"] for verdict in data["verdicts"]]
    tab.context.close()


def test_pictures_are_drawn(browser, tmp_path):
    import torch
    from torch import nn

    torch.manual_seed(0)
    x, y = torch.rand(40, 1, 9, 9), torch.arange(40) % 2
    la = laplace.Laplace(nn.Sequential(nn.Flatten(), nn.Linear(81, 2)), "classification").fit([(x, y)])
    out = tmp_path / "page.html"
    laplace.report(la, [(x, y)], ood={"bright": x + 3}, out=out, n_bootstrap=20)
    tab, wrong = opened(browser, out, "phone", "dark")
    sizes = tab.evaluate("[...document.images].map(i => [i.complete, i.naturalWidth])")
    assert len(sizes) >= 12
    assert all(size == [True, 9] for size in sizes)
    assert wrong == []
    tab.context.close()
