"""The page as text: it is well formed, escaped, whole in itself, and says nothing about the machine's folders."""

from __future__ import annotations

import json
import re
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from torch import nn

import laplace
from laplace import Laplace
from laplace.evaluation.report import svg
from laplace.evaluation.report.shelves import png, thumbnail

sys.path.insert(0, str(Path(__file__).parent))
from cases import KINDS, given

STYLE = Path(laplace.__file__).parent / "evaluation" / "report" / "page.css"
GALLERY = Path(__file__).parents[3] / "docs" / "gallery"
VOID = {"meta", "img", "br"}
EVIL = "<script>alert('x')</script> & \"q\""


class Tags(HTMLParser):
    """Checks that tags are closed in order, and collects them."""

    def __init__(self):
        super().__init__()
        self.open, self.seen, self.ids = [], [], []

    def handle_starttag(self, tag, attrs):
        self.seen.append((tag, dict(attrs)))
        self.ids += [dict(attrs)["id"]] if "id" in dict(attrs) else []
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.seen.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def parsed(html: str) -> Tags:
    tags = Tags()
    tags.feed(html)
    assert tags.open == []
    assert len(set(tags.ids)) == len(tags.ids)
    return tags


@pytest.mark.parametrize("kind", KINDS)
def test_the_page_is_well_formed_and_asks_for_nothing(kind, tmp_path):
    case = given(kind)
    html = laplace.report(case.la, case.test, ood={"far": case.outside}, out=None, n_bootstrap=20).html
    tags = parsed(html)
    names = {tag for tag, _ in tags.seen}
    assert not names & {"script", "link", "iframe", "object", "form", "base"}
    addresses = [attrs[key] for _, attrs in tags.seen for key in ("src", "href") if key in attrs]
    assert all(address.startswith(("#", "data:image/png;base64,")) for address in addresses)
    assert "url(" not in html
    assert "@import" not in html
    policy = next(attrs["content"] for tag, attrs in tags.seen if "http-equiv" in attrs)
    assert policy.startswith("default-src 'none'")
    links = {attrs["href"][1:] for tag, attrs in tags.seen if tag == "a"}
    assert links <= set(tags.ids)
    assert all(attrs.get("aria-label") or attrs.get("aria-hidden") for tag, attrs in tags.seen if tag == "svg")


def test_texts_of_users_are_escaped():
    case = given("classes")
    report = laplace.report(
        case.la,
        case.test,
        ood={EVIL: case.outside, f"{EVIL} failed": torch.randn(3, 9)},
        shifts={EVIL: [(case.x, case.y)]},
        sources={EVIL: case.la},
        class_names=[EVIL, "b", "c"],
        examples=[EVIL] * len(case.x),
        title=EVIL,
        out=None,
        n_bootstrap=20,
    )
    assert "<script" not in report.html
    assert report.html.count("&lt;script&gt;") > 10
    parsed(report.html)


def test_nothing_tells_where_files_lie(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    case = given("classes")
    laplace.report(case.la, case.test, out=tmp_path / "page.html", n_bootstrap=20)
    for name in ("page.html", "page.json"):
        text = (tmp_path / name).read_text()
        for folder in (tmp_path, Path.home(), Path(laplace.__file__).parents[1], Path(sys.prefix)):
            assert str(folder) not in text or len(folder.parts) < 2
        assert not re.search(r"/(home|root|Users|tmp)/", text)


def test_provenance_names_versions_options_data_and_seed():
    case = given("classes")
    made = laplace.report(case.la, case.test, out=None, n_bootstrap=25, seed=7).data["provenance"]
    assert made["versions"]["torch"] == torch.__version__
    assert made["options"]["likelihood"] == "classification"
    assert made["options"]["fitted to"] == 300
    assert made["data"]["test"]["examples"] == 200
    assert (made["seed"], made["bootstrap"]) == (7, 25)
    other = laplace.report(case.la, [(case.x + 1e-3, case.y)], out=None, n_bootstrap=20).data["provenance"]
    assert other["data"]["test"]["inputs"] != made["data"]["test"]["inputs"]
    assert other["data"]["test"]["labels"] == made["data"]["test"]["labels"]
    assert other["network"] == made["network"]


def test_images_are_shown_as_thumbnails():
    torch.manual_seed(0)
    model = nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(12, 2))
    x, y = torch.rand(12, 3, 80, 60), torch.arange(12) % 2
    la = Laplace(model, "classification").fit([(x, y)])
    html = laplace.report(la, [(x, y)], out=None, n_bootstrap=20).html
    assert html.count("data:image/png;base64,") >= 6


