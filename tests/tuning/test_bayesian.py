"""Bayesian optimisation of one precision per tensor: no worse than one for all, and reproducible."""

from __future__ import annotations

import sys

import pytest
import torch

from laplace import Laplace
from networks import split_task

pytestmark = pytest.mark.filterwarnings("ignore::laplace.errors.BoundaryWarning")


def problem():
    model, training, validation = split_task("classification", 1)
    return Laplace(model, "classification", "all").fit(training), validation


def test_without_botorch_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "botorch.models", None)
    la, validation = problem()
    with pytest.raises(ImportError, match=r"pip install 'laplace-redux\[botorch\]'"):
        la.tune(method="bayesian", val_loader=validation)
    assert float(la.prior_precision) == 1


@pytest.mark.slow
def test_it_beats_one_precision_for_all_and_repeats_itself():
    pytest.importorskip("botorch")
    la, validation = problem()
    scalar = la.tune(method="validation", val_loader=validation)
    state = torch.random.get_rng_state()
    found = [la.tune(method="bayesian", val_loader=validation, evaluations=12, grid_size=9) for _ in range(2)]
    assert torch.equal(state, torch.random.get_rng_state())
    assert found[0].score == found[1].score
    assert found[0].score < scalar.score
    assert len(la.prior_precision) == 4
    assert torch.equal(la.prior_precision, found[1].prior_precision)
    assert found[0].factorisations == 9 + 8 + 12
