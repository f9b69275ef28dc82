"""A layer that some batches do not call: the posterior does not depend on how the data is cut into batches."""

from __future__ import annotations

import pytest
import torch

from generated import Branch
from laplace import Laplace
from laplace.structures import STRUCTURES

CUTS = {
    "one by one": [[i] for i in range(8)],
    "backwards": [[i] for i in reversed(range(8))],
    "ragged": [[0, 1], [2, 3], [4, 5, 6, 7]],
}


@pytest.mark.parametrize("structure", STRUCTURES)
def test_batches_that_do_not_call_a_layer_leave_nothing_of_it(structure):
    torch.manual_seed(1)
    model, x, y = Branch(2).double(), torch.randn(8, 2).double(), torch.randn(8, 2).double()
    assert (x[:, 0] > 0).any()
    assert (x[:, 0] <= 0).any()
    whole = Laplace(model, "regression", "all", structure).fit([(x, y)])
    for cut in CUTS.values():
        la = Laplace(model, "regression", "all", structure).fit([(x[i], y[i]) for i in cut])
        torch.testing.assert_close(la.log_marginal_likelihood(), whole.log_marginal_likelihood())
        torch.testing.assert_close(la.posterior_variance, whole.posterior_variance)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_a_layer_that_no_batch_calls_keeps_its_prior(structure):
    torch.manual_seed(1)
    model, x, y = Branch(2).double(), -torch.rand(8, 2).double(), torch.randn(8, 2).double()
    la = Laplace(model, "regression", "all", structure, prior_precision=4.0).fit([(x[:4], y[:4]), (x[4:], y[4:])])
    parts = dict(zip(la.posterior.fit.layout.names, la.posterior.fit.layout.split(la.posterior_variance), strict=True))
    for name in ("more.weight", "more.bias"):
        torch.testing.assert_close(parts[name], torch.full_like(parts[name], 0.25))
