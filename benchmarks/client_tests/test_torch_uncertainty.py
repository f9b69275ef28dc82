"""torch-uncertainty's wrapper of this library fits, tunes and predicts."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

wrapped = pytest.importorskip("torch_uncertainty.post_processing.laplace")


@pytest.mark.parametrize(
    ("task", "subset", "structure", "pred_type"),
    list(product(["classification", "regression"], ["last_layer", "all"], ["kron", "diag", "full"], ["glm", "nn"])),
)
def test_fit_and_forward(task, subset, structure, pred_type):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))
    y = torch.randint(3, (20,)) if task == "classification" else torch.randn(20, 3)
    loader = DataLoader(TensorDataset(torch.randn(20, 4), y), batch_size=6)
    link = "mc" if pred_type == "nn" else "probit"
    la = wrapped.LaplaceApprox(task, model, subset, structure, pred_type=pred_type, link_approx=link)
    la.fit(loader)
    out = la(torch.randn(5, 4))
    assert out.shape == (5, 3)
    assert out.isfinite().all()
    if task == "classification":
        torch.testing.assert_close(out.sum(-1), torch.ones(5))


@pytest.mark.parametrize("link", ["probit", "mc", "bridge", "bridge_norm"])
def test_links(link):
    torch.manual_seed(0)
    la = wrapped.LaplaceApprox("classification", link_approx=link, optimize_prior_precision=False)
    la.set_model(nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)))
    la.fit(DataLoader(TensorDataset(torch.randn(20, 4), torch.randint(3, (20,))), batch_size=6))
    assert la(torch.randn(5, 4)).shape == (5, 3)
