"""The report compares Laplace with rivals as it compares it with another Laplace."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import laplace
from laplace import Laplace
from laplace.rivals import SWAG, Ensemble, MCDropout, Mixture

X = torch.randn(60, 3, generator=torch.Generator().manual_seed(0)).double()
Y = {
    "classification": torch.arange(60) % 3,
    "regression": X[:, :1].sin(),
    "poisson": (torch.arange(60) % 4).double()[:, None],
}


def network(outputs: int, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Dropout(0.2), nn.Linear(6, outputs)).double().eval()


@pytest.mark.parametrize("likelihood", list(Y))
def test_rivals_are_sources_of_a_report(likelihood):
    y = Y[likelihood]
    models = [network(3 if likelihood == "classification" else 1, seed) for seed in range(2)]
    members = [Laplace(model, likelihood).fit([(X, y)]) for model in models]
    sources = {
        "ensemble": Ensemble(models, likelihood),
        "mixture": Mixture(members),
        "dropout": MCDropout(models[0], likelihood, 5),
        "swag": SWAG(models[0], likelihood, n_samples=3).run([(X, y)], 3, lr=1e-3).draw(),
    }
    report = laplace.report(members[0], (X, y), out=None, sources=sources, n_bootstrap=20)
    for name, source in sources.items():
        prediction = source.predict(X)
        p = prediction.mean if source.likelihood.links else None
        nll = -source.likelihood.log_predictive(prediction.outputs, p, y, source.noise_level).mean()
        assert report.score(name, "nll") == pytest.approx(float(nll), rel=1e-6)
