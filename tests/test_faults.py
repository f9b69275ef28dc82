"""What goes wrong around a posterior: odd networks, changed ones, copies, warnings as errors, empty batches."""

from __future__ import annotations

import copy
import pickle
import warnings

import pytest
import torch
from torch import nn

from laplace import Laplace
from laplace.compat.enums import Likelihood
from laplace.errors import InputError, LaplaceError, ModelError, StaleWarning
from networks import cut, make


class Noisy(nn.Module):
    """Dropout that is never off, or examples that know of each other."""

    def __init__(self, kind):
        super().__init__()
        self.kind, self.body, self.head = kind, nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x):
        h = torch.tanh(self.body(x))
        return self.head(nn.functional.dropout(h, 0.5) if self.kind == "random" else h - h.mean(0))


@pytest.mark.parametrize("subset", ["last_layer", "all"])
@pytest.mark.parametrize("kind", ["random", "mixed"])
def test_outputs_that_change_by_themselves_are_refused(kind, subset):
    torch.manual_seed(0)
    x, y = torch.randn(20, 4), torch.arange(20) % 3
    words = "draws random numbers in eval mode" if kind == "random" else "the others in its batch|examples interact"
    with pytest.raises(ModelError, match=words):
        Laplace(Noisy(kind), "classification", subset).fit([(x, y)])


@pytest.mark.parametrize("how", [copy.copy, copy.deepcopy, lambda la: pickle.loads(pickle.dumps(la))])  # noqa: S301
def test_a_copy_notices_changes_too(how):
    model, x, y = make("mlp", "classification")
    other = how(Laplace(model, "classification").fit(cut(x, y, 6)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        other(x)
    with torch.no_grad():
        other.model[0].weight.add_(1.0)
    with pytest.warns(StaleWarning):
        other(x)
    fresh = how(Laplace(model, "classification").fit(cut(x, y, 6)))
    fresh.model[0].weight.data.add_(1.0)  # before it was ever used
    with pytest.warns(StaleWarning):
        fresh(x)


def test_a_warning_that_is_an_error_is_one_each_time():
    model, x, y = make("mlp", "classification")
    la = Laplace(model, "classification").fit(cut(x, y, 6))
    with torch.no_grad():
        model[0].weight.add_(1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error", StaleWarning)
        for _ in range(2):
            with pytest.raises(StaleWarning):
                la(x)


def test_an_evidence_that_fails_leaves_the_values_before():
    model, x, y = make("mlp", "regression")
    la = Laplace(model.float(), "regression", "all", "inf").fit([(x.float(), y.float())])
    before = la.log_marginal_likelihood(2.0, 0.5)
    for bad in ((1e-44, None), (2.0, 1e-30), (-1.0, 0.3)):
        with pytest.raises(LaplaceError):
            la.log_marginal_likelihood(*bad)
        assert (float(la.prior_precision), float(la.sigma_noise)) == (2.0, 0.5)
    assert la.log_marginal_likelihood() == before


def test_a_last_layer_is_fitted_under_autocast():
    model, x, y = make("mlp", "classification")
    with torch.autocast("cpu", torch.bfloat16):
        la = Laplace(model.float(), "classification").fit([(x.float(), y)])
        assert la(x.float()).isfinite().all()


@pytest.mark.parametrize("subset", ["last_layer", "all"])
def test_no_example_is_one_clear_error_or_no_row(subset):
    model, x, y = make("mlp", "classification")
    la = Laplace(model, "classification", subset).fit(cut(x, y, 6))
    if subset == "last_layer":
        assert la(x[:0]).shape == (0, 3)
    else:
        with pytest.raises(InputError, match="there is no example"):
            la(x[:0])
    with pytest.raises(InputError, match="no example"):
        la.predict(x[:0])
    with pytest.raises(InputError, match=r"batch 0: 5 labels for 0 inputs"):
        la.fit([(x[:0], y[:5])])


def test_a_likelihood_is_equal_to_its_name():
    la = Laplace(nn.Linear(2, 2), "classification")
    assert la.likelihood == "classification"
    assert la.likelihood != "regression"
    assert la.likelihood == Likelihood.CLASSIFICATION
    assert la.likelihood in {la.likelihood}


@pytest.mark.parametrize("subset", ["last_layer", "all"])
def test_a_network_in_data_parallel_predicts_as_it_does_alone(subset):
    model, x, y = make("mlp", "classification")
    for how in ({}, {"pred_type": "nn", "n_samples": 20}):
        alone, wrapped = (
            Laplace(each, "classification", subset).fit(cut(x, y, 6))(
                x, generator=torch.Generator().manual_seed(1), **how
            )
            for each in (model, nn.DataParallel(model))
        )
        torch.testing.assert_close(wrapped, alone)
