"""Options as objects: typos are refused with the nearest keyword, and every argument can be read and given back."""

from __future__ import annotations

import copy
import inspect
import pickle

import pytest
import torch
from torch import nn

from laplace import Laplace, curvature, likelihoods, priors, structures, weights
from laplace.curvature import GGN, MC, Sketch
from laplace.errors import ArgumentError, CheckpointError, InputError, OptionError, UnsupportedError
from laplace.keywords import NamedOptions
from laplace.priors import CorrelatedGaussian, GaussianPrior, SmoothedLaplace, StudentT, from_log_density
from networks import cut, make

TYPOS = {
    structures.Kron: ("dampin", "damping"),
    structures.LowRank: ("rnk", "rank"),
    structures.GP: ("nsubset", "n_subset"),
    likelihoods.Categorical: ("label_smothing", "label_smoothing"),
    weights.LastLayer: ("nme", "name"),
    StudentT: ("scal", "scale"),
    Sketch: ("sample", "samples"),
    MC: ("sample", "samples"),
}
PRIORS = {
    "student_t": lambda: StudentT(df=4.0, scale=0.5, mean=0.25),
    "smoothed_laplace": lambda: SmoothedLaplace(scale=0.5),
    "custom": lambda: from_log_density(lambda w, scale: -(w / scale).square().sum() / 2, scale=2.0),
    "gaussian": lambda: GaussianPrior.of(3.0, 0.5),
}


@pytest.mark.parametrize("part", TYPOS, ids=lambda part: part.__name__)
def test_a_typo_in_an_option_of_an_object_is_refused_with_the_nearest_one(part):
    wrong, right = TYPOS[part]
    with pytest.raises(ArgumentError, match=rf"^{part.__name__} has no option '{wrong}'\. Did you mean '{right}'\?$"):
        part(**{wrong: 1})


ROOMS = (structures, likelihoods, weights, curvature, priors)
PARTS = [getattr(room, name) for room in ROOMS for name in room.__all__ if isinstance(getattr(room, name), type)]
OPTIONS = [
    (part, name) for part in PARTS if issubclass(part, NamedOptions) for name in inspect.signature(part).parameters
]


@pytest.mark.parametrize(("part", "name"), OPTIONS, ids=lambda value: getattr(value, "__name__", value))
def test_every_option_of_every_part_is_the_nearest_to_itself_with_a_letter_too_many(part, name):
    with pytest.raises(ArgumentError, match=rf"has no option '{name}q'\. Did you mean '{name}'\?$"):
        part(**{f"{name}q": 1})


def test_a_part_without_options_refuses_every_keyword():
    with pytest.raises(ArgumentError, match=r"^GGN has no option 'samples'\. See help\(GGN\)\.$"):
        GGN(samples=2)


def test_signatures_of_parts_are_those_of_their_constructors():
    for part in (*TYPOS, GGN):
        assert "kwargs" not in inspect.signature(part).parameters
    assert list(inspect.signature(Sketch).parameters) == ["samples"]
    assert "damping" in inspect.signature(structures.Kron).parameters


def test_parts_are_copied_and_pickled():
    for part in (structures.Kron(damping="balanced"), Sketch(samples=3), StudentT(df=4.0, scale=0.5)):
        again = pickle.loads(pickle.dumps(part))  # noqa: S301
        assert repr(copy.deepcopy(part)) == repr(again) == repr(part)


def arguments_of(la):
    return {name: getattr(la, name) for name in inspect.signature(Laplace).parameters}


@pytest.mark.parametrize("fit", [False, True])
@pytest.mark.parametrize("name", [*PRIORS, "correlated"])
def test_every_argument_can_be_read_and_given_back_with_any_prior(name, fit):
    model, x, y = make("mlp", "classification")
    if name == "correlated":
        shapes = dict(model[2].named_parameters())
        prior = CorrelatedGaussian({f"2.{key}": 2 * torch.eye(value.numel()) for key, value in shapes.items()})
    else:
        prior = PRIORS[name]()
    la = Laplace(model, "classification", "last_layer", "full", prior=prior)
    if fit:
        la.fit(cut(x, y, 8))
    again = Laplace(**arguments_of(la))
    assert not again.is_fitted
    torch.testing.assert_close(
        again.fit(cut(x, y, 8)).log_marginal_likelihood(), la.fit(cut(x, y, 8)).log_marginal_likelihood()
    )


