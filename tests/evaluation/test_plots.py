"""What the figures show, read back from the artists that were drawn."""

import sys

import numpy as np
import pytest
import torch

pytest.importorskip("matplotlib")

from laplace.errors import InputError
from laplace.evaluation import (
    coverage_at,
    coverage_diagram,
    gaussian_pit,
    regression_band,
    reliability,
    reliability_diagram,
    risk_coverage,
    risk_coverage_diagram,
)


def bins(seed=0):
    generator = torch.Generator().manual_seed(seed)
    probs = torch.softmax(2 * torch.randn(300, 4, generator=generator), -1)
    return reliability(probs, torch.multinomial(probs, 1, generator=generator).squeeze(-1))


def texts(axes):
    titles = [axes.get_title(loc=loc) for loc in ("left", "center", "right")]
    return titles + [text.get_text() for text in axes.texts]


def test_reliability_diagram_draws_the_bins_of_every_model():
    models = {"MAP": bins(0), "Laplace": bins(1)}
    figure = reliability_diagram(models, title="both")
    panels = figure.axes[::2]
    assert len(panels) == 2
    for panel, (name, expected) in zip(panels, models.items(), strict=True):
        held = expected.count > 0
        drawn = panel.collections[-1].get_offsets()
        np.testing.assert_allclose(drawn[:, 0], expected.confidence[held])
        np.testing.assert_allclose(drawn[:, 1], expected.accuracy[held])
        assert name in texts(panel)
        assert f"ECE {100 * expected.ece:.1f} %" in texts(panel)


def test_histograms_share_one_scale_and_sum_to_one():
    figure = reliability_diagram({"a": bins(0), "b": bins(1)})
    histograms = figure.axes[1::2]
    assert len({axes.get_ylim() for axes in histograms}) == 1
    for axes in histograms:
        assert sum(bar.get_height() for bar in axes.patches) == pytest.approx(1)


def test_regression_band_shows_the_two_deviations_apart():
    x = torch.linspace(-1, 1, 30)
    figure = regression_band(x, x.sin(), x.abs(), 0.3, data=(x[::5], x[::5]), truth=x)
    apart = figure.axes[1]
    epistemic, noise = (line.get_ydata() for line in apart.lines)
    np.testing.assert_allclose(epistemic, x.abs())
    np.testing.assert_allclose(noise, 0.3, rtol=1e-6)
    assert {"epistemic", "noise"} <= set(texts(apart))


def test_regression_band_adds_variances_not_deviations():
    x = torch.linspace(-1, 1, 5)
    figure = regression_band(x, torch.zeros(5), torch.full((5,), 0.3), 0.4)
    heights = [area.get_paths()[0].vertices[:, 1].max() for area in figure.axes[0].collections]
    assert max(heights) == pytest.approx(2 * 0.5)


def test_regression_band_sorts_by_x_and_takes_columns():
    x = torch.tensor([[1.0], [-1.0], [0.0]])
    figure = regression_band(x, 2 * x, torch.ones(3, 1), torch.ones(3))
    line = figure.axes[0].lines[0]
    np.testing.assert_allclose(line.get_xdata(), [-1, 0, 1])
    np.testing.assert_allclose(line.get_ydata(), [-2, 0, 2])


def test_labels_stay_inside_the_panel_and_do_not_overlap():
    x = torch.linspace(0, 1, 20)
    figure = regression_band(x, x, torch.full((20,), 0.01), 0.001, truth=x)
    places = sorted(text.get_position()[1] for text in figure.axes[0].texts)
    assert places[-1] <= 1
    assert min(np.diff(places)) > 0.03


def test_figures_are_written_without_a_display_or_pyplot(tmp_path, monkeypatch):
    monkeypatch.delitem(sys.modules, "matplotlib.pyplot", raising=False)
    reliability_diagram({"MAP": bins()}).savefig(tmp_path / "reliability.png")
    x = torch.linspace(0, 1, 9)
    regression_band(x, x, x, 0.1).savefig(tmp_path / "band.pdf")
    assert (tmp_path / "reliability.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "band.pdf").read_bytes().startswith(b"%PDF")
    assert "matplotlib.pyplot" not in sys.modules


def test_missing_matplotlib_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"pip install 'laplace-redux\[plots\]'"):
        reliability_diagram({"MAP": bins()})


