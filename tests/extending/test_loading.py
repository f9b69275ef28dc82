"""What a file says of parts that are not ours, and of parts that are others than those that were saved."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from laplace import Laplace
from laplace.errors import CheckpointError, InputError, OptionError
from laplace.priors import Independent, StudentT
from laplace.structures import Diag, Full, Kron
from laplace.weights import Choice, Layout, Selection


class Mine(Diag):
    """Its sums are diag's; it is a class of its own all the same."""

    def block_sums(self, moments):
        return {"mine": moments.squares()}

    def block(self, sums, shape, eigh):
        return super().block({"diag": sums["mine"]}, shape, eigh)


class Other(Diag):
    pass


class Biases(Choice):
    label = "biases"

    def __init__(self, index=(0, 1)):
        self.index = index

    def select(self, model):
        found = [(name, p) for name, p in model.named_parameters() if name.endswith("bias")]
        return Selection(Layout.of(found[i] for i in self.index))


@pytest.fixture
def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).double()


X = torch.linspace(-1, 1, 30, dtype=torch.float64).reshape(10, 3).sin()
Y = torch.arange(10) % 2


def saved(model, path, subset="all", structure="diag", **options):
    la = Laplace(model, "classification", subset, structure, **options).fit([(X, Y)])
    la.save(path)
    return la


def test_a_subclass_has_a_name_and_sums_of_its_own():
    assert (Mine.name, Other.name, Diag.name) == ("Mine", "Other", "diag")
    assert Mine.forms is None
    assert Other.forms is Diag.forms  # which makes the same sums


def test_another_structure_than_that_of_the_file_is_refused(model, tmp_path):
    saved(model, tmp_path / "a", structure=Mine())
    with pytest.raises(CheckpointError, match=r"has the structure 'Mine'; hessian_structure= is 'Other'"):
        Laplace.load(tmp_path / "a", model, hessian_structure=Other())
    with pytest.raises(OptionError, match=r"hessian_structure='Mine' must be the structure itself"):
        Laplace.load(tmp_path / "a", model, hessian_structure="Mine")
    saved(model, tmp_path / "b", structure="kron", damping=True)
    with pytest.raises(CheckpointError, match=r"has the structure 'kron, damping=True'; hessian_structure= is 'full'"):
        Laplace.load(tmp_path / "b", model, hessian_structure=Full())


def test_a_structure_of_ours_may_be_given_as_it_was_saved(model, tmp_path):
    la = saved(model, tmp_path / "a", structure=Kron(damping="balanced"))
    loaded = Laplace.load(tmp_path / "a", model, hessian_structure=Kron(damping="balanced"))
    assert torch.equal(loaded(X), la(X))
    assert torch.equal(Laplace.load(tmp_path / "a", model)(X), la(X))


def test_another_subset_than_that_of_the_file_is_refused(model, tmp_path):
    saved(model, tmp_path / "a", Biases())
    with pytest.raises(CheckpointError, match=r"has the parameters 0.bias, 2.bias; .*'biases' chooses 2.bias of this"):
        Laplace.load(tmp_path / "a", model, subset_of_weights=Biases([1]))
    other = Biases()
    other.label = "other"
    with pytest.raises(CheckpointError, match=r"has the subset of weights 'biases'; subset_of_weights= is 'other'"):
        Laplace.load(tmp_path / "a", model, subset_of_weights=other)
    with pytest.raises(OptionError, match=r"subset_of_weights=.*must be the subset itself"):
        Laplace.load(tmp_path / "a", model, subset_of_weights="all")
    saved(model, tmp_path / "b")
    with pytest.raises(CheckpointError, match=r"already says which weights are uncertain: 'all'. Leave out"):
        Laplace.load(tmp_path / "b", model, subset_of_weights=Biases())


def test_both_parts_of_ones_own_together(model, tmp_path):
    la = saved(model, tmp_path / "a", Biases(), Mine())
    with pytest.raises(CheckpointError, match=r"hessian_structure="):
        Laplace.load(tmp_path / "a", model)
    loaded = Laplace.load(tmp_path / "a", model, hessian_structure=Mine(), subset_of_weights=Biases())
    assert torch.equal(loaded(X), la(X))


def test_a_state_without_forms_is_still_checked(model):
    la = Laplace(model, "classification", "all", Mine()).fit([(X, Y)])
    state = la.state_dict()
    for key, value in {"sums/0.bias/mine": torch.ones(4).double(), "sums/nobody/mine": torch.ones(5).double()}.items():
        with pytest.raises(Exception, match=r"the state is damaged|one number per weight"):
            Laplace(model, "classification", "all", Mine()).load_state_dict({**state, key: value})


class Cauchy(Independent):
    name = "cauchy"

    def __init__(self, width=1.0):  # without the argument `mean`
        super().__init__({"width": width}, 0.5)

    def log_each(self, u, width):
        return -(math.pi * width * (1 + (u / width) ** 2)).log()

    def bend_each(self, u, width):
        return 2 * (width**2 - u**2) / (width**2 + u**2) ** 2


def test_a_file_with_a_prior_of_ones_own_asks_for_that_prior(model, tmp_path):
    la = saved(model, tmp_path / "mine", prior=Cauchy(2.0))
    with pytest.raises(InputError, match=r"your own prior 'cauchy'.*Laplace.load"):
        Laplace.load(tmp_path / "mine", model)
    with pytest.raises(CheckpointError, match="'cauchy', but prior= is StudentT"):
        Laplace.load(tmp_path / "mine", model, prior=StudentT())
    assert la.tune(method="evidence").converged  # all hyperparameters, whatever their names
    la.save(tmp_path / "mine")
    again = Laplace.load(tmp_path / "mine", model, prior=Cauchy())
    assert float(again.prior.hyperparameters["width"]) == float(la.prior.hyperparameters["width"]) != 2
    assert torch.equal(again(X), la(X))
