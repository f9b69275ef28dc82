"""Every argument of `Laplace` is readable under its own name, and a `Laplace` made of what is read is the same."""

from __future__ import annotations

import copy
import inspect
import itertools
import pickle
from typing import Any

import pytest
import torch
from torch import nn

from laplace import HessianStructure, Laplace, SubsetOfWeights
from laplace.curvature import CURVATURES, EF, GGN, Sketch
from laplace.errors import UnsupportedError
from laplace.likelihoods import LIKELIHOODS, Categorical, Gaussian, Ordinal, from_log_prob
from laplace.structures import GP, STRUCTURES, Diag, Inf, Kron, LowRank, Nystrom, Variational
from laplace.weights import All, LastLayer, Named, Subnetwork, Where

X = torch.linspace(-2, 2, 48, dtype=torch.float64).reshape(12, 4).sin()
CLASSES, VALUES = torch.arange(12) % 3, X[:, :3].cos()
INDICES = torch.tensor([0, 3, 17, 30])
NAMES = list(inspect.signature(Laplace).parameters)


class CurvlinopsGGN:
    """Stands for a backend class of laplace-torch."""


class CurvlinopsEF:
    """Stands for another."""


class Doubled(GGN):
    """An estimator from outside the package."""

    name = "doubled"

    def __call__(self, likelihood, f, y, generator):
        return super().__call__(likelihood, torch.cat([f]), y, generator)


def poisson(f: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (y * f - f.exp()).sum(-1)


def of_first(name: str, parameter: nn.Parameter) -> bool:
    return name.startswith("0.")


CASES: dict[str, dict[str, Any]] = {
    "defaults": {},
    "strings": {"subset_of_weights": "all", "hessian_structure": "kron", "damping": "balanced", "curvature": "ggn"},
    "enums": {"subset_of_weights": SubsetOfWeights.ALL, "hessian_structure": HessianStructure.DIAG},
    "objects": {
        "likelihood": Categorical(label_smoothing=0.1, class_weights=[1.0, 2.0, 0.5]),
        "subset_of_weights": LastLayer(name="2"),
        "hessian_structure": Kron(damping="balanced"),
        "curvature": EF(),
    },
    "a name": {"last_layer_name": "2", "feature_reduction": "average"},
    "inf": {"subset_of_weights": "all", "hessian_structure": "inf", "rank": 0.9, "weight_sharing": "reduce"},
    "inf, object": {"subset_of_weights": All(), "hessian_structure": Inf(rank=3)},
    "lowrank": {"subset_of_weights": "all", "hessian_structure": "lowrank", "tol": 0.01},
    "lowrank, object": {"subset_of_weights": "all", "hessian_structure": LowRank(rank=7)},
    "gp": {"hessian_structure": "gp", "n_subset": 7, "seed": 3, "independent_outputs": True},
    "gp, object": {"hessian_structure": GP(n_subset=7, seed=3)},
    "nystrom": {"hessian_structure": "gp", "functional_approximation": "nystrom", "rank": 5},
    "nystrom, object": {"hessian_structure": Nystrom(rank=5)},
    "variational": {"hessian_structure": "gp", "functional_approximation": "variational", "inducing": "kmeans"},
    "variational, object": {"hessian_structure": Variational(n_subset=5, inducing_steps=3)},
    "sketch": {"curvature": "sketch", "curvature_samples": 3},
    "sketch, object": {"curvature": Sketch(samples=3)},
    "an estimator from outside": {"curvature": Doubled()},
    "backend": {"backend": CurvlinopsEF},
    "backend, stochastic": {"backend": CurvlinopsGGN, "backend_kwargs": {"stochastic": True}},
    "subnetwork": {
        "subset_of_weights": "subnetwork",
        "subnetwork_indices": INDICES,
        "hessian_structure": "full",
        "curvature": "hessian",
    },
    "subnetwork, object": {"subset_of_weights": Subnetwork(INDICES), "hessian_structure": Diag()},
    "globs": {"subset_of_weights": ["0.*"]},
    "globs, object": {"subset_of_weights": Named(["0.*", "2.bias"])},
    "predicate": {"subset_of_weights": of_first},
    "predicate, object": {"subset_of_weights": Where(of_first)},
    "noise": {"likelihood": "regression", "sigma_noise": 0.3, "temperature": 0.5},
    "noise per output": {"likelihood": "regression", "sigma_noise": torch.tensor([0.3, 0.7, 1.1])},
    "noise of the likelihood": {"likelihood": Gaussian([0.5, 1.0, 2.0]), "sigma_noise": 0.4},
    "temperatures": {"temperature": 0.5, "softmax_temperature": 1.7},
    "ordinal": {"likelihood": Ordinal([-1.0, 0.5]), "class_dim": -1},
    "own likelihood": {"likelihood": from_log_prob(poisson)},
    "prior per tensor": {"prior_precision": torch.tensor([0.3, 2.0]), "prior_mean": 0.1},
    "prior per weight": {
        "hessian_structure": "diag",
        "prior_precision": torch.linspace(0.5, 2, 18, dtype=torch.float64),
        "prior_mean": torch.linspace(-1, 1, 18, dtype=torch.float64),
    },
    "other": {"memory_budget": 10**9, "enable_backprop": True, "dict_key_x": "x", "dict_key_y": "y"},
}


def network(outputs: int = 3) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, outputs)).double()


def data(la: Laplace) -> list[tuple[torch.Tensor, torch.Tensor]]:
    if la.likelihood.name in ("regression",):
        return [(X, VALUES)]
    return [(X, CLASSES if la.likelihood.name in ("classification", "ordinal") else VALUES.abs())]


