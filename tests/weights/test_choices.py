"""Which weights names, globs, predicates and indices choose, and what is refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import oracle
from laplace import Laplace, SubsetOfWeights
from laplace.errors import LaplaceWarning, OptionError, UnsupportedError
from laplace.weights import Choice, Layout, Selection
from networks import cut
from subsets import close
from zoo import build

pytestmark = pytest.mark.filterwarnings("ignore:kron keeps:laplace.errors.LaplaceWarning")


def names(subset, model, structure="diag", **told):
    la = Laplace(model, "regression", subset, structure, **told)
    return list(la.fit([(X, Y)]).posterior.fit.layout.names)


class Body(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 3))
        self.fc1, self.fc10 = nn.Linear(3, 3), nn.Linear(3, 2)

    def forward(self, x):
        return self.fc10(torch.tanh(self.fc1(self.encoder(x))))


class TiedBody(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down, self.out = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)
        self.down.weight = self.up.weight

    def forward(self, x):
        return self.out(torch.tanh(self.down(torch.tanh(self.up(x)))))


class Compiled(nn.Module):
    """What torch.compile puts around a network."""

    def __init__(self):
        super().__init__()
        self._orig_mod = Body()

    def forward(self, x):
        return self._orig_mod(x)


X, Y = torch.randn(5, 4), torch.randn(5, 2)


def test_a_choice_of_ones_own_chooses_by_the_plain_names_of_a_compiled_network():
    class Everything(Choice):
        def select(self, model):
            return Selection(Layout.of(model.named_parameters()))

    assert names(Everything(), Compiled()) == [name for name, _ in Body().named_parameters()]


@pytest.mark.parametrize(
    ("subset", "expected"),
    [
        (["encoder.*"], ["encoder.0.weight", "encoder.0.bias", "encoder.2.weight", "encoder.2.bias"]),
        ("encoder", ["encoder.0.weight", "encoder.0.bias", "encoder.2.weight", "encoder.2.bias"]),
        (["encoder.2", "fc1"], ["encoder.2.weight", "encoder.2.bias", "fc1.weight", "fc1.bias"]),
        ("fc1", ["fc1.weight", "fc1.bias"]),
        ("fc?.bias", ["fc1.bias"]),
        (("fc10.weight", "encoder.[0]"), ["encoder.0.weight", "encoder.0.bias", "fc10.weight"]),
        ("*.bias", ["encoder.0.bias", "encoder.2.bias", "fc1.bias", "fc10.bias"]),
        (lambda name, p: name.startswith("fc") and p.dim() == 1, ["fc1.bias", "fc10.bias"]),
        (SubsetOfWeights.LAST_LAYER, ["fc10.weight", "fc10.bias"]),
    ],
)
def test_names_globs_and_predicates_choose_whole_tensors(subset, expected):
    assert names(subset, Body()) == expected
    assert names(subset, Body(), "kron") == expected


def test_names_work_through_a_compiled_wrapper():
    assert names(["fc1", "_orig_mod.fc10.bias"], Compiled()) == ["fc1.weight", "fc1.bias", "fc10.bias"]


def test_a_tied_tensor_is_found_by_either_name_and_counted_once():
    assert names(["down"], TiedBody()) == ["up.weight", "down.bias"]
    assert names(["up.weight", "down.weight"], TiedBody()) == ["up.weight"]


def test_frozen_parameters_stay_certain():
    model = Body()
    model.encoder[0].requires_grad_(False)
    assert names("encoder.*", model) == ["encoder.2.weight", "encoder.2.bias"]
    assert names(lambda name, p: "encoder" in name, model) == ["encoder.2.weight", "encoder.2.bias"]
    assert names("subnetwork", model, subnetwork_indices=torch.tensor([0])) == ["encoder.2.weight"]
    with pytest.raises(OptionError, match=r"'encoder.0' matches only parameters with requires_grad=False"):
        names(["encoder.0"], model)
    with pytest.raises(OptionError, match="takes only parameters with requires_grad=False"):
        names(lambda name, p: name == "encoder.0.bias", model)


def test_indices_of_whole_tensors_serve_kron_as_names_do():
    model, x, y, _ = build("mlp", "classification")
    index = oracle.indices_of(model, lambda name, j: name in ("2.weight", "2.bias"))
    one = Laplace(model, "classification", ["2"], "kron").fit(cut(x, y, 4))
    two = Laplace(model, "classification", "subnetwork", "kron", subnetwork_indices=index).fit(cut(x, y, 4))
    assert torch.equal(one(x), two(x))


def test_the_last_layer_by_name_is_the_last_layer():
    model, x, y, _ = build("mlp", "classification")
    for structure in ("full", "kron", "diag"):
        one = Laplace(model, "classification", hessian_structure=structure).fit(cut(x, y, 4))
        two = Laplace(model, "classification", "4", structure).fit(cut(x, y, 4))
        close(one(x), two(x))
        close(one.log_marginal_likelihood(), two.log_marginal_likelihood())


def test_indices_in_any_order_are_taken_in_ascending_order_and_that_is_said():
    model, x, y, _ = build("mlp", "regression")
    with pytest.warns(LaplaceWarning, match=r"not in ascending order.*indices.sort\(\).values"):
        la = Laplace(model, "regression", "subnetwork", "full", subnetwork_indices=torch.tensor([40, 2, 7]))
    flat = torch.cat([p.detach().flatten() for p in model.parameters()])
    assert torch.equal(la.fit([(x, y)]).mean, flat[[2, 7, 40]])
    assert la.subnetwork_indices.tolist() == [2, 7, 40]


class Refusing(torch.autograd.Function):
    """A backward pass that must not be reached."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        raise AssertionError("went below the first chosen layer")


