"""Values of options that have no meaning, of any type, are refused by name; those of numpy that have one are taken."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import laplace
from laplace import Laplace, marglik_training
from laplace.checks import flag, path_of, whole_number
from laplace.errors import MemoryBudgetError, OptionError
from laplace.tuning import with_uncertainty_units

X, Y = torch.linspace(-1, 1, 18).reshape(6, 3), torch.linspace(1, -1, 12).reshape(6, 2)
LOADER = [(X, Y)]
NOT_FLAGS = [torch.tensor([1, 0]), torch.tensor(True), "yes", 2, 1.0, None, [True], np.array([True, False])]
NOT_NUMBERS = [2**70, -(2**70), 0, -1, 1.5, "3", None, True, torch.tensor([2, 3]), torch.tensor(2.0), [2], np.bool_(1)]
NOT_PATHS = [3, 2.0, torch.tensor(1), ["a"], {}, object()]


@pytest.fixture(scope="module")
def la() -> Laplace:
    torch.manual_seed(0)
    return Laplace(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), "regression").fit(LOADER)


def flags(la: Laplace, path):
    net = nn.Linear(3, 2)
    return {
        "joint": lambda v: la(X, joint=v),
        "diagonal_output": lambda v: la(X, diagonal_output=v),
        "diagonal_output of samples": lambda v: la.functional_samples(X, n_samples=2, diagonal_output=v),
        "diagonal_output of draws": lambda v: la.predictive_samples(X, n_samples=2, diagonal_output=v),
        "diagonal_output of predictions": lambda v: la.predict(X, diagonal_output=v),
        "progress_bar": lambda v: la.predict([X], progress_bar=v),
        "override": lambda v: la.fit(LOADER, override=v),
        "progress_bar of fit": lambda v: la.fit(LOADER, progress_bar=v),
        "progress_bar of tune": lambda v: la.tune(progress_bar=v),
        "verbose": lambda v: la.optimize_prior_precision(n_steps=1, verbose=v),
        "progress_bar of optimize": lambda v: la.optimize_prior_precision(n_steps=1, progress_bar=v),
        "tune_sigma_noise": lambda v: la.optimize_prior_precision(n_steps=1, tune_sigma_noise=v),
        "normalized": lambda v: la.log_prob(la.mean, normalized=v),
        "with_data": lambda v: la.state_dict(with_data=v),
        "with_data of save": lambda v: la.save(path / "la", with_data=v),
        "enable_backprop": lambda v: Laplace(net, "regression", enable_backprop=v),
        "keep_best": lambda v: marglik_training(net, LOADER, "regression", n_epochs=1, keep_best=v),
        "fix_sigma_noise": lambda v: marglik_training(net, LOADER, "regression", n_epochs=1, fix_sigma_noise=v),
        "progress_bar of training": lambda v: marglik_training(net, LOADER, "regression", n_epochs=1, progress_bar=v),
    }


def numbers(la: Laplace, path):
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    search = {"method": "validation", "val_loader": LOADER}
    return {
        "n_samples": lambda v: la(X, pred_type="nn", n_samples=v),
        "n_samples of predict": lambda v: la.predict(X, n_samples=v),
        "n_samples of samples": lambda v: la.functional_samples(X, n_samples=v),
        "n_samples of sample": lambda v: la.sample(v),
        "every": lambda v: la.fit(LOADER, checkpoint=path / "fit", every=v),
        "n_samples of tune": lambda v: la.tune(n_samples=v, **search),
        "grid_size": lambda v: la.tune(grid_size=v, **search),
        "grid_size of optimize": lambda v: la.optimize_prior_precision(
            method="gridsearch", val_loader=LOADER, grid_size=v
        ),
        "n_steps": lambda v: la.tune(n_steps=v),
        "n_steps of optimize": lambda v: la.optimize_prior_precision(n_steps=v),
        "n_epochs": lambda v: marglik_training(net, LOADER, "regression", n_epochs=v),
        "n_hypersteps": lambda v: marglik_training(net, LOADER, "regression", n_epochs=1, n_hypersteps=v),
        "marglik_frequency": lambda v: marglik_training(net, LOADER, "regression", n_epochs=1, marglik_frequency=v),
        "n_data": lambda v: laplace.plan(net, LOADER[0], "regression", n_data=v),
        "units": lambda v: with_uncertainty_units(net, "regression", LOADER, X, v, steps=1),
        "steps": lambda v: with_uncertainty_units(net, "regression", LOADER, X, 1, steps=v),
        "curvature_samples": lambda v: Laplace(net, "regression", curvature="mc", curvature_samples=v),
    }


def refused(call, name: str, values) -> None:
    for value in values:
        with pytest.raises(OptionError, match=rf"^{name.split(' of ')[0]}="):
            call(value)


def test_flags_are_true_or_false(la, tmp_path):
    for name, call in flags(la, tmp_path).items():
        may_be_none = name == "diagonal_output of predictions" or name.startswith("progress_bar")
        refused(call, name, [v for v in NOT_FLAGS if not (v is None and may_be_none)])


def test_numbers_are_whole_and_of_a_size_that_can_be_meant(la, tmp_path):
    for name, call in numbers(la, tmp_path).items():
        refused(call, name, [v for v in NOT_NUMBERS if not (v is None and name == "n_data")])


def test_paths_are_paths(la, tmp_path):
    refused(lambda v: la.fit(LOADER, checkpoint=v), "checkpoint", NOT_PATHS)
    refused(lambda v: la.save(v), "path", NOT_PATHS)
    refused(lambda v: Laplace.load(v, la.model), "path", NOT_PATHS)
    train = lambda v: marglik_training(nn.Linear(3, 2), LOADER, "regression", n_epochs=1, checkpoint=v)  # noqa: E731
    refused(train, "checkpoint", NOT_PATHS)


def test_what_numpy_and_torch_have_for_numbers_is_taken(la):
    assert la(X, diagonal_output=np.bool_(True))[1].shape == (6, 2)
    assert la(X, diagonal_output=1)[1].shape == (6, 2)
    assert la.sample(np.int64(3)).shape == la.sample(torch.tensor(3)).shape == (3, la.n_params)
    assert la(X, pred_type="nn", n_samples=np.int32(4))[0].shape == (6, 2)
    assert flag(np.bool_(False), "a") is False
    assert whole_number(2**40, "seed", 0, 2**63 - 1) == 2**40
    assert str(path_of("a/b", "path")) == "a/b"


def test_more_draws_than_fit_into_memory_are_refused_before_they_are_made(la):
    classes = Laplace(la.model, "classification").fit([(X, torch.arange(6) % 2)])
    for call in (
        lambda n: classes(X, link_approx="mc", n_samples=n),
        lambda n: classes.predict(X, n_samples=n),
        lambda n: la.functional_samples(X, n_samples=n),
        lambda n: la(X, pred_type="nn", n_samples=n),
        lambda n: la.sample(n),
    ):
        with pytest.raises(MemoryBudgetError, match="2,000,000,000 draws"):
            call(2_000_000_000)


def test_the_ends_of_a_grid_are_numbers_that_there_are(la):
    for ends in ({"log_prior_prec_min": -(2**70)}, {"log_prior_prec_max": 2**70}, {"log_prior_prec_max": "3x"}):
        with pytest.raises(OptionError, match="the grid runs from"):
            la.optimize_prior_precision(method="gridsearch", val_loader=LOADER, grid_size=3, **ends)


def test_devices_are_torchs(la):
    for value in ("yes", 2**70, -1, [1], object()):
        with pytest.raises(OptionError, match=r"^device="):
            la.to(value)
    assert la.to("cpu") is la


def test_a_flag_that_is_set_is_checked_as_one_that_is_given(la):
    other = Laplace(la.model, "regression")
    for value in NOT_FLAGS:
        with pytest.raises(OptionError, match=r"^enable_backprop="):
            other.enable_backprop = value
    assert other.enable_backprop is False


def test_single_numbers_keys_and_makers_are_such():
    def train(**options):
        return marglik_training(nn.Linear(3, 2), LOADER, "regression", n_epochs=1, **options)

    for name, value in {
        "lr_hyp": [1.0, 2.0],
        "temperature": [1.0, 2.0],
        "optimizer_cls": "Adam",
        "scheduler_cls": 3,
        "optimizer_kwargs": 1e-3,
        "scheduler_kwargs": torch.tensor([1, 2]),
        "dict_key_x": 3,
        "dict_key_y": ["labels"],
    }.items():
        with pytest.raises(OptionError, match=rf"^{name}"):
            train(**{name: value})
    for name in ("prior_precision", "sigma_noise", "lr"):
        with pytest.raises(OptionError, match=rf"^{name} has 2 values"):
            with_uncertainty_units(nn.Linear(3, 2), "regression", LOADER, X, 1, steps=1, **{name: [1.0, 2.0]})
    assert train(prior_prec_init=2**70)[0].prior_precision.isfinite().all()
