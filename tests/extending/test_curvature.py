"""A curvature estimator of one's own: fitted, tuned, printed, and kept by `state_dict`."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from laplace import Laplace
from laplace.curvature import EF, GGN, Estimator, OutputCurvature, Sketch
from laplace.errors import CheckpointError, LaplaceError, OptionError


class Halved(Estimator):
    """The empirical Fisher with half of each score."""

    name, empirical = "halved", True

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


def test_a_subclass_of_ours_is_not_taken_for_it(tmp_path):
    class Doubled(GGN):
        def __call__(self, likelihood, f, y, generator):
            given = likelihood.fisher(f, y)
            return replace(given, vectors=2**0.5 * given.vectors) if given.vectors is not None else given

    class Twice(Sketch):
        pass

    assert (Doubled.name, Twice.name) == ("Doubled", "Twice")
    model, x, y = nn.Linear(3, 2).double(), torch.randn(30, 3).double(), torch.arange(30) % 2
    la, usual = (Laplace(model, "classification", curvature=c).fit([(x, y)]) for c in (Doubled(), GGN()))
    assert "curvature Doubled" in repr(la)
    with pytest.raises(LaplaceError, match="differ only in their data"):
        la + usual
    with pytest.raises(LaplaceError, match="Make it with the same options"):
        Laplace(model, "classification", curvature=GGN()).load_state_dict(la.state_dict())
    la.save(tmp_path / "mine")
    with pytest.raises(CheckpointError, match="needs your own curvature, 'Doubled'"):
        Laplace.load(tmp_path / "mine", model)
    assert torch.equal(Laplace.load(tmp_path / "mine", model, curvature=Doubled())(x), la(x))


@pytest.mark.parametrize("subset", ["last_layer", "all"])
def test_noise_scales_scores_as_it_scales_those_of_ours(subset, tmp_path):
    class Own(EF):
        pass

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    batches = [(torch.randn(30, 3).double(), torch.randn(30, 2).double())]
    options = {"sigma_noise": 0.3, "prior_precision": 4.0}
    halved, own, ef = (
        Laplace(model, "regression", subset, "full", curvature=c, **options).fit(batches)
        for c in (Halved(), Own(), EF())
    )
    for la, factor in ((halved, 4), (own, 1)):
        la.save(tmp_path / "mine")
        again = Laplace.load(tmp_path / "mine", model, curvature=la.runner.spec.curvature)
        for found in (la, again):
            data = found.posterior_precision - 4 * torch.eye(found.n_params).double()
            torch.testing.assert_close(factor * data, ef.posterior_precision - 4 * torch.eye(ef.n_params).double())
    own.tune("prior_precision", "sigma_noise", method="evidence")
    ef.tune("prior_precision", "sigma_noise", method="evidence")
    torch.testing.assert_close(own.sigma_noise, ef.sigma_noise)
