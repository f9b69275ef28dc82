"""A curvature estimator of one's own: fitted, tuned, printed, and kept by `state_dict`."""

from __future__ import annotations

import torch
from torch import nn

from laplace import Laplace
from laplace.curvature import Estimator, OutputCurvature


class Halved(Estimator):
    """The empirical Fisher with half of each score."""

    name = "halved"

    def __call__(self, likelihood, f, y, generator):
        return OutputCurvature(vectors=likelihood.score(f, y).unsqueeze(0) / 2, together=True)


def test_an_estimator_fits_tunes_prints_and_is_kept_by_its_state():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).double()
    x, y = torch.randn(30, 3).double(), torch.arange(30) % 2
    la = Laplace(model, "classification", "all", "diag", curvature=Halved()).fit([(x, y)])
    usual = Laplace(model, "classification", "all", "diag", curvature="ef").fit([(x, y)])
    torch.testing.assert_close(la.H * 4, usual.H)
    assert la.tune().converged
    assert "curvature halved" in repr(la)
    again = Laplace(model, "classification", "all", "diag", curvature=Halved())
    again.load_state_dict(la.state_dict())
    assert torch.equal(again(x), la(x))