def test_bad_shapes_are_refused():
    x = torch.linspace(0, 1, 9)
    with pytest.raises(InputError, match="no model"):
        reliability_diagram({})
    with pytest.raises(InputError, match="epistemic has 8"):
        regression_band(x, x, x[:8], 0.1)
    with pytest.raises(InputError, match="mean must have shape"):
        regression_band(x, torch.zeros(9, 2), x, 0.1)


def test_many_models_wrap_into_a_grid_without_overlap():
    models = {f"model {i}": bins(i) for i in range(6)}
    figure = reliability_diagram(models, title="six")
    panels = figure.axes[::2]
    assert [next(t for t in texts(panel) if t) for panel in panels] == list(models)
    boxes = [axes.get_position() for axes in figure.axes]
    assert len({round(box.x0, 3) for box in boxes}) == 4
    assert len({round(panel.get_position().y0, 3) for panel in panels}) == 2
    for i, one in enumerate(boxes):
        assert one.x0 > 0
        assert one.x1 < 1
        assert one.y0 > 0
        assert one.y1 < 1
        for other in boxes[:i]:
            assert one.x1 <= other.x0 or other.x1 <= one.x0 or one.y1 <= other.y0 or other.y1 <= one.y0


def user_axes():
    from matplotlib.figure import Figure

    figure = Figure()
    return figure, figure.subplots()


def test_figures_are_drawn_into_axes_of_the_user():
    x, loss = torch.linspace(0, 1, 9), torch.tensor([1.0, 0.0, 0.0])
    curve, pit = risk_coverage(loss, loss), gaussian_pit(x, torch.ones(9), x)
    for draw in (
        lambda ax: reliability_diagram({"MAP": bins()}, ax=ax),
        lambda ax: reliability_diagram(bins(), title="t", ax=ax),
        lambda ax: regression_band(x, x, x, 0.1, title="t", ax=ax),
        lambda ax: risk_coverage_diagram({"MAP": curve}, title="t", ax=ax),
        lambda ax: coverage_diagram({"MAP": pit}, ax=ax),
    ):
        figure, ax = user_axes()
        assert draw(ax) is figure
        assert figure.axes == [ax]
        assert ax.lines
        assert ax.get_xlabel()
        assert ax.get_ylabel()
    figure, ax = user_axes()
    assert reliability_diagram({"MAP": bins()}, ax=ax) is figure
    np.testing.assert_allclose(ax.collections[-1].get_offsets()[:, 1], bins().accuracy[bins().count > 0])
    with pytest.raises(InputError, match="ax= takes one model, got 2"):
        reliability_diagram({"a": bins(), "b": bins()}, ax=ax)


def test_curves_show_what_was_computed():
    loss, doubt = torch.tensor([1.0, 0.0, 0.0, 1.0]), torch.tensor([0.9, 0.1, 0.2, 0.3])
    curve = risk_coverage(loss, doubt)
    axes = risk_coverage_diagram({"a": curve, "b": risk_coverage(loss, -doubt)}, title="t").axes[0]
    np.testing.assert_allclose(axes.lines[0].get_ydata(), curve.risk)
    np.testing.assert_allclose(axes.lines[0].get_xdata(), curve.coverage)
    assert axes.get_legend().get_texts()[0].get_text() == f"a, AURC {curve.aurc:.3g}"
    pit = gaussian_pit(torch.zeros(50), torch.ones(50), torch.linspace(-2, 3, 50))
    line = coverage_diagram({"a": pit}).axes[0].lines[1]
    np.testing.assert_allclose(line.get_ydata(), coverage_at(pit, line.get_xdata()))
    for draw in (risk_coverage_diagram, coverage_diagram):
        for bad in ({}, [curve], None):
            with pytest.raises(InputError, match="no model to draw"):
                draw(bad)
    with pytest.raises(InputError, match="between 0 and 1"):
        coverage_diagram({"a": [2.0]})
