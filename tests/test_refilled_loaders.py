"""Loaders that refill their tensors, as fast pipelines do: whatever is kept of a batch is a copy."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from exact import assert_close
from laplace import Laplace, marglik_training
from laplace.tuning import with_uncertainty_units
from laplace.utils import LargestVarianceSWAGSubnetMask
from networks import make

pytestmark = [pytest.mark.usefixtures("gathering"), pytest.mark.filterwarnings("ignore::laplace.errors.LaplaceWarning")]
STRUCTURES = ["full", "lowrank", "block", "inf", "ekfac", "kron", "diag", "gp"]
SUBSETS = ["last_layer", "all"]


class Refilling:
    """Yields the same tensors each time, filled anew; between batches, and at the end, they hold rubbish."""

    def __init__(self, parts: tuple[Tensor, ...], size: int, kind: str = "torch") -> None:
        self.parts, self.size, self.kind = parts, size, kind

    def __iter__(self) -> Iterator[Any]:
        buffers = [torch.empty_like(part[: self.size]) for part in self.parts]
        if self.kind == "numpy":
            buffers = [torch.from_numpy(buffer.numpy()) for buffer in buffers]
        named: dict[str, Tensor] = {}
        for start in range(0, len(self.parts[0]), self.size):
            views = []
            for buffer, part in zip(buffers, self.parts, strict=True):
                rows = part[start : start + self.size]
                buffer[: len(rows)] = rows
                views.append(buffer[: len(rows)])
            named.update(zip(("x", "labels", "weights"), views, strict=False))  # the same mapping, too
            yield named if self.kind == "mapping" else tuple(views)
            for buffer in buffers:
                buffer.fill_(float("nan") if buffer.is_floating_point() else 0)


def both(*parts: Tensor, size: int = 8, kind: str = "torch") -> tuple[list[Any], Refilling]:
    """A list of batches, and the same from a loader that refills its tensors."""
    pieces = [part.split(size) for part in parts]
    plain = [*zip(*pieces, strict=True)]
    named = [dict(zip(("x", "labels", "weights"), batch, strict=False)) for batch in plain]
    return named if kind == "mapping" else plain, Refilling(parts, size, kind)


class ByKey(nn.Module):
    """A network whose batches are mappings."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


def data(task: str, network: str = "mlp") -> tuple[nn.Module, Tensor, Tensor, Tensor]:
    model, x, y = make(network, task)
    return model, x, y, torch.rand(len(x), generator=torch.Generator().manual_seed(5)).double() + 0.1


def linear(outputs: int) -> tuple[nn.Module, Tensor]:
    """A network that is its last layer, whose features are the inputs themselves."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Flatten(), nn.Linear(4, outputs)).double(), torch.randn(23, 2, 2).double()


def compare(a: Laplace, b: Laplace, x: Any) -> None:
    assert_close(b.log_marginal_likelihood(), a.log_marginal_likelihood())
    assert_close(b.functional_samples(x, generator=seeded()), a.functional_samples(x, generator=seeded()))


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(3)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("subset", SUBSETS)
@pytest.mark.parametrize("structure", STRUCTURES)
def test_fit_keeps_no_tensor_of_a_batch(structure, subset, weighted):
    model, x, y, weights = data("classification")
    loaders = both(x, y, weights) if weighted else both(x, y)
    fits = [Laplace(model, "classification", subset, structure).fit(loader) for loader in loaders]
    compare(*fits, x)


@pytest.mark.parametrize("kind", ["numpy", "mapping"])
@pytest.mark.parametrize("subset", SUBSETS)
@pytest.mark.parametrize("task", ["classification", "regression"])
def test_neither_do_fits_on_mappings_and_arrays(task, subset, kind):
    model, x, y, weights = data(task)
    fits = [
        Laplace(ByKey(model), task, subset, "kron", dict_key_x="x").fit(loader)
        for loader in both(x, y, weights, kind=kind)
    ]
    compare(*fits, {"x": x} if kind == "mapping" else x)


@pytest.mark.parametrize("curvature", ["ggn", "ef", "mc", "sketch"])
def test_neither_do_estimated_curvatures_of_a_layer_that_reads_the_inputs(curvature):
    (model, x), y = linear(3), torch.arange(23) % 3
    weights = data("classification")[3]
    fits = [
        Laplace(model, "classification", hessian_structure="ekfac", curvature=curvature).fit(loader, generator=seeded())
        for loader in both(x, y, weights)
    ]
    compare(*fits, x)


def test_neither_does_noise_given_with_each_label():
    model, x, y, weights = data("regression")
    noise = (0.5 + weights).unsqueeze(1).expand_as(y).clone()
    fits = [
        Laplace(model, "given_noise", hessian_structure=structure).fit(loader)
        for structure in ("kron", "full")
        for loader in both(x, y, noise, size=4)
    ]
    compare(*fits[:2], x)
    compare(*fits[2:], x)


@pytest.mark.parametrize("subset", SUBSETS)
@pytest.mark.parametrize("structure", STRUCTURES)
def test_validation_keeps_no_tensor_of_a_batch(structure, subset):
    model, x, y, weights = data("classification")
    la = Laplace(model, "classification", subset, structure).fit([(x, y)])
    x, y = x + 0.3, y.roll(4)
    far, far_too = both(x + 9)
    found = [
        copy.copy(la).tune(method="validation", val_loader=val, ood_loader=ood, grid_size=5)
        for val, ood in zip(both(x, y, weights), (far, far_too), strict=True)
    ]
    assert_close(found[1].prior_precision, found[0].prior_precision)
    assert found[1].score == pytest.approx(found[0].score, rel=1e-9)


@pytest.mark.parametrize("structure", ["full", "kron", "gp"])
def test_validation_keeps_no_features_that_are_the_inputs(structure):
    (model, x), y = linear(2), data("regression")[2]
    la = Laplace(model, "regression", hessian_structure=structure).fit([(x, y)])
    found = [copy.copy(la).tune(method="validation", val_loader=val, grid_size=5) for val in both(x + 0.2, y)]
    assert found[1].score == pytest.approx(found[0].score, rel=1e-9)


class Collects:
    """A metric that keeps what it is given until the end, as torchmetrics' curves do."""

    def reset(self) -> None:
        self.seen: list[tuple[Tensor, Tensor]] = []

    def update(self, p: Tensor, y: Tensor) -> None:
        self.seen.append((p, y))

    def compute(self) -> float:
        p, y = (torch.cat(parts) for parts in zip(*self.seen, strict=True))
        return float(nn.functional.nll_loss(p.log(), y))


