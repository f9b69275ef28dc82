"""What does not fit a likelihood is refused with what came and what to write instead."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from laplace import Laplace, Ordinal, from_log_prob
from laplace.errors import InputError, OptionError, UnsupportedError
from laplace.likelihoods import Categorical, Gaussian
from laplace.tuning.lula import with_uncertainty_units

X = torch.randn(4, 3)
LONG = torch.tensor([0, 1, 1, 0])


def fitted(likelihood, outputs, y, *further, x=X, **options):
    return Laplace(nn.Linear(3, outputs), likelihood, **options).fit([(x, y, *further)])


OUTPUTS = [
    ("binary", 2, LONG, r"'binary' needs one output; .*\(4, 2\).*'classification'.*'multilabel'"),
    ("classification", 1, LONG, r"\(4, 1\).*likelihood='binary'"),
    ("heteroscedastic", 3, torch.randn(4, 1), r"even number of outputs.*\(4, 3\).*2 \* C"),
    (Ordinal(3), 2, LONG, r"'ordinal' needs one output.*\(4, 2\).*'classification'"),
    (Gaussian([1.0, 2.0]), 3, torch.randn(4, 3), r"2 values for 3 outputs"),
    (Categorical(class_weights=[1, 2]), 3, LONG, r"class_weights has 2 values for 3 classes"),
]


@pytest.mark.parametrize(("likelihood", "outputs", "y", "message"), OUTPUTS)
def test_outputs_that_do_not_fit(likelihood, outputs, y, message):
    with pytest.raises(InputError, match=message):
        fitted(likelihood, outputs, y)


LABELS = [
    ("binary", 1, torch.tensor([0, 1, 2, 0]), r"lie in \[0, 2\]; 0 and 1 are needed.*'classification'"),
    ("binary", 1, torch.zeros(4, 2), r"labels have shape \(4, 2\), the outputs \(4, 1\)"),
    ("multilabel", 2, LONG, r"labels have shape \(4,\), the outputs \(4, 2\)"),
    ("multilabel", 2, torch.full((4, 2), torch.nan), r"NaN"),
    ("poisson", 1, torch.tensor([0.0, 1.5, 2, 3]), r"counts are needed.*'regression'"),
    ("poisson", 1, torch.tensor([0, -1, 2, 3]), r"lie in \[-1, 3\]"),
    ("heteroscedastic", 2, torch.randn(4, 2), r"labels \(4, 1\) are needed"),
    (Ordinal(3), 1, torch.tensor([0, 1, 3, 0]), r"lie in \[0, 3\]; 2 cut points need labels in \[0, 2\]"),
    (Ordinal(3), 1, torch.randn(4), r"dtype torch.float32; integers are needed"),
    ("classification", 2, torch.tensor([0, -100, 1, 0]), r"ignore_index"),
    ("given_noise", 1, torch.randn(4, 1), r"needs the noise of every example"),
    (from_log_prob(lambda f, y: (f - y).sum()), 1, torch.randn(4, 1), r"returned \(\) for outputs \(4, 1\)"),
    (from_log_prob(lambda f, y: (y - 9).log().sum(-1)), 1, torch.zeros(4, 1), r"NaN or infinite"),
]


@pytest.mark.parametrize(("likelihood", "outputs", "y", "message"), LABELS)
def test_labels_that_do_not_fit(likelihood, outputs, y, message):
    with pytest.raises(InputError, match=f"batch 0: .*{message}"):
        fitted(likelihood, outputs, y)


def test_noise_that_does_not_fit():
    y = torch.randn(4, 1)
    for noise, message in ((torch.ones(3), r"\(4,\) or \(4, 1\)"), (torch.tensor([1.0, 0, 1, 1]), "not positive")):
        with pytest.raises(InputError, match=message):
            fitted("given_noise", 1, y, noise)
    with pytest.raises(OptionError, match="must be one number here"):
        fitted("given_noise", 2, y, sigma_noise=torch.tensor([1.0, 2.0]))


WEIGHTS = [
    (torch.tensor([1.0, -1, 1, 1]), "negative, NaN or infinite"),
    (torch.tensor([1.0, torch.nan, 1, 1]), "negative, NaN or infinite"),
    (torch.ones(3), r"shape \(3,\); one per example, \(4,\)"),
    (torch.ones(4, 2), r"several inputs go into a tuple"),
    (torch.zeros(4), "none of the 4 examples counts"),
]


@pytest.mark.parametrize(("weights", "message"), WEIGHTS)
def test_weights_that_do_not_fit(weights, message):
    with pytest.raises(InputError, match=message):
        fitted("classification", 2, LONG, weights)


def test_weights_must_be_a_tensor_and_batches_have_a_form():
    with pytest.raises(InputError, match="the weights of batch 0 are a str"):
        fitted("classification", 2, LONG, "heavy")
    with pytest.raises(InputError, match=r"of length 4. A batch is a pair \(x, y\), or \(x, y, weights\)"):
        fitted("classification", 2, LONG, torch.ones(4), torch.ones(4))


def test_pairs_that_are_none():
    with pytest.raises(InputError, match=r"\(B, 2, ...\): torch.stack"):
        fitted("reward_modeling", 1, LONG)
    pairs = torch.randn(4, 2, 3)
    with pytest.raises(InputError, match=r"one reward per input; the network gave \(4, 2\)"):
        fitted("reward_modeling", 2, LONG, x=pairs)
    with pytest.raises(InputError, match=r"lie in \[0, 2\]; preferences need labels in \[0, 1\]"):
        fitted("reward_modeling", 1, LONG * 2, x=pairs)
    with pytest.raises(UnsupportedError, match="single inputs"):
        with_uncertainty_units(nn.Linear(3, 1), "reward_modeling", [(pairs, LONG)], [X])
    la = fitted("reward_modeling", 1, LONG, x=pairs)
    with pytest.raises(UnsupportedError, match="without it"):
        la.tune(method="validation", val_loader=[(pairs, LONG)], ood_loader=[X])


def test_options_out_of_range():
    for make, message in (
        (lambda: Ordinal(1), r"Ordinal\(4\)"),
        (lambda: Ordinal([1.0, 0.0]), "ascending"),
        (lambda: Laplace(nn.Linear(3, 1), "ordinal"), "ascending cut points"),
        (lambda: Categorical(label_smoothing=1.0), r"\[0, 1\)"),
        (lambda: Categorical(class_weights=[1.0, -1.0]), "none negative"),
        (lambda: Categorical(ignore_index=1.5), "whole number"),
        (lambda: Gaussian([1.0, 0.0]), "positive number per output"),
        (lambda: from_log_prob(3), "a function is needed"),
        (lambda: Laplace(nn.Linear(3, 1), "poisson", sigma_noise=0.5), "no observation noise"),
        (lambda: Laplace(nn.Linear(3, 1), "logistic"), "'binary', 'multilabel', 'poisson'"),
    ):
        with pytest.raises(OptionError, match=message):
            make()


def test_links_that_a_likelihood_does_not_have():
    la = fitted("poisson", 1, torch.ones(4))
    with pytest.raises(OptionError, match="'exact', 'mc'"):
        la(X, link_approx="bridge")
    with pytest.raises(UnsupportedError, match="entropy"):
        la.tune(method="validation", val_loader=[(X, torch.ones(4))], ood_loader=[X])
    with pytest.raises(OptionError, match="has no noise to tune"):
        la.tune("sigma_noise")


def test_the_hessian_of_a_last_layer_is_refused_where_it_is_not_the_fisher():
    y = torch.randn(4, 1)
    with pytest.raises(UnsupportedError, match="depends on the labels"):
        Laplace(nn.Linear(3, 2), "heteroscedastic", curvature="hessian")
    la = Laplace(nn.Linear(3, 2), "heteroscedastic", "all", "full", curvature="hessian").fit([(X, y)])
    assert la.H.isfinite().all()


def test_a_vector_of_noise_that_requires_grad_is_refused():
    with pytest.raises(OptionError, match="per_output"):
        Laplace(nn.Linear(3, 2), "regression", sigma_noise=torch.ones(2, requires_grad=True))
