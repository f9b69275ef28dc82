"""Covariances of outputs are symmetric, whatever rounding does."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from laplace import Laplace


@pytest.mark.parametrize("structure", ["full", "lowrank", "block", "inf", "kron"])
def test_covariances_in_float32_are_symmetric_and_make_distributions(structure):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 12), nn.Tanh(), nn.Linear(12, 3))
    x = torch.randn(80, 4)
    la = Laplace(model, "regression", "all", structure, prior_precision=1e-2).fit([(x, torch.randn(80, 3))])
    covariance, joint = la(x)[1], la(x[:5], joint=True)[1]
    assert torch.equal(covariance, covariance.mT)
    assert torch.equal(joint, joint.mT)
    assert la.predict(x, progress_bar=False).distribution.batch_shape == (80,)
    la.optimize_prior_precision(method="gridsearch", val_loader=[(x, torch.randn(80, 3))], grid_size=5)
