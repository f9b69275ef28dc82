"""A link of one's own for classes: softmax of outputs that are shrunk by their mean variance."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from laplace import Categorical, Laplace
from laplace.errors import OptionError
from laplace.predictive import Link


def tempered(f, variance):  # (N, C), (N, C) -> (N, C)
    return (f / (1 + variance.mean(-1, keepdim=True)).sqrt()).softmax(-1)


class Mine(Categorical):
    links = {**Categorical.links, "tempered": Link.of_variances(tempered)}  # noqa: RUF012


def test_a_link_predicts_tunes_saves_and_loads(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).double()
    x, y = torch.randn(20, 3).double(), torch.randint(2, (20,))
    la = Laplace(model, Mine(), "all", "diag").fit([(x, y)])
    usual = Laplace(model, "classification", "all", "diag").fit([(x, y)])
    assert "Mine" in repr(la)
    assert len(la.coverage()) == 4
    variance = torch.stack([la.predict(x).outputs.variance])[0]
    torch.testing.assert_close(la(x, link_approx="tempered"), tempered(model(x).detach(), variance))
    link = Link.of_variances(tempered)
    assert torch.equal(usual(x, link_approx=link), la(x, link_approx="tempered"))
    assert torch.equal(usual.predict(x, link_approx=link).mean, la(x, link_approx="tempered"))
    named = la.tune(method="validation", val_loader=[(x, y)], link_approx="tempered")
    assert usual.tune(method="validation", val_loader=[(x, y)], link_approx=link).score == named.score
    la.save(tmp_path / "mine")
    assert torch.equal(Laplace.load(tmp_path / "mine", model, likelihood=Mine())(x), la(x))
    with pytest.raises(OptionError, match=r"link_approx=Link\(...\) is for"):
        Laplace(model, "regression").fit([(x, model(x).detach())])(x, link_approx=link)
