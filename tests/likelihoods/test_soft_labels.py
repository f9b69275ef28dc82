"""Labels that are numbers per class mean what they mean to torch's cross_entropy; one output takes labels (N,)."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, one_hot

from exact import assert_close
from laplace import Categorical, Laplace
from laplace.errors import InputError

F64 = torch.float64
C = 3


def made(kind: str) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    x = torch.randn(9, 4, dtype=F64)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, C)).double()
    y = {
        "probabilities": torch.rand(9, C, dtype=F64).softmax(-1),
        "multi-hot": torch.tensor([[1, 1, 0], [0, 1, 0], [0, 0, 0]], dtype=F64).repeat(3, 1),
    }[kind]
    return model, x, y


def parts(x: Tensor, y: Tensor) -> list[tuple[Tensor, Tensor]]:
    return [(x[:4], y[:4]), (x[4:], y[4:])]


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("weights", [None, [1.0, 2.0, 0.5]])
@pytest.mark.parametrize("kind", ["probabilities", "multi-hot"])
def test_loss_and_curvature_are_those_of_cross_entropy(kind, weights, smoothing):
    model, x, y = made(kind)
    likelihood = Categorical(label_smoothing=smoothing, class_weights=weights)
    la = Laplace(model, likelihood, "all", "full").fit(parts(x, y))
    w = None if weights is None else torch.tensor(weights, dtype=F64)

    def loss(f: Tensor, t: Tensor) -> Tensor:
        return cross_entropy(f, t, weight=w, label_smoothing=smoothing, reduction="sum")

    f = model(x).detach()
    assert_close(torch.as_tensor(la.loss), loss(f, y))
    total = torch.zeros_like(la.H)
    for one, t in zip(x, y, strict=True):
        rows = [torch.autograd.grad(out, list(model.parameters()), retain_graph=True) for out in model(one)]
        jac = torch.stack([torch.cat([g.flatten() for g in row]) for row in rows])
        total += jac.T @ torch.func.hessian(lambda f, t=t: loss(f[None], t[None]))(model(one).detach()) @ jac
    assert_close(la.H, total)


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_one_hot_floats_are_the_class_indices(smoothing):
    model, x, _ = made("probabilities")
    index = torch.arange(9) % C
    likelihood = Categorical(label_smoothing=smoothing, class_weights=[1.0, 2.0, 0.5])
    kinds = one_hot(index, C).to(F64), index
    soft, hard = (Laplace(model, likelihood, hessian_structure="full").fit(parts(x, y)) for y in kinds)
    assert_close(soft.log_marginal_likelihood(), hard.log_marginal_likelihood())
    scores = [
        la.tune(method="validation", val_loader=parts(x, y), grid_size=3).score
        for la, y in ((soft, one_hot(index, C).to(F64)), (hard, index))
    ]
    assert scores[0] == pytest.approx(scores[1], rel=1e-12)
    found = [
        str(la.calibrate(parts(x, y), rule="best")) for la, y in ((soft, one_hot(index, C).to(F64)), (hard, index))
    ]
    assert found[0] == found[1]


def test_probabilities_at_positions():
    torch.manual_seed(0)
    model, x = nn.Linear(4, C).double(), torch.randn(5, 6, 4, dtype=F64)
    y = torch.rand(5, 6, C, dtype=F64).softmax(-1)
    la = Laplace(model, "classification", hessian_structure="full").fit([(x, y)])
    flat = Laplace(model, "classification", hessian_structure="full").fit([(x.flatten(0, 1), y.flatten(0, 1))])
    assert_close(la.log_marginal_likelihood(), flat.log_marginal_likelihood())


def test_negative_probabilities_and_whole_multi_hot_labels_are_refused():
    model, x, y = made("probabilities")
    with pytest.raises(InputError, match=r"batch 0: .*class probabilities or multi-hot; the smallest here is -"):
        Laplace(model, "classification").fit([(x, -y)])
    with pytest.raises(InputError, match=r"y\.float\(\) for class probabilities"):
        Laplace(model, "classification").fit([(x, one_hot(torch.arange(9) % C, C))])


def test_one_number_for_one_output():
    torch.manual_seed(0)
    model, x, y = nn.Linear(4, 1).double(), torch.randn(9, 4, dtype=F64), torch.randn(9, dtype=F64)
    flat, column = (Laplace(model, "regression").fit(parts(x, labels)) for labels in (y, y.unsqueeze(1)))
    assert_close(flat.log_marginal_likelihood(), column.log_marginal_likelihood())
    with pytest.raises(InputError, match=r"shape \(4,\), the outputs \(4, 2\); make them equal"):
        Laplace(nn.Linear(4, 2).double(), "regression").fit(parts(x, y))
