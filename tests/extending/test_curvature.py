"""A curvature estimator of one's own: fitted, tuned, printed, and kept by `state_dict`."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from laplace import Laplace
from laplace.curvature import Estimator, OutputCurvature, Sketch
from laplace.errors import CheckpointError, OptionError


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


def test_a_file_with_an_estimator_loads_with_it(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).double()
    x, y = torch.randn(30, 3).double(), torch.arange(30) % 2
    la = Laplace(model, "classification", "all", "diag", curvature=Halved()).fit([(x, y)])
    la.save(tmp_path / "mine")
    again = Laplace.load(tmp_path / "mine", model, curvature=Halved())
    assert torch.equal(again(x), la(x))
    with pytest.raises(CheckpointError, match=r"needs your own curvature, 'halved'.*curvature="):
        Laplace.load(tmp_path / "mine", model)
    with pytest.raises(CheckpointError, match="has the curvature 'halved' of 1 vectors; curvature= is 'sketch' of 4"):
        Laplace.load(tmp_path / "mine", model, curvature=Sketch(4))
    with pytest.raises(OptionError, match="must be the estimator itself"):
        Laplace.load(tmp_path / "mine", model, curvature="halved")
