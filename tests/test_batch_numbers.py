"""Errors on data say which batch of the loader it was, wherever a loader is read."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from laplace import Laplace, marglik_training
from laplace.errors import InputError, ModelError, NumericalError
from laplace.tuning import with_uncertainty_units
from laplace.utils import LargestVarianceSWAGSubnetMask
from networks import mlp

SUBSETS = ["last_layer", "all"]
BAD = {  # what is wrong with a batch: its inputs, and the error
    "width": (torch.randn(4, 9).double(), ModelError, "the network failed on a tensor of shape"),
    "nan": (torch.full((4, 4), float("nan")).double(), InputError, "outputs hold NaN"),
}


def good(n: int = 4):
    return torch.randn(n, 4, generator=torch.Generator().manual_seed(0)).double(), torch.arange(n) % 3


def made(subset: str = "last_layer") -> Laplace:
    torch.manual_seed(0)
    return Laplace(mlp(3).double(), "classification", subset).fit([good()])


@pytest.mark.parametrize("pred_type", ["glm", "nn"])
@pytest.mark.parametrize("subset", SUBSETS)
@pytest.mark.parametrize("bad", BAD)
def test_predict_names_the_batch_of_a_loader(bad, subset, pred_type):
    x, error, said = BAD[bad]
    la = made(subset)
    with pytest.raises(error, match=rf"^batch 2: .*{said}"):
        la.predict([good(), good(3), (x, good()[1])], pred_type)
    with pytest.raises(error, match=rf"^{'the' if bad == 'nan' else said}"):  # a tensor is no batch of a loader
        la.predict(x, pred_type)


def test_predict_names_the_batch_of_what_is_no_input():
    with pytest.raises(ModelError, match=r"^batch 1: the network failed on a builtins\.str"):
        made().predict([good()[0], "oops"])


@pytest.mark.parametrize("subset", SUBSETS)
@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("place", [0, 1])
def test_fit_names_the_batch_also_where_it_is_the_first(place, bad, subset):
    x, error, said = BAD[bad]
    batches = [good(), good()]
    batches[place] = (x, good()[1])
    with pytest.raises(error, match=rf"^batch {place}: .*{said}"):
        made(subset).fit(batches)


def test_errors_on_a_network_that_any_batch_would_raise_name_none():
    with pytest.raises(ModelError, match=r"^(?!batch)"):
        Laplace(nn.Sequential(nn.Linear(4, 3), nn.Softmax(-1)).double(), "classification").fit([good()])


@pytest.mark.parametrize("subset", SUBSETS)
@pytest.mark.parametrize("bad", BAD)
def test_tuning_names_the_batch_of_both_loaders(bad, subset):
    x, error, said = BAD[bad]
    la, labels = made(subset), good()[1]
    with pytest.raises(error, match=rf"^validation batch 1: .*{said}"):
        la.tune(method="validation", val_loader=[good(), (x, labels)])
    with pytest.raises(error, match=rf"^out-of-distribution batch 1: .*{said}"):
        la.tune(method="validation", val_loader=[good()], ood_loader=[good()[0], x])
    with pytest.raises(error, match=rf"^ood_loader: .*{said}"):
        la.tune(method="validation", val_loader=[good()], ood_loader=x)


@pytest.mark.parametrize("bad", BAD)
def test_online_training_names_epoch_and_batch(bad):
    x, error, said = BAD[bad]
    with pytest.raises(error, match=rf"^epoch 1, batch 1: .*{said}"):
        marglik_training(mlp(3).double(), [good(), (x, good()[1])], n_epochs=1)


def test_uncertainty_units_and_selectors_name_the_batch():
    x, error, said = BAD["width"]
    model = mlp(3).double()
    for pair, where in (([good(), (x,)], [good()]), "training"), (([good()], [good(), (x,)]), "out-of-distribution"):
        with pytest.raises(error, match=rf"^{where} batch 1: .*{said}"):
            with_uncertainty_units(model, "classification", *pair, units=2, steps=1)
    with pytest.raises((InputError, ModelError), match=r"^batch 1: "):
        LargestVarianceSWAGSubnetMask(model, 3, swag_n_snapshots=2).select([good(), (good()[0], torch.arange(4))])


def test_variances_that_overflow_name_the_batch():
    la = Laplace(nn.Linear(4, 3), "regression", hessian_structure="diag")
    la.fit([(torch.randn(4, 4), torch.randn(4, 3))])
    with pytest.raises(NumericalError, match=r"^batch 1: the variance of the outputs is NaN or infinite at 1 inputs"):
        la.predict([torch.randn(2, 4), torch.tensor([[1e30, 0.0, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0]])])