def test_a_thumbnail_is_the_image():
    image = pytest.importorskip("PIL.Image")
    import base64
    import io

    pixels = torch.arange(5 * 7 * 3, dtype=torch.uint8).reshape(5, 7, 3)
    back = image.open(io.BytesIO(png(pixels.numpy())))
    assert back.mode == "RGB"
    assert torch.equal(torch.frombuffer(bytearray(back.tobytes()), dtype=torch.uint8).reshape(5, 7, 3), pixels)
    data = thumbnail(torch.randn(1, 200, 100))
    small = image.open(io.BytesIO(base64.b64decode(data.split(",")[1])))
    assert small.size == (32, 64)
    assert small.getextrema() == (0, 255)


def test_rows_have_the_names_of_their_features_and_functions_may_write_texts():
    case = given("regression")
    html = laplace.report(case.la, case.test, feature_names=["age", "mass"], out=None, n_bootstrap=20).html
    assert "<dt>age</dt>" in html
    assert "<dt>x2</dt>" in html
    html = laplace.report(case.la, case.test, examples=lambda x: f"first {x[0]:.1f}", out=None, n_bootstrap=20).html
    assert "<p>first " in html


@pytest.mark.parametrize("path", sorted(GALLERY.glob("*.html")), ids=lambda path: path.stem)
def test_the_pages_of_the_gallery_are_small_and_whole(path):
    assert path.stat().st_size < 2_000_000
    html = path.read_text()
    tags = parsed(html)
    data = json.loads(path.with_suffix(".json").read_text())
    assert data["headline"]["text"] in html
    assert not re.search(r"/(home|root|Users|tmp|work)/", html)
    assert "script" not in {tag for tag, _ in tags.seen}


def test_there_are_two_pages_in_the_gallery():
    assert {path.stem for path in GALLERY.glob("*.html")} == {"fashion_mnist", "power_plant"}


# ---- the style ------------------------------------------------------------------------------------------------------


def luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    r, g, b = (c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
    return 0.2126 * r + 0.7152 * g + 0.0722 * b


def contrast(a: str, b: str) -> float:
    high, low = sorted([luminance(a), luminance(b)], reverse=True)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_and_lines_stand_out_from_both_backgrounds(scheme):
    blocks = re.findall(r":root\{([^}]*)\}", STYLE.read_text())
    found = dict(re.findall(r"--(\w+):(#[0-9a-f]{3,6})", blocks[0 if scheme == "light" else 1]))
    found = {k: v if len(v) == 7 else "#" + "".join(2 * c for c in v[1:]) for k, v in found.items()}
    for ground in (found["bg"], found["card"]):
        assert contrast(found["ink"], ground) > 7
        for name in ("muted", "bad", "warn", "good", "note"):
            assert contrast(found[name], ground) > 4.5, name
        for i in range(svg.SERIES):
            assert contrast(found[f"s{i}"], ground) > 3, i
    assert len({found[f"s{i}"] for i in range(svg.SERIES)}) == svg.SERIES


@pytest.mark.parametrize("ends", [(0, 1), (-3.2, 17), (1e-7, 3e-7), (0.2, 0.21), (-5e5, 9e5)])
def test_ticks_are_few_round_and_inside(ends):
    found = svg.ticks(*ends)
    assert 2 <= len(found) <= 6
    assert all(ends[0] - 1e-9 <= value <= ends[1] + 1e-9 for value in found)


@pytest.mark.parametrize("ends", [(1e-6, 1), (0.05, 0.6), (3, 4), (1e-30, 1e30)])
def test_ticks_of_logarithmic_axes_are_few_and_inside(ends):
    found = svg.decades(*ends)
    assert 1 <= len(found) <= 8
    assert all(ends[0] * 0.999 <= value <= ends[1] * 1.001 for value in found)
