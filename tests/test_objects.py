"""Options as objects: the same posteriors, summaries and files as the strings and keywords that they stand for."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from laplace import Laplace
from laplace.checkpoints import container
from laplace.checkpoints.posteriors import KIND
from laplace.curvature import CURVATURES, EF, GGN, MC, Hessian, Sketch
from laplace.errors import OptionError
from laplace.likelihoods import LIKELIHOODS, Categorical, Gaussian, Ordinal
from laplace.spec import STRUCTURE_OPTIONS
from laplace.structures import (
    GP,
    STRUCTURES,
    Dense,
    Diag,
    Ekfac,
    Full,
    Inf,
    Kron,
    LowRank,
    MatrixFree,
    Nystrom,
    Variational,
)
from laplace.structures.base import Structure
from laplace.weights import All, LastLayer, Named, Subnetwork, Subset, Where

X = torch.linspace(-2, 2, 40, dtype=torch.float64).reshape(10, 4).sin()
Y = torch.arange(10) % 3
INDICES = [0, 3, 17, 30]


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def of_first(name: str, parameter: nn.Parameter) -> bool:
    return name.startswith("0.")


STRUCTURE = [  # name, keywords, object
    ("full", {}, Full()),
    ("kron", {}, Kron()),
    ("kron", {"damping": True}, Kron(damping=True)),
    ("kron", {"damping": "balanced"}, Kron(damping="balanced")),
    ("kron", {"weight_sharing": "reduce"}, Kron(weight_sharing="reduce")),
    ("kron", {"rank": 3}, Kron(rank=3)),
    ("diag", {}, Diag()),
    ("block", {}, Dense()),
    ("ekfac", {}, Ekfac()),
    ("ekfac", {"weight_sharing": "reduce"}, Ekfac(weight_sharing="reduce")),
    ("inf", {}, Inf()),
    ("inf", {"rank": 2}, Inf(rank=2)),
    ("inf", {"rank": 0.5, "weight_sharing": "reduce"}, Inf(rank=0.5, weight_sharing="reduce")),
    ("lowrank", {}, LowRank()),
    ("lowrank", {"rank": 5}, LowRank(rank=5)),
    ("lowrank", {"tol": 0.1}, LowRank(tol=0.1)),
    ("matrix_free", {}, MatrixFree()),
    ("matrix_free", {"rank": 7, "seed": 3}, MatrixFree(rank=7, seed=3)),
    ("gp", {}, GP()),
    ("gp", {"n_subset": 6, "seed": 3}, GP(n_subset=6, seed=3)),
    ("gp", {"independent_outputs": True}, GP(independent_outputs=True)),
    ("gp", {"functional_approximation": "nystrom", "rank": 4}, Nystrom(rank=4)),
    ("gp", {"functional_approximation": "nystrom", "n_subset": 5, "seed": 1}, Nystrom(n_subset=5, seed=1)),
    ("gp", {"functional_approximation": "variational", "inducing_steps": 3}, Variational(inducing_steps=3)),
    (
        "gp",
        {"functional_approximation": "variational", "n_subset": 5, "seed": 1, "inducing": "kmeans"},
        Variational(n_subset=5, seed=1, inducing="kmeans"),
    ),
]
SUBSET = [
    ("last_layer", {}, LastLayer()),
    ("last_layer", {"last_layer_name": "2"}, LastLayer(name="2")),
    ("last_layer", {"feature_reduction": "average"}, LastLayer(reduction="average")),
    ("all", {}, All()),
    ("subnetwork", {"subnetwork_indices": torch.tensor(INDICES)}, Subnetwork(INDICES)),
    (["0.*"], {}, Named(["0.*"])),
    ("2.weight", {}, Named("2.weight")),
    (of_first, {}, Where(of_first)),
]
CURVATURE = [
    ("ggn", {}, GGN()),
    ("sketch", {}, Sketch()),
    ("sketch", {"curvature_samples": 4}, Sketch(samples=4)),
    ("mc", {"curvature_samples": 3}, MC(samples=3)),
    ("ef", {}, EF()),
    ("hessian", {}, Hessian()),
]


def ids(cases):
    return [repr(case[2])[:40] for case in cases]


def assert_same(one, two) -> None:
    """Compare what two files hold; safetensors writes its tensors in no fixed order."""
    assert type(one) is type(two)
    if isinstance(one, dict):
        assert one.keys() == two.keys()
        one, two = [*one.values()], [two[key] for key in one]
    if isinstance(one, list):
        assert len(one) == len(two)
        for a, b in zip(one, two, strict=True):
            assert_same(a, b)
    elif isinstance(one, torch.Tensor):
        assert one.dtype == two.dtype
        assert torch.equal(one, two)
    else:
        assert one == two


def require_equal(one: Laplace, two: Laplace, path) -> None:
    assert repr(one) == repr(two)
    seeds = [torch.Generator().manual_seed(1) for _ in range(2)]
    one.fit([(X, Y)], generator=seeds[0])
    two.fit([(X, Y)], generator=seeds[1])
    first, second = one.posterior.fit, two.posterior.fit
    assert first.sums.keys() == second.sums.keys()
    moved = "inducing_steps" in repr(one.structure)  # by gradients, which round as memory lies
    rereads = one.structure.rereads  # and times two ways of multiplying, which round differently
    alike = torch.allclose if moved or rereads else torch.equal
    assert all(alike(first.sums[key], second.sums[key]) for key in first.sums)
    assert alike(one.log_marginal_likelihood(), two.log_marginal_likelihood())
    assert alike(one(X), two(X))
    assert moved or repr(one) == repr(two)
    one.save(path / "one", with_data=True)
    two.save(path / "two", with_data=True)
    if not moved:
        assert_same(*(container.read(path / name, KIND) for name in ("one", "two")))
    again = Laplace.load(path / "two", two.model, **({"data": [(X, Y)]} if rereads else {}))
    torch.testing.assert_close(again(X), two(X))
    assert again.structure == two.structure


@pytest.mark.parametrize(("name", "keywords", "given"), STRUCTURE, ids=ids(STRUCTURE))
def test_a_structure_is_what_its_name_and_keywords_are(name, keywords, given, tmp_path):
    model = network()
    by_name = Laplace(model, "classification", "all", name, **keywords)
    by_object = Laplace(model, "classification", "all", given)
    require_equal(by_name, by_object, tmp_path)


@pytest.mark.parametrize(("name", "keywords", "given"), SUBSET, ids=ids(SUBSET))
def test_a_subset_is_what_its_name_and_keywords_are(name, keywords, given, tmp_path):
    model = network()
    by_name = Laplace(model, "classification", name, "diag", **keywords)
    by_object = Laplace(model, "classification", given, "diag")
    require_equal(by_name, by_object, tmp_path)


@pytest.mark.parametrize(("name", "keywords", "given"), CURVATURE, ids=ids(CURVATURE))
def test_a_curvature_is_what_its_name_and_keywords_are(name, keywords, given, tmp_path):
    model = network()
    by_name = Laplace(model, "classification", "all", "diag", curvature=name, **keywords)
    by_object = Laplace(model, "classification", "all", "diag", curvature=given)
    require_equal(by_name, by_object, tmp_path)


def test_every_option_of_every_part_is_compared_above():
    by_keyword = [(given, key) for _, _, given in STRUCTURE for key in given.options if key in STRUCTURE_OPTIONS]
    options = {(type(given), key) for given, key in by_keyword}
    assert {type(given) for _, _, given in STRUCTURE} == {*STRUCTURES.values(), GP, Nystrom, Variational}
    away = {(type(given), key) for given, key in by_keyword if f"{key}=" in repr(given)}
    assert away == options
    assert {type(given) for _, _, given in CURVATURE} == {*CURVATURES.values()}
    assert {type(given) for _, _, given in SUBSET} == {LastLayer, All, Subnetwork, Named, Where}


def test_all_parts_may_be_objects_at_once(tmp_path):
    model = network()
    by_name = Laplace(model, Categorical(label_smoothing=0.1), "last_layer", "kron", last_layer_name="2", damping=True)
    by_object = Laplace(model, Categorical(label_smoothing=0.1), LastLayer(name="2"), Kron(damping=True))
    require_equal(by_name, by_object, tmp_path)


@pytest.mark.parametrize("given", [case[2] for case in STRUCTURE + SUBSET[:-1] + CURVATURE], ids=repr)
def test_a_representation_can_be_typed_back(given):
    again = eval(repr(given), {type(given).__name__: type(given)})  # noqa: S307
    assert again == given
    assert hash(again) == hash(given)
    assert repr(again) == repr(given)


@pytest.mark.parametrize("name", LIKELIHOODS)
def test_a_likelihood_can_be_typed_back(name):
    made = {
        "classification": Categorical(label_smoothing=0.1, class_weights=[1.0, 2.0], ignore_index=-1),
        "regression": Gaussian([0.5, 2.0]),
        "ordinal": Ordinal([-1.0, 0.5]),
    }.get(name) or LIKELIHOODS[name]()
    again = eval(repr(made), {type(made).__name__: type(made)})  # noqa: S307
    assert again.described == made.described


def test_representations_hold_what_differs_from_the_default():
    assert repr(Kron(damping="balanced")) == "Kron(damping='balanced')"
    assert repr(LastLayer(name="head")) == "LastLayer(name='head')"
    assert repr(Sketch(samples=4)) == "Sketch(samples=4)"
    assert repr(Subnetwork([1, 2])) == "Subnetwork([1, 2])"
    assert repr(Subnetwork(range(1000))) == "<Subnetwork of 1,000 weights: 0, 1, 2, ..., 997, 998, 999>"


def test_parts_are_equal_by_value():
    assert Kron() == Kron(damping=False)
    assert Kron() != Kron(damping=True)
    assert Kron() != Ekfac()
    assert Inf(rank=1) != Inf(rank=1.5 / 1.5 * 0.5)
    assert LastLayer("a") == LastLayer(name="a") != LastLayer("b")
    assert Subnetwork([1, 2]) == Subnetwork(torch.tensor([1, 2])) != Subnetwork([1, 3])
    assert Named(["a"]) != Named(["b"])
    assert All() == All() != "all"
    assert Where(of_first) == Where(of_first)
    assert Sketch(2) == Sketch(samples=2) != MC(2)


@pytest.mark.parametrize("given", [case[2] for case in STRUCTURE], ids=repr)
def test_an_object_that_is_passed_in_stays_as_it_is(given):
    before = copy.deepcopy(vars(given))
    la = Laplace(network(), "classification", "all", given, memory_budget=10**9)
    la.fit([(X, Y)])
    assert la.hessian_structure is given
    assert la.structure is not given
    assert vars(given) == before


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Kron(damping="some"), r"^damping='some' is not an option. Valid: False, True, 'balanced'"),
        (lambda: Kron(weight_sharing="no"), r"^weight_sharing='no' is not an option. Valid: 'expand', 'reduce'"),
        (lambda: Ekfac(weight_sharing=None), r"^weight_sharing=None is not"),  # type: ignore[arg-type]
        (lambda: Inf(rank=-1), r"^rank=-1 must be a whole number of at least 1"),
        (lambda: LowRank(rank=0), r"^rank=0 must be a whole number"),
        (lambda: LowRank(tol=2.0), r"^tol=2.0 must lie between 0 and 1"),
        (lambda: GP(n_subset=0), r"^n_subset=0 must be a whole number"),
        (lambda: GP(seed=-1), r"^seed=-1 must be a whole number"),
        (lambda: Nystrom(rank="x"), r"^rank='x' must be a whole number"),  # type: ignore[arg-type]
        (lambda: LastLayer(name=3), r"^name=3 must be the name of a module, as in name='head'"),  # type: ignore[arg-type]
        (lambda: LastLayer(reduction="max"), r"^reduction='max' is not an option. Valid: 'pick_first'"),
        (lambda: Subnetwork([]), r"^indices has dtype|^indices is empty"),
        (lambda: Subnetwork([1, 1]), r"^indices holds 1 of its 2 values more than once"),
        (lambda: Subnetwork("all"), r"^indices='all' is a str"),  # type: ignore[arg-type]
        (lambda: Named([]), r"^patterns=\[\] is empty. Write Named\("),
        (lambda: Named(3), r"^patterns=3 must be names or globs"),  # type: ignore[arg-type]
        (lambda: Named([3]), r"^patterns=\[3\] must be names or globs"),  # type: ignore[list-item]
        (lambda: Where(3), r"^predicate=3 cannot be called with two arguments"),  # type: ignore[arg-type]
        (lambda: Where(lambda name: True), r"cannot be called with two arguments"),  # type: ignore[arg-type]
        (lambda: Sketch(samples=0), r"^samples=0 must be a whole number"),
        (lambda: MC(samples="4"), r"^samples='4' must be a whole number"),  # type: ignore[arg-type]
    ],
)
def test_a_wrong_argument_is_refused_under_its_own_name(make, said):
    with pytest.raises(OptionError, match=said):
        make()


@pytest.mark.parametrize(
    ("keywords", "said"),
    [
        ({"last_layer_name": 3}, r"^last_layer_name=3 must be"),
        ({"feature_reduction": "max"}, r"^feature_reduction='max' is not an option"),
        ({"subset_of_weights": "subnetwork", "subnetwork_indices": [1, 1]}, r"^subnetwork_indices holds 1"),
        ({"curvature": "mc", "curvature_samples": 0}, r"^curvature_samples=0 must be"),
        ({"subset_of_weights": []}, r"^subset_of_weights is an empty list"),
        ({"subset_of_weights": LastLayer}, r"^subset_of_weights=LastLayer is a class; give an object: LastLayer\("),
        ({"hessian_structure": Kron}, r"^hessian_structure=Kron is a class; give an object: Kron\(\)"),
        ({"curvature": Sketch}, r"^curvature=Sketch is a class"),
        (
            {"hessian_structure": Kron(), "damping": True},
            r"^damping=True contradicts the object .*=Kron\(\). Write hessian_structure=Kron\(damping=True\)",
        ),
        (
            {"hessian_structure": Kron(), "rank": 3},
            r"^rank=3 contradicts the object hessian_structure=Kron\(\). Write hessian_structure=Kron\(rank=3\).",
        ),
        ({"hessian_structure": Diag(), "rank": 3}, r"Diag has no such option; it has none"),
        (
            {"subset_of_weights": LastLayer("2"), "last_layer_name": "0"},
            r"contradict the object .*LastLayer\(name='2'\)\. Write only subset_of_weights=LastLayer\(name='0'\)",
        ),
        (
            {"subset_of_weights": All(), "subnetwork_indices": [1]},
            r"^subnetwork_indices= contradicts the object .*Write only subset_of_weights=Subnetwork\(indices\)",
        ),
        ({"curvature": Sketch(4), "curvature_samples": 2}, r"^curvature=Sketch\(samples=4\) is complete"),
    ],
)
def test_a_keyword_that_is_wrong_or_contradicts_an_object_is_refused(keywords, said):
    with pytest.raises(OptionError, match=said):
        Laplace(network(), "classification", **keywords)


def test_a_keyword_that_says_what_the_object_says_is_taken():
    la = Laplace(
        network(),
        "classification",
        Subnetwork(INDICES),
        LowRank(rank=3),
        rank=3,
        subnetwork_indices=torch.tensor(INDICES),
    )
    assert la.structure == LowRank(rank=3)


def test_out_of_tree_parts_have_what_the_base_classes_give():
    class Mine(Diag):
        name = "mine"
        options = ("power",)

        def __init__(self, power: float = 1.0) -> None:
            self.power = power

    class Biases(Where):
        def __init__(self) -> None:
            super().__init__(lambda name, p: name.endswith("bias"))

        @property
        def options(self):
            return {}

    assert isinstance(Mine(), Structure)
    assert isinstance(Biases(), Subset)
    assert repr(Mine(2.0)) == "Mine(power=2.0)"
    assert repr(Biases()) == "Biases()"
    la = Laplace(network(), "classification", Biases(), Mine(2.0)).fit([(X, Y)])
    assert la.n_params == 8
    assert "mine, power=2.0" in repr(la)
