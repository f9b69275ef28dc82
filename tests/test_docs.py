"""Every Python block of README and docs runs, in order, a page at a time; every page is in the navigation."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))]


def blocks(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.filterwarnings("error::laplace.errors.LaplaceWarning")
@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p)], ids=lambda p: str(p.relative_to(ROOT)))
def test_every_code_block_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    for number, source in enumerate(blocks(page)):
        exec(compile(source, f"{page.name}, block {number}", "exec"), names)  # noqa: S102


def test_the_readme_has_code_and_its_figures_exist():
    assert len(blocks(PAGES[0])) >= 3
    for page in PAGES:
        for target in re.findall(r"\]\(((?!http)[^)#]+)\)", page.read_text()):
            assert (page.parent / target).exists(), target


def test_no_python_is_left_out_of_the_blocks_that_run():
    for page in PAGES:
        if page.parent.name == "examples":  # what these show stands in their scripts, which run
            continue
        fences = re.findall(r"^ *```(\S*)", page.read_text(), re.MULTILINE)
        assert sum(fence.startswith("py") for fence in fences) == len(blocks(page)), page
        assert set(fences[1::2]) <= {""}, f"{page}: a block that does not end"


def test_every_page_is_in_the_navigation():
    listed = re.findall(r"^ +- (?:.*: )?(\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    pages = [str(page.relative_to(ROOT / "docs")) for page in PAGES[1:]]
    assert sorted(listed) == sorted(pages)


def test_the_papers_listings_are_verbatim_and_run():
    names: dict[str, object] = {}
    for source in blocks(PAGES[0]):
        exec(source, names)  # noqa: S102
    assert names["prior_prec"].grad.isfinite()
    assert names["obs_noise"].grad.isfinite()
    text = "\n".join(blocks(PAGES[0]))
    for listing in LISTINGS:
        assert listing in text


# As printed in the paper, trailing spaces included.
LISTINGS = [
    """# Load pre-trained model
model = load_map_model()

# Define and fit LA variant with custom settings
la = Laplace(model, 'classification',
             subset_of_weights='all', 
             hessian_structure='diag')
la.fit(train_loader)
la.optimize_prior_precision(method='CV',
                            val_loader=val_loader)

# Make prediction with custom predictive approx.
pred = la(x, pred_type='glm', link_approx='probit')
""",  # noqa: W291
    """# Load un- or pre-trained model
model = load_map_model()  

# Fit default, recommended LA variant:
# Last-layer KFAC LA
la = Laplace(model, 'regression')
la.fit(train_loader)

# Differentiate marginal likelihood w.r.t.
# prior precision and observation noise 
ml = la.marglik(prior_precision=prior_prec, 
                sigma_noise=obs_noise)
ml.backward()
""",  # noqa: W291
]