@pytest.mark.parametrize("subset", SUBSETS)
def test_metrics_may_keep_labels(subset):
    model, x, y, _ = data("classification")
    la = Laplace(model, "classification", subset).fit([(x, y)])
    found = [
        copy.copy(la).tune(method="validation", val_loader=val, loss=Collects(), grid_size=5) for val in both(x, y)
    ]
    assert found[1].score == pytest.approx(found[0].score, rel=1e-9)


@pytest.mark.parametrize("pred_type", ["glm", "nn"])
@pytest.mark.parametrize("subset", SUBSETS)
@pytest.mark.parametrize("structure", ["full", "kron", "gp"])
def test_predict_keeps_no_tensor_of_a_batch(structure, subset, pred_type):
    if structure == "gp" and pred_type == "nn":
        return
    model, x, y, _ = data("regression")
    la = Laplace(model, "regression", subset, structure).fit([(x, y)])
    a, b = (la.predict(loader, pred_type, generator=seeded()) for loader in both(x, y))
    assert_close(b.mean, a.mean)
    assert_close(b.epistemic, a.epistemic)


@pytest.mark.parametrize("subset", SUBSETS)
@pytest.mark.parametrize("structure", STRUCTURES)
def test_online_training_keeps_no_tensor_of_a_batch(structure, subset):
    found = []
    for i in range(2):
        model, x, y, weights = data("regression")
        groups = "scalar" if structure in ("gp", "lowrank") else "layerwise"
        la, _, margliks, losses = marglik_training(
            model, both(x, y, weights)[i], "regression", structure, n_epochs=2, prior_structure=groups,
            subset_of_weights=subset, optimizer_cls=torch.optim.SGD, optimizer_kwargs={"lr": 1e-3},
        )  # fmt: skip
        found.append((torch.tensor(margliks), torch.tensor(losses), la.log_marginal_likelihood()))
    for a, b in zip(*found, strict=True):
        assert_close(b, a)


@pytest.mark.parametrize("network", ["mlp", "wrapped"])
def test_uncertainty_units_keep_no_tensor_of_a_batch(network):
    if network == "mlp":  # a chain, whose units begin at the inputs
        model, x, y, _ = data("regression")
    else:
        (model, x), y = linear(2), data("regression")[2]
    loaders = zip(both(x, y), both(x + 5.0, y), strict=True)
    wider = [with_uncertainty_units(model, "regression", *pair, units=3, steps=3) for pair in loaders]
    for a, b in zip(*(net.parameters() for net in wider), strict=True):
        assert_close(b, a)


def test_points_are_found_again_in_a_refilled_loader(tmp_path):
    model, x, y, _ = data("classification")
    plain, refilled = both(x, y)
    la = Laplace(model, "classification", hessian_structure="gp", n_subset=11).fit(refilled)
    la.save(tmp_path / "gp.safetensors")
    compare(la, Laplace.load(tmp_path / "gp.safetensors", model, data=refilled), x)
    compare(Laplace(model, "classification", hessian_structure="gp", n_subset=11).fit(plain), la, x)


def test_selectors_keep_no_tensor_of_a_batch():
    model, x, y, _ = data("classification")
    chosen = [LargestVarianceSWAGSubnetMask(model, 10, swag_n_snapshots=3).select(loader) for loader in both(x, y)]
    assert torch.equal(*chosen)


def test_a_fit_that_goes_on_after_an_interruption_keeps_none(tmp_path):
    model, x, y, weights = data("classification")
    plain, refilled = both(x, y, weights, size=2)

    class Stops(Refilling):
        def __iter__(self) -> Iterator[Any]:
            for i, batch in enumerate(super().__iter__()):
                if i == 7:
                    raise KeyboardInterrupt
                yield batch

    la, path = Laplace(model, "classification"), tmp_path / "fit.safetensors"
    with pytest.raises(KeyboardInterrupt):
        la.fit(Stops(refilled.parts, 2), checkpoint=path, every=3)
    la.fit(refilled, checkpoint=path, every=3)
    compare(Laplace(model, "classification").fit(plain), la, x)