def test_a_prior_without_a_precision_has_none():
    la = Laplace(nn.Linear(3, 2), "classification", "all", "diag", prior=StudentT(df=4.0, scale=0.5))
    assert la.prior_precision is None
    with pytest.raises(UnsupportedError, match="which has no prior_precision"):
        la.prior_precision = 2.0
    with pytest.raises(OptionError, match="prior_precision=None and prior_mean=None go with prior="):
        Laplace(nn.Linear(3, 2), "classification", prior_precision=None)


@pytest.mark.parametrize("structure", ["kron", "full", "gp", "lowrank", "matrix_free"])
@pytest.mark.parametrize("fit", [False, True])
def test_members_of_a_posterior_can_be_listed(structure, fit):
    model, x, y = make("mlp", "classification")
    prior = StudentT(df=4.0, scale=0.5) if structure == "full" else None
    la = Laplace(model, "classification", "all", structure, prior=prior)
    if fit:
        la.fit(cut(x, y, 8))
    assert dict(inspect.getmembers(la))["n_data" if fit else "model"]


class Doubled(StudentT):
    def log_each(self, u, **values):
        return 2 * super().log_each(u, **values)

    def bend_each(self, u, **values):
        return 2 * super().bend_each(u, **values)


def test_a_prior_made_from_one_of_ours_is_not_loaded_as_that_one(tmp_path):
    model, x, y = make("mlp", "classification")
    la = Laplace(model, "classification", "all", "diag", prior=Doubled(df=4.0, scale=1.0)).fit(cut(x, y, 8))
    la.save(tmp_path / "posterior")
    with pytest.raises(InputError, match="your own prior 'Doubled'"):
        Laplace.load(tmp_path / "posterior", model)
    with pytest.raises(CheckpointError, match="'Doubled'"):
        Laplace.load(tmp_path / "posterior", model, prior=StudentT(df=4.0, scale=1.0))
    again = Laplace.load(tmp_path / "posterior", model, prior=Doubled(df=4.0, scale=1.0))
    torch.testing.assert_close(again.log_marginal_likelihood(), la.log_marginal_likelihood(), rtol=0, atol=1e-9)


def test_a_prior_made_from_the_gaussian_is_refused():
    class Mine(GaussianPrior):
        pass

    with pytest.raises(OptionError, match=r"Make it from laplace\.priors\.Prior or Independent"):
        Laplace(nn.Linear(3, 2), "classification", prior=Mine.of(1.0, 0.0))


class Sharper(likelihoods.Categorical):
    def log_prob(self, f, y):
        return 2 * super().log_prob(f, y)


class Namesake(Sharper):
    name = "classification"


@pytest.mark.parametrize("kind", [Sharper, Namesake])
def test_a_likelihood_made_from_one_of_ours_is_not_loaded_as_that_one(kind, tmp_path):
    model, x, y = make("mlp", "classification")
    Laplace(model, kind()).fit(cut(x, y, 8)).save(tmp_path / "posterior")
    words = "a likelihood of your own class" if kind is Namesake else "has the likelihood 'Sharper'"
    with pytest.raises(CheckpointError, match=words):
        Laplace.load(tmp_path / "posterior", model, likelihood="classification")
    assert type(Laplace.load(tmp_path / "posterior", model, likelihood=kind()).likelihood) is kind


def test_misspelt_words_name_the_nearest():
    la = Laplace(nn.Linear(3, 2), "classification")
    with pytest.raises(AttributeError, match=r"no attribute 'prior_precison'\. Did you mean 'prior_precision'\?"):
        la.prior_precison  # noqa: B018
    with pytest.raises(OptionError, match=r"Did you mean 'last_layer'\?"):
        Laplace(nn.Linear(3, 2), "classification", "lastlayer")


def test_public_priors_are_listed():
    assert {"StudentT", "SmoothedLaplace", "CorrelatedGaussian", "from_log_density"} <= set(dir(priors))