def test_the_backward_pass_stops_at_the_first_chosen_layer():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.low, self.high, self.out = nn.Linear(4, 5), nn.Linear(5, 5), nn.Linear(5, 2)

        def forward(self, x):
            return self.out(torch.tanh(self.high(Refusing.apply(self.low(x)))))

    model, x, y = Net(), torch.randn(6, 4), torch.randn(6, 2)
    index = 25 + torch.tensor([0, 7, 20])  # of high.weight
    for told in ({"subset_of_weights": ["high"]}, {"subset_of_weights": "subnetwork", "subnetwork_indices": index}):
        la = Laplace(model, "regression", hessian_structure="full", **told).fit([(x, y)])
        assert la(x)[1].isfinite().all()
        replica = la.runner.engine(la.runner.weights).replica
        assert {k for k, p in replica.named_parameters() if p.requires_grad} == set(la.posterior.fit.layout.names)
    with pytest.raises(AssertionError, match="went below"):
        Laplace(model, "regression", "all", "full").fit([(x, y)])


SOME = torch.tensor([0, 3])


@pytest.mark.parametrize(
    ("told", "says"),
    [
        ({"subset_of_weights": []}, "empty list"),
        ({"subset_of_weights": ["encodr.0"]}, r"'encodr.0' matches no parameter.*Nearest: 'encoder.0'"),
        ({"subset_of_weights": ["fc1", "zzz*"]}, r"'zzz\*' matches no.*The network has: 'encoder'"),
        ({"subset_of_weights": "fc2"}, r"'fc2' is neither an option nor a name.*'all'.*Nearest: 'fc1'"),
        ({"subset_of_weights": ""}, "is neither an option nor a name"),
        ({"subset_of_weights": 3}, r"=3 is a int. Valid: 'last_layer', 'all', 'subnetwork'.*predicate"),
        ({"subset_of_weights": [0, 1]}, "is a list"),
        ({"subset_of_weights": nn.Linear(1, 1)}, "is a Linear"),
        ({"subset_of_weights": None}, "is a NoneType"),
        ({"subset_of_weights": lambda name, p: p.sum() > 0}, r"a Tensor, for 'encoder.0.weight'.*write bool\(...\)"),
        ({"subset_of_weights": lambda name, p: None}, "a NoneType, for"),
        ({"subset_of_weights": lambda name, p: False}, "takes no parameter of 'encoder.0.weight'"),
        ({"subset_of_weights": "subnetwork"}, "needs subnetwork_indices="),
        ({"subset_of_weights": "all", "subnetwork_indices": SOME}, "belongs to subset_of_weights='subnetwork'"),
        ({"subset_of_weights": ["fc1"], "subnetwork_indices": SOME}, "belongs to subset_of_weights='subnetwork'"),
    ],
)  # fmt: skip
def test_a_wrong_choice_says_what_is_right(told, says):
    with pytest.raises(OptionError, match=says):
        Laplace(Body(), "regression", hessian_structure="diag", **told)


@pytest.mark.parametrize(
    ("indices", "says"),
    [
        (torch.tensor([], dtype=torch.long), "is empty"),
        (torch.tensor([0, -1]), "holds -1; weights are numbered from 0"),
        (torch.tensor([0, 47]), "go up to 47; the network has 47 trainable weights, numbered from 0 to 46"),
        (torch.tensor([1, 2, 1, 2, 3]), r"holds 2 of its 5 values more than once.*indices.unique\(\)"),
        (torch.tensor([0.0, 1.0]), "dtype torch.float32"),
        (torch.tensor([True, False]), r"dtype torch.bool.*mask.flatten\(\).nonzero\(\).flatten\(\)"),
        (torch.tensor([[0, 1]]), r"shape \(1, 2\); a vector"),
        (torch.tensor(3), r"shape \(\)"),
        ([0, 1.5], "is a list; a vector or a list of whole numbers is needed. Write subnetwork_indices=torch.tensor"),
        ([True, False], "is a list; a vector or a list of whole numbers"),
        ([], "is empty"),
    ],
)
def test_wrong_indices_say_what_is_right(indices, says):
    with pytest.raises(OptionError, match=says):
        Laplace(Body(), "regression", "subnetwork", "diag", subnetwork_indices=indices)


@pytest.mark.parametrize("indices", [[0, 3, 5], (0, 3, 5), torch.tensor([0, 3, 5], dtype=torch.int32)], ids=str)
def test_indices_may_be_a_list_or_short_numbers(indices):
    given = Laplace(Body(), "regression", "subnetwork", "diag", subnetwork_indices=indices).subnetwork_indices
    assert torch.equal(given, torch.tensor([0, 3, 5]))


@pytest.mark.parametrize("predicate", [lambda name: True, lambda: True, lambda a, b, c: True])
def test_a_predicate_of_other_arguments_is_told_which_it_gets(predicate):
    with pytest.raises(OptionError, match=r"cannot be called with two arguments.*write lambda name, p:"):
        Laplace(Body(), "regression", predicate, "diag")


def test_a_structure_of_whole_tensors_names_those_that_serve_scattered_weights():
    with pytest.raises(UnsupportedError, match=r"'kron' needs whole tensors.*\(encoder.0.weight\).*'full'.*'diag'"):
        Laplace(Body(), "regression", "subnetwork", subnetwork_indices=SOME)
