"""Attributes of laplace-torch's objects are found on `Laplace`, which does not list them."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import nn

from laplace import Laplace
from laplace.errors import NotFittedError, UnsupportedError

torch.manual_seed(0)
X, Y, CLASSES = torch.randn(8, 3).double(), torch.randn(8, 2).double(), torch.randint(2, (8,))


def network() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()


def test_the_output_gaussian_of_any_likelihood():
    regression = Laplace(network(), "regression", "all", "full").fit([(X, Y)])
    for joint in (False, True):
        for found, expected in zip(
            regression._glm_predictive_distribution(X, joint=joint), regression(X, joint=joint), strict=True
        ):
            torch.testing.assert_close(found, expected)
    classes = Laplace(network(), "classification", "all", "full").fit([(X, CLASSES)])
    f, S = classes._glm_predictive_distribution(X)
    torch.testing.assert_close(S, classes.functional_variance(classes.backend.jacobians(X)[0]))
    f_joint, K = classes._glm_predictive_distribution(X, joint=True)
    torch.testing.assert_close(f_joint, f.flatten())
    torch.testing.assert_close(K, classes.functional_covariance(classes.backend.jacobians(X)[0]))
    mean, variance = classes.predictive_moments(X, diagonal_output=True)
    torch.testing.assert_close(variance, S.diagonal(dim1=1, dim2=2))
    torch.testing.assert_close(mean, network()(X).detach())


def test_a_last_layer():
    la = Laplace(network(), "classification").fit([(X, CLASSES)])
    f, variance = la.functional_variance_fast(X)
    Js, outputs = la.backend.last_layer_jacobians(X)
    torch.testing.assert_close(f, outputs)
    torch.testing.assert_close(variance, la.functional_variance(Js).diagonal(dim1=1, dim2=2))
    assert la.last_layer is la.model[2]
    assert [p.shape for p in la.params] == [(2, 4), (2,)]
    torch.testing.assert_close(la.H_facs.to_matrix(), la.H.to_matrix())


def test_a_subnetwork():
    indices = torch.tensor([1, 4, 9])
    la = Laplace(network(), "regression", "subnetwork", "diag", subnetwork_indices=indices).fit([(X, Y)])
    assert la.n_params_subnet == 3
    torch.testing.assert_close(la.mean_subnet, la.mean)
    samples = la.sample(2)
    whole = la.assemble_full_samples(samples)
    assert whole.shape == (2, 26)
    torch.testing.assert_close(whole[:, indices], samples)
    with pytest.raises(UnsupportedError, match="subnetwork_indices"):
        _ = Laplace(network(), "regression").n_params_subnet


def test_draws_and_calls_under_their_names_there():
    la = Laplace(network(), "classification", "all", "diag").fit([(X, CLASSES)])
    torch.testing.assert_close(la.predictive(X, "glm", "probit", 10), la(X))
    assert la._nn_predictive_samples(X, n_samples=3).shape == (3, 8, 2)
    assert la._nn_functional_samples(X, n_samples=3).shape == (3, 8, 2)
    assert (la._dtype, la._device.type) == (torch.float64, "cpu")
    assert float(la._H_factor) == 1.0
    with pytest.raises(UnsupportedError, match="functional_samples"):
        la._glm_functional_samples(X, X, 3)


def test_they_are_not_listed():
    la = Laplace(network(), "regression")
    assert not {"backend", "params", "predictive", "H_facs"} & set(dir(la))
    assert hasattr(la, "params")
    assert not hasattr(la, "no_such_name")
    with pytest.raises(AttributeError, match="no attribute 'no_such_name'"):
        _ = la.no_such_name


def test_what_a_property_raises_is_not_hidden():
    la = Laplace(network(), "regression")
    assert not hasattr(la, "mean")
    with pytest.raises(NotFittedError, match="fit"):
        _ = la.mean
    with pytest.raises(AttributeError, match="fit"):
        _ = la.posterior_variance
    with pytest.raises(RuntimeError, match="fit"):
        la.log_prob(torch.zeros(26))


def test_copies_work():
    la = Laplace(network(), "regression").fit([(X, Y)])
    torch.testing.assert_close(copy.deepcopy(la)(X)[1], la(X)[1])
    torch.testing.assert_close(copy.copy(la)(X)[1], la(X)[1])


def test_a_loss_has_item():
    la = Laplace(network(), "regression").fit([(X, Y)])
    assert la.loss.item() == pytest.approx(0.5 * float((network()(X) - Y).square().sum().detach()))
    assert isinstance(la.loss, float)


def test_one_number_can_be_indexed_as_a_vector_of_one():
    la = Laplace(network(), "regression", prior_precision=2.0, sigma_noise=0.5)
    for value, number in ((la.prior_precision, 2.0), (la.sigma_noise, 0.5)):
        assert value.shape == ()
        assert float(value[0]) == float(value[-1]) == value.item() == number
        assert type(value * 3) is torch.Tensor
        assert f"{value:.1f}" == str(number)
        assert repr(value) == repr(value.clone())
        copied = io.BytesIO()
        torch.save(value, copied)
        copied.seek(0)
        assert torch.load(copied, weights_only=True) == number
        assert copy.deepcopy(value)[0] == number
        with pytest.raises(IndexError):
            _ = value[1]
    delta = torch.tensor(3.0, requires_grad=True)
    la.prior_precision = delta
    la.prior_precision[0].log().backward()
    assert delta.grad == pytest.approx(1 / 3)
    la.prior_precision = torch.tensor([1.0, 2.0])
    assert la.prior_precision[1] == 2.0


def test_a_missing_argument_is_a_type_error_too():
    with pytest.raises(TypeError, match="needs subnetwork_indices="):
        Laplace(network(), "regression", "subnetwork", "full")
    with pytest.raises(TypeError, match="no option 'priorr'"):
        Laplace(network(), "regression", priorr=1.0)
    with pytest.raises(TypeError, match="missing a required argument"):
        Laplace(network())