def made(case: str) -> Laplace:
    options = {"likelihood": "classification"} | CASES[case]
    return Laplace(network(1 if case == "ordinal" else 3), **options)


def fitted(la: Laplace) -> Laplace:
    return la.fit(data(la), generator=torch.Generator().manual_seed(2))


def again(la: Laplace) -> Laplace:
    return Laplace(**{name: getattr(la, name) for name in NAMES})


def require_same(one: Laplace, two: Laplace) -> None:
    """Compare what was asked for and the hyperparameters, and after a fit the evidence."""
    spec, other = one.runner.spec, two.runner.spec
    assert other.described("") == spec.described("")
    assert other.structure == spec.structure
    assert other.weights == spec.weights
    assert (other.keys, other.budget, two.enable_backprop) == (spec.keys, spec.budget, one.enable_backprop)
    if one.curvature is not None:
        assert other.estimator == (spec.estimator if spec.curvature is not None else other.estimator)
        assert two.curvature == one.curvature
    for name in ("prior_precision", "prior_mean", "sigma_noise"):
        assert torch.equal(getattr(one, name), getattr(two, name)), name
    assert one.temperature == two.temperature
    assert one.softmax_temperature == two.softmax_temperature
    assert type(one.prior) is type(two.prior)


def require_same_evidence(one: Laplace, two: Laplace) -> None:
    torch.testing.assert_close(
        fitted(two).log_marginal_likelihood(), fitted(one).log_marginal_likelihood(), rtol=1e-12, atol=1e-12
    )


@pytest.mark.parametrize("case", CASES)
def test_every_argument_comes_back(case):
    la = made(case)
    twin = again(la)
    assert not twin.is_fitted
    require_same(la, twin)
    for name, given in CASES[case].items():
        if name not in ("likelihood", "curvature", "sigma_noise") and not isinstance(given, torch.Tensor):
            found = getattr(la, name)
            assert (type(found).__name__ == given.__name__) if name == "backend" else (found == given), name
    require_same_evidence(la, twin)
    after = again(la)
    assert not after.is_fitted
    require_same(la, after)
    require_same_evidence(la, after)


@pytest.mark.parametrize("likelihood", [name for name in LIKELIHOODS if name != "ordinal"])  # which needs an object
def test_every_combination_of_names_comes_back(likelihood):
    model, made = network(1 if likelihood in ("binary", "reward_modeling") else 2), 0
    choices = itertools.product([*STRUCTURES, "gp"], [None, *CURVATURES], ["last_layer", "all", "subnetwork"])
    for structure, curvature, subset in choices:
        indices = INDICES if subset == "subnetwork" else None
        try:
            la = Laplace(model, likelihood, subset, structure, curvature=curvature, subnetwork_indices=indices)
        except UnsupportedError:
            continue
        twin, made = again(la), made + 1
        require_same(la, twin)
        assert (twin.hessian_structure, twin.subset_of_weights) == (structure, subset)
        assert repr(twin) == repr(la)
    assert made > 70


@pytest.mark.parametrize("structure", [*STRUCTURES, "gp"])
def test_every_structure_comes_back_after_a_fit(structure):
    la = Laplace(network(), "regression", "all", structure, sigma_noise=0.5)
    require_same_evidence(la, again(fitted(la)))


@pytest.mark.parametrize("case", CASES)
def test_copies_and_pickles_are_the_same(case):
    la = made(case)
    for twin in (copy.deepcopy(la), pickle.loads(pickle.dumps(la))):  # noqa: S301
        require_same(la, twin)
    fitted(la)
    for twin in (copy.deepcopy(la), pickle.loads(pickle.dumps(la))):  # noqa: S301
        assert twin.is_fitted
        require_same(la, twin)
        assert torch.equal(twin.log_marginal_likelihood(), la.log_marginal_likelihood())
        require_same(la, again(twin))


@pytest.mark.parametrize("case", [case for case in CASES if case != "an estimator from outside"])
def test_what_was_loaded_comes_back(case, tmp_path):
    la = fitted(made(case))
    la.save(tmp_path / "la", with_data=True)
    own = la.likelihood if case == "own likelihood" else None
    loaded = Laplace.load(tmp_path / "la", la.model, likelihood=own)
    twin = again(loaded)
    require_same(loaded, twin)
    require_same_evidence(loaded, twin)


@pytest.mark.parametrize("case", ["objects", "noise", "noise per output", "noise of the likelihood", "strings"])
def test_what_was_tuned_comes_back(case):
    la = fitted(made(case))
    la.optimize_prior_precision(prior_structure="layerwise")
    twin = again(la)
    require_same(la, twin)
    assert len(twin.prior_precision) > 1
    require_same_evidence(la, twin)


@pytest.mark.parametrize("case", ["strings", "objects", "noise per output"])
def test_the_prior_of_a_task_comes_back(case):
    first = fitted(made(case))
    options = {"likelihood": "classification"} | CASES[case]
    la = Laplace(first.model, **options, prior=first.as_prior())
    for _ in range(2):
        twin = again(la)
        require_same(la, twin)
        require_same_evidence(la, twin)
        la.prior_precision = 3.0


def test_the_curvature_is_open_until_fit_chooses():
    la = made("defaults")
    assert la.curvature is None
    assert again(la).curvature is None
    assert fitted(la).curvature == "ggn"
    assert again(la).curvature == "ggn"
