"""A tuning method of one's own: random search."""

from __future__ import annotations

import torch
from torch import nn

from laplace import Laplace
from laplace.tuning import Method, register_method


class Random(Method):
    def __init__(self, count=20, seed=0):
        self.count, self.generator = count, torch.Generator().manual_seed(seed)

    def tune(self, problem):
        low, high = problem.box
        draws = torch.rand(self.count, len(low), dtype=low.dtype, generator=self.generator)
        problem.losses([problem.start, *(low + draws * (high - low))])
        return problem.tuned("random")


def test_a_tuning_method_finds_sets_prints_and_saves(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1)).double()
    x, y = torch.randn(30, 3).double(), torch.randn(30, 1).double()
    la = Laplace(model, "regression", "all", "kron").fit([(x[:20], y[:20])])
    tuned = la.tune("prior_precision", "sigma_noise", method=Random(200), bounds={"sigma_noise": (0.1, 10)})
    best = Laplace(model, "regression", "all", "kron").fit([(x[:20], y[:20])])
    gap = best.tune("prior_precision", "sigma_noise", method="evidence").score - float(la.log_marginal_likelihood())
    assert 0 <= gap < 1
    assert tuned.score == float(la.log_marginal_likelihood()) == max(point.score for point in tuned.points)
    assert "Tuned by random: log evidence" in repr(tuned)
    register_method("random", Random)
    assert len(la.tune("temperature", method="random", val_loader=[(x[20:], y[20:])]).points) == 21
    assert la.temperature != 1
    assert f"temperature {la.temperature:.4g}" in repr(la)
    assert len(la.coverage()) == 4
    la.save(tmp_path / "mine")
    assert torch.equal(Laplace.load(tmp_path / "mine", model)(x)[1], la(x)[1])
