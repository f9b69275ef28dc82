"""A prior of one's own: fitted, tuned, printed, saved and loaded."""

from __future__ import annotations

import math

import torch
from torch import nn

from laplace import Laplace
from laplace.priors import Independent, from_log_density


class Cauchy(Independent):
    name = "cauchy"

    def __init__(self, scale=1.0, mean=0.0):
        super().__init__({"scale": scale}, mean)

    def log_each(self, u, scale):
        return -(math.pi * scale * (1 + (u / scale) ** 2)).log()

    def bend_each(self, u, scale):
        return 2 * (scale**2 - u**2) / (scale**2 + u**2) ** 2


def test_a_prior_fits_tunes_prints_saves_and_loads(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).double()
    x, y = torch.randn(31, 3).double(), torch.arange(31) % 2
    la = Laplace(model, "classification", "all", "full", prior=Cauchy(2.0)).fit([(x[:10], y[:10]), (x[10:], y[10:])])
    same = from_log_density(lambda theta: -(2 * math.pi * (1 + (theta / 2) ** 2)).log().sum())
    other = Laplace(model, "classification", "all", "full", prior=same).fit([(x, y)])
    torch.testing.assert_close(la.log_marginal_likelihood(), other.log_marginal_likelihood())
    torch.testing.assert_close(la.posterior_precision, other.posterior_precision)
    assert la.tune(method="evidence").score > other.log_marginal_likelihood()
    assert "Cauchy(scale=" in repr(la)
    assert len(la.coverage()) == 4
    la.save(tmp_path / "mine")
    assert torch.equal(Laplace.load(tmp_path / "mine", model, prior=Cauchy())(x), la(x))
