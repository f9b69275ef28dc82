"""`la.predict` draws one picture: its mean, interval, entropies and distribution belong to the same Gaussian."""

from __future__ import annotations

import pytest
import torch

from laplace import Laplace
from laplace.linalg.sampling import Draws
from laplace.predictive.entropy import entropy
from networks import cut
from zoo import build

NETWORKS = [("mlp", "last_layer"), ("mlp", "all"), ("conv", "last_layer"), ("residual", "all")]


def posterior(network: str, subset: str, task: str, **options) -> tuple[Laplace, torch.Tensor]:
    model, x, y, _ = build(network, task)
    return Laplace(model, task, subset, "kron", **options).fit(cut(x, y, 4)), x


@pytest.mark.parametrize("precision", [1e-3, 1.0, 100.0])
@pytest.mark.parametrize(("network", "subset"), NETWORKS)
def test_the_mean_of_classes_lies_in_its_interval_as_often_as_the_draws_mean_does(network, subset, precision):
    la, x = posterior(network, subset, "classification", prior_precision=precision)
    found = la.predict(x)
    low, high = found.interval(0.95)
    exact = la.predict(x, link_approx="mc", n_samples=4000, generator=torch.Generator().manual_seed(1)).mean
    inside = (low <= found.mean) & (found.mean <= high)
    assert (inside | ~((low <= exact) & (exact <= high)) | ((found.mean - exact).abs() < 0.01)).all()
    assert inside.double().mean() > 0.9
    assert float((found.mean - exact).abs().max()) < 0.03


@pytest.mark.parametrize("precision", [1e-3, 1.0, 100.0])
@pytest.mark.parametrize(("network", "subset"), NETWORKS)
def test_entropies_are_those_of_the_mean_shown(network, subset, precision):
    la, x = posterior(network, subset, "classification", prior_precision=precision)
    found = la.predict(x, n_samples=2000)
    torch.testing.assert_close(found.total, entropy(found.mean))
    torch.testing.assert_close(found.total, found.distribution.entropy(), rtol=1e-5, atol=1e-6)
    assert (found.epistemic >= 0).all()
    assert (found.aleatoric >= 0).all()
    f = torch.cat(list(found.outputs.draws(_many())), 1)
    expected = entropy(f.softmax(-1)).mean(0)  # of the labels, under draws of the same Gaussian
    torch.testing.assert_close(found.aleatoric, expected, atol=0.03, rtol=0)


@pytest.mark.parametrize("precision", [1e-3, 1.0, 100.0])
@pytest.mark.parametrize("task", ["binary", "multilabel"])
def test_the_mean_of_labels_is_the_integral_and_lies_in_its_interval(task, precision):
    model, x, y, _ = build("mlp", "regression")
    if task == "binary":
        model = torch.nn.Sequential(model, torch.nn.Linear(2, 1)).double()
    labels = (y[:, :1] > 0).double() if task == "binary" else (y > 0).double()
    la = Laplace(model, task, prior_precision=precision).fit([(x, labels)])
    found = la.predict(x)
    low, high = found.interval(0.95)
    assert ((low <= found.mean) & (found.mean <= high)).all()
    f = torch.cat(list(found.outputs.marginals().draws(_many())), 1)
    torch.testing.assert_close(found.mean, f.sigmoid().mean(0), atol=0.02, rtol=0)
    torch.testing.assert_close(found.total, torch.special.entr(found.mean) + torch.special.entr(1 - found.mean))


def test_what_is_scored_and_what_is_shown_are_the_same_and_the_paper_keeps_its_own():
    la, x = posterior("mlp", "last_layer", "classification", prior_precision=0.1)
    assert la.likelihood.default_link == "one_vs_rest"
    torch.testing.assert_close(la.predict(x).mean, la(x, link_approx="one_vs_rest"))
    assert torch.equal(la(x), la(x, link_approx="probit"))
    y = la.predict(x).mean.argmax(-1)
    nll = -la.predict(x).mean.log().gather(1, y[:, None]).mean()
    bounds = {"prior_precision": (0.0999999, 0.1000001)}
    with pytest.warns(Warning, match="edge"):
        tuned = la.tune(method="validation", val_loader=[(x, y)], bounds=bounds, grid_size=2)
    assert tuned.score == pytest.approx(float(nll), abs=1e-5)


def _many() -> Draws:
    return Draws(8000, torch.Generator().manual_seed(2))
