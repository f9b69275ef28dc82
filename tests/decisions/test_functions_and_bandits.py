"""Drawn functions are the same in every call; options are chosen by mean, bound or draw."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from laplace import Laplace
from laplace.decisions import choose, draw_functions
from laplace.errors import InputError, ModelError, NotFittedError, OptionError, UnsupportedError

X = torch.linspace(-2, 2, 24, dtype=torch.float64).reshape(12, 2)


def fitted(weights: str = "all", outputs: int = 1, likelihood: str = "regression") -> Laplace:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, outputs)).double()
    y = X.sum(1, keepdim=True).sin()
    return Laplace(model, likelihood, weights, "full", sigma_noise=0.3).fit([(X, y.expand(12, outputs))])


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(0)


@pytest.mark.parametrize("pred_type", ["glm", "nn"])
@pytest.mark.parametrize("weights", ["last_layer", "all"])
def test_functions_do_not_depend_on_how_they_are_called(weights, pred_type):
    la = fitted(weights)
    functions = draw_functions(la, 3, pred_type, seeded())
    whole = functions(X)
    assert whole.shape == (3, 12, 1)
    parts = torch.cat([functions(X[:5]), functions(X[5:])], 1)
    torch.testing.assert_close(parts, whole, atol=1e-12, rtol=1e-12)
    assert not torch.equal(draw_functions(la, 3, pred_type)(X), whole)
    torch.testing.assert_close(draw_functions(la, 3, pred_type, seeded())(X), whole)


def test_nn_functions_are_networks():
    la = fitted()
    functions = draw_functions(la, 2, "nn", seeded())
    weights = la.sample(2, torch.Generator().manual_seed(functions.seed))
    for drawn, w in zip(functions(X), weights, strict=True):
        model = copy.deepcopy(la.model)
        nn.utils.vector_to_parameters(w, model.parameters())
        torch.testing.assert_close(drawn, model(X).detach(), atol=1e-12, rtol=1e-12)


def test_functions_have_gradients_in_x():
    la = fitted()
    la.enable_backprop = True
    functions = draw_functions(la, 2, "nn", seeded())
    assert torch.autograd.gradcheck(functions, (X[:3].clone().requires_grad_(),))


def test_options_are_chosen_by_mean_bound_and_draw():
    la = fitted()
    options = torch.randn(7, 4, 2, generator=seeded(), dtype=torch.float64)
    mean, variance = la(options.flatten(0, 1), diagonal_output=True)
    mean, spread = mean.reshape(7, 4), variance.sqrt().reshape(7, 4)
    assert torch.equal(choose(la, options, "greedy"), mean.argmax(1))
    assert torch.equal(choose(la, options, "ucb", beta=3.0), (mean + 3 * spread).argmax(1))
    f = la.functional_samples(options.flatten(0, 1), n_samples=1, generator=seeded()).reshape(7, 4)
    assert torch.equal(choose(la, options, generator=seeded()), f.argmax(1))
    assert torch.equal(choose(la, options.numpy(), "greedy"), mean.argmax(1))
    assert torch.equal(choose(la, options.tolist(), "greedy"), mean.argmax(1))


def test_thompson_chooses_as_often_as_an_option_is_best():
    la, options = fitted(), torch.tensor([[[0.5, 0.5], [2.5, -2.5]]], dtype=torch.float64)
    draws = la.functional_samples(options[0], n_samples=4000, generator=seeded()).squeeze(-1)
    share = float((draws.argmax(1) == 1).double().mean())
    generator = torch.Generator().manual_seed(1)
    chosen = torch.cat([choose(la, options, generator=generator) for _ in range(400)])
    assert abs(float(chosen.double().mean()) - share) < 0.1
    assert 0.05 < share < 0.95


def test_wrong_input_is_refused():
    la, options = fitted(), torch.zeros(2, 3, 2).double()
    with pytest.raises(OptionError, match="la is a Sequential; a fitted Laplace"):
        choose(la.model, options)
    with pytest.raises(OptionError, match="la is a str; a fitted Laplace"):
        draw_functions("la")
    with pytest.raises(OptionError, match="rule"):
        choose(la, options, "best")
    with pytest.raises(OptionError, match="beta must be positive"):
        choose(la, options, "ucb", beta=0.0)
    with pytest.raises(InputError, match=r"options are \(2,\)"):
        choose(la, torch.zeros(2))
    with pytest.raises(InputError, match=r"options are \(2, 0, 2\)"):
        choose(la, torch.zeros(2, 0, 2))
    with pytest.raises(ModelError, match=r"read as 2 options in each of 3 contexts.*options\.unsqueeze\(0\)"):
        choose(la, torch.zeros(3, 2).double())
    with pytest.raises(UnsupportedError, match="one reward each; 'regression' has 2 outputs"):
        choose(fitted(outputs=2), options)
    with pytest.raises(OptionError, match="generator"):
        choose(la, options, generator=0)
    with pytest.raises(OptionError, match="pred_type"):
        draw_functions(la, pred_type="mc")
    with pytest.raises(OptionError, match="n_samples"):
        draw_functions(la, 0)
    with pytest.raises(NotFittedError):
        draw_functions(Laplace(la.model, "regression"))
    functions = Laplace(la.model, "regression", "all", "gp").fit([(X, X[:, :1])])
    with pytest.raises(UnsupportedError, match="has no weights whose draws"):
        draw_functions(functions)
