"""Selectors: each finds the weights that its name says, and leaves the network as it was."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import oracle
from laplace import Laplace, utils
from laplace.errors import InputError, NotFittedError, NumericalError, OptionError
from networks import cut
from subsets import close
from zoo import build


@pytest.fixture
def given():
    model, x, y, _ = build("mlp", "classification", n=20)
    return model, cut(x, y, 8)


def flat(model):
    return torch.cat([p.detach().flatten() for p in model.parameters() if p.requires_grad])


def test_every_selector_gives_indices_that_a_subnetwork_takes_and_touches_nothing(given):
    model, loader = given
    model.train()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    masks = [
        utils.RandomSubnetMask(model, 9, generator=torch.Generator().manual_seed(0)),
        utils.LargestMagnitudeSubnetMask(model, 9),
        utils.LargestVarianceDiagLaplaceSubnetMask(model, 9, Laplace(model, "classification", "all", "diag")),
        utils.LargestVarianceSWAGSubnetMask(model, 9, swag_n_snapshots=3),
        utils.ParamNameSubnetMask(model, ["2.bias", "0.weight"]),
        utils.ModuleNameSubnetMask(model, ["2"]),
        utils.LastLayerSubnetMask(model),
    ]
    state = torch.get_rng_state()
    for mask in masks:
        with pytest.raises(NotFittedError, match=r"Call select\(train_loader\)"):
            _ = mask.indices
        index = mask.select(loader)
        assert index.dtype == torch.long
        assert torch.equal(index, index.unique())
        assert torch.equal(mask.indices, index)
        assert mask.n_params_subnet == len(index)
        la = Laplace(model, "classification", "subnetwork", "full", subnetwork_indices=index).fit(loader)
        assert la.n_params == len(index)
    assert torch.equal(torch.get_rng_state(), state)
    assert model.training
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


def test_random_weights_are_those_of_the_generator(given):
    model, _ = given
    one, two, other = (
        utils.RandomSubnetMask(model, 30, generator=torch.Generator().manual_seed(seed)).select() for seed in (0, 0, 1)
    )
    assert torch.equal(one, two)
    assert not torch.equal(one, other)


def test_the_largest_weights_are_those_of_largest_absolute_value(given):
    model, _ = given
    index = utils.LargestMagnitudeSubnetMask(model, 10).select()
    rest = torch.ones(len(flat(model)), dtype=torch.bool)
    rest[index] = False
    assert float(flat(model)[index].abs().min()) >= float(flat(model)[rest].abs().max())


@pytest.mark.parametrize("fitted", [True, False])
def test_the_least_certain_weights_are_those_of_largest_variance(given, fitted):
    model, loader = given
    la = Laplace(model, "classification", "all", "diag", prior_precision=0.1)
    if fitted:
        la.fit(loader)
    index = utils.LargestVarianceDiagLaplaceSubnetMask(model, 10, la).select(None if fitted else loader)
    rest = torch.ones(la.n_params, dtype=torch.bool)
    rest[index] = False
    assert float(la.posterior_variance[index].min()) >= float(la.posterior_variance[rest].max())


def test_swag_scores_are_the_variance_of_the_iterates_of_sgd(given):
    model, loader = given
    mask = utils.LargestVarianceSWAGSubnetMask(model, 10, swag_n_snapshots=3, swag_snapshot_freq=2, swag_lr=0.05)
    copy, _, _, _ = build("mlp", "classification", n=20)
    parameters, speed, iterates = list(copy.parameters()), None, []
    for epoch in range(6):
        for x, y in loader:
            slopes = torch.autograd.grad(F.cross_entropy(copy(x), y), parameters)
            speed = list(slopes) if speed is None else [0.9 * v + g for v, g in zip(speed, slopes, strict=True)]
            with torch.no_grad():
                for p, v in zip(parameters, speed, strict=True):
                    p -= 0.05 * v
        if epoch % 2:
            iterates.append(flat(copy).clone())
    expected = torch.stack(iterates).var(0, unbiased=False)
    close(mask.compute_param_scores(loader), expected)
    assert torch.equal(mask.select(loader), expected.topk(10).indices.sort().values)


def test_names_give_all_weights_of_their_tensors_but_frozen_ones(given):
    model, loader = given
    model[0].bias.requires_grad_(False)
    index = utils.ModuleNameSubnetMask(model, ["0", "4"]).select()
    assert torch.equal(index, oracle.indices_of(model, lambda name, j: name in ("0.weight", "4.weight", "4.bias")))
    index = utils.ParamNameSubnetMask(model, ["2.weight"]).select()
    assert torch.equal(index, oracle.indices_of(model, lambda name, j: name == "2.weight"))
    expected = oracle.indices_of(model, lambda name, j: name.startswith("4."))
    assert torch.equal(utils.LastLayerSubnetMask(model).select(loader), expected)
    assert torch.equal(utils.LastLayerSubnetMask(model, last_layer_name="4").select(loader), expected)


def test_wrong_selectors_say_what_is_right(given):
    model, loader = given
    last = Laplace(model, "classification", hessian_structure="diag").fit(loader)
    unfitted = Laplace(model, "classification", "all", "diag")
    for act, kind, says in [
        (lambda: utils.RandomSubnetMask(model, 84), OptionError, "=84 is more than the 83 trainable weights"),
        (lambda: utils.RandomSubnetMask(model, 0), OptionError, "n_params_subnet=0 must be a whole number"),
        (lambda: utils.RandomSubnetMask(3, 1), OptionError, "model is a int"),
        (lambda: utils.RandomSubnetMask(model, 1, generator=3), OptionError, "generator is a int"),
        (lambda: utils.ParamNameSubnetMask(model, ["2"]), OptionError, "'2' is not a parameter of the network"),
        (
            lambda: utils.ParamNameSubnetMask(model, ["2.wieght"]),
            OptionError,
            r"'2.wieght' is not a parameter.*Nearest: '2.weight'",
        ),
        (lambda: utils.ModuleNameSubnetMask(model, ["2.weight"]), OptionError, "'2.weight' is not a module"),
        (lambda: utils.ModuleNameSubnetMask(model, []), OptionError, "at least one name"),
        (lambda: utils.ModuleNameSubnetMask(model, "2"), OptionError, "a list with at least one name"),
        (lambda: utils.LargestVarianceDiagLaplaceSubnetMask(model, 2, model), OptionError, "is a Sequential; write"),
        (
            lambda: utils.LargestVarianceDiagLaplaceSubnetMask(
                model, 2, Laplace(model, "classification", "all", "kron")
            ),
            OptionError,
            r"has hessian_structure='kron'.*Write Laplace\(model, likelihood, 'all', 'diag'\)",
        ),
        (lambda: utils.LargestVarianceDiagLaplaceSubnetMask(model, 2, last).select(), OptionError, "over all 6 train"),
        (lambda: utils.LargestVarianceDiagLaplaceSubnetMask(model, 2, unfitted).select(), InputError, "seen no data"),
        (lambda: utils.LargestVarianceSWAGSubnetMask(model, 2).select(), InputError, "a NoneType came"),
        (
            lambda: utils.LargestVarianceSWAGSubnetMask(model, 2).select(iter(loader)),
            InputError,
            "a list_iterator came",
        ),
        (lambda: utils.LargestVarianceSWAGSubnetMask(model, 2).select([]), InputError, "gave no example"),
        (lambda: utils.LargestVarianceSWAGSubnetMask(model, 2, swag_lr=0), OptionError, "swag_lr must be positive"),
        (lambda: utils.LargestVarianceSWAGSubnetMask(model, 2, swag_n_snapshots=1), OptionError, "at least 2"),
        (lambda: utils.LastLayerSubnetMask(model).select(), InputError, r"write select\(train_loader\)"),
        (lambda: utils.LastLayerSubnetMask(model).select([]), InputError, "gave no example"),
    ]:
        with pytest.raises(kind, match=says):
            act()


def test_a_frozen_layer_and_diverging_sgd_are_refused(given):
    model, loader = given
    regression = nn.Linear(4, 2).double()
    data = [(x, 1e3 * x[:, :2]) for x, _ in loader]
    with pytest.raises(NumericalError, match="SGD diverged with swag_lr=100"):
        utils.LargestVarianceSWAGSubnetMask(regression, 2, "regression", swag_lr=100.0).select(data)
    model[2].requires_grad_(False)
    with pytest.raises(OptionError, match="requires_grad=False"):
        utils.ModuleNameSubnetMask(model, ["2"]).select()
    model[4].requires_grad_(False)
    with pytest.warns(UserWarning, match="requires_grad=False"), pytest.raises(OptionError, match="stay certain"):
        utils.LastLayerSubnetMask(model).select(loader)
