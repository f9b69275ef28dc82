"""Which points are kept, and what is not to be had of a posterior over functions."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from exact import assert_close
from laplace import Laplace
from laplace.backprop.activations import Stored
from laplace.backprop.outer import Outer
from laplace.curvature import OutputCurvature
from laplace.errors import InputError, MemoryBudgetError, OptionError, UnsupportedError
from laplace.network.inputs import Inputs
from laplace.structures.functional import GP, Nystrom
from laplace.structures.functional.subset import Subset
from laplace.weights import Layout
from networks import cut, make


def kept(la: Laplace) -> torch.Tensor:
    return torch.cat([part.inputs.x for part in la.posterior.fit.points.parts])


def fitted(**options):
    model, x, y = make("mlp", "classification")
    return Laplace(model, "classification", hessian_structure="gp", **options).fit(cut(x, y, 6)), x, y


def test_the_points_do_not_depend_on_how_the_data_was_cut():
    model, x, y = make("mlp", "classification")
    fits = [
        Laplace(model, "classification", "all", "gp", n_subset=7, seed=2).fit(cut(x, y, s)) for s in (23, 5, [1, 9])
    ]
    for la in fits[1:]:
        assert torch.equal(kept(la), kept(fits[0]))
        assert_close(la.log_marginal_likelihood(), fits[0].log_marginal_likelihood())
    assert not torch.equal(kept(fitted(n_subset=7, seed=3)[0]), kept(fits[0]))


def test_every_point_is_as_likely_as_any_other():
    x, counts = torch.arange(10.0).reshape(10, 1), torch.zeros(10)
    for seed in range(300):
        subset = Subset(3, seed)
        for part in x.split(4):
            places = part.flatten().long()
            subset.see(Inputs(part), OutputCurvature(diagonal=torch.ones_like(part)), places)
        points = subset.points(10, 3, lambda curvature, repeats: repeats * curvature.root())
        index = torch.cat([part.inputs.x for part in points.parts]).flatten().long()
        assert len(set(index.tolist())) == len(points) == 3
        assert all(torch.equal(part.y, torch.full_like(part.y, 10 / 3)) for part in points.parts)
        counts[index] += 1
    assert float((counts - 90).abs().max()) < 4 * (300 * 0.3 * 0.7) ** 0.5


def test_a_loader_may_reuse_its_memory_and_be_read_once():
    model, x, y = make("mlp", "classification")
    buffer = x[:6].clone()

    def loader():
        for a, b in cut(x, y, 6):
            buffer[: len(a)] = a
            yield buffer[: len(a)], b

    la = Laplace(model, "classification", hessian_structure="gp").fit(loader())
    assert torch.equal(kept(la), x)


def test_all_points_up_to_a_stated_number():
    model, x = nn.Linear(2, 1).double(), torch.randn(300, 2, dtype=torch.float64)
    la = Laplace(model, "regression", hessian_structure="gp").fit(cut(x, x[:, :1], 50))
    assert len(kept(la)) == 256
    assert la.n_data == 300


class ByName(nn.Module):
    """Mappings as inputs, of several lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(9, 4), nn.Linear(4, 2)

    def forward(self, input_ids, attention_mask):
        h = self.embed(input_ids) * attention_mask.unsqueeze(-1)
        return self.head(h.sum(1))


def test_mappings_of_several_lengths_are_kept_and_saved(tmp_path):
    torch.manual_seed(0)
    model = ByName().double()
    batches = [
        {"input_ids": torch.randint(9, (4, t)), "attention_mask": torch.ones(4, t), "labels": torch.randint(2, (4,))}
        for t in (3, 3, 5)
    ]
    full, gp = (Laplace(model, "classification", "all", s).fit(batches) for s in ("full", "gp"))
    assert_close(gp.log_marginal_likelihood(), full.log_marginal_likelihood())
    assert_close(gp(batches[0]), full(batches[0]))
    torch.save(gp.state_dict(with_data=True), tmp_path / "gp.pt")
    again = Laplace(model, "classification", "all", "gp")
    again.load_state_dict(torch.load(tmp_path / "gp.pt", weights_only=True))
    assert torch.equal(again(batches[2]), gp(batches[2]))


@pytest.mark.parametrize("subset", ["last_layer", "all"])
@pytest.mark.parametrize("independent", [False, True])
def test_a_state_holds_data_and_is_given_only_when_asked_for(subset, independent, tmp_path):
    options = {"subset_of_weights": subset, "n_subset": 5, "independent_outputs": independent}
    la, x, _ = fitted(**options)
    with pytest.raises(UnsupportedError, match=r"5 inputs of the training data.*state_dict\(with_data=True\)"):
        la.state_dict()
    la.prior_precision = 3.0
    torch.save(la.state_dict(with_data=True), tmp_path / "gp.pt")
    again = Laplace(la.model, "classification", hessian_structure="gp", **options)
    again.load_state_dict(torch.load(tmp_path / "gp.pt", weights_only=True))
    assert torch.equal(again(x), la(x))
    assert torch.equal(again.log_marginal_likelihood(), la.log_marginal_likelihood())
    state = la.state_dict(with_data=True)
    for key in [key for key in state if key.startswith("points/")]:
        with pytest.raises(InputError, match=f"{key} is missing"):
            again.load_state_dict({k: v for k, v in state.items() if k != key})
    options["independent_outputs"] = not independent
    other = Laplace(la.model, "classification", hessian_structure="gp", **options)
    with pytest.raises(InputError, match=r"the state has structure=.*independent_outputs"):
        other.load_state_dict(la.state_dict(with_data=True))


def test_copies_and_moves_predict_the_same():
    la, x, _ = fitted(subset_of_weights="all", n_subset=5)
    expected = la(x)
    assert torch.equal(copy.deepcopy(la)(x), expected)
    assert torch.equal(la.to("cpu")(x), expected)


@pytest.mark.parametrize("approximation", ["sod", "nystrom", "variational"])
def test_what_is_asked_of_weights_says_what_there_is(approximation):
    la, x, y = fitted(functional_approximation=approximation)
    jacobians = torch.zeros(2, 3, la.n_params, dtype=torch.float64)
    for ask in (
        lambda: la.sample(2),
        lambda: la.H,
        lambda: la.posterior_precision,
        lambda: la.posterior_covariance,
        lambda: la.posterior_variance,
        lambda: la.posterior_scale,
        lambda: la.square_norm(la.mean),
        lambda: la.log_prob(la.mean),
        lambda: la.functional_variance(jacobians),
        lambda: la.functional_covariance(jacobians),
    ):
        with pytest.raises(UnsupportedError, match=r"posterior over functions and has no .* It has la\(x\)"):
            ask()
    for ask in (
        lambda: la(x, pred_type="nn"),
        lambda: la.predict(x, pred_type="nn"),
        lambda: la.functional_samples(x, pred_type="nn"),
        lambda: la.optimize_prior_precision("nn", "gridsearch", val_loader=cut(x, y, 9)),
    ):
        with pytest.raises(UnsupportedError, match=r"pred_type='nn' draws weights.*pred_type='glm'"):
            ask()
    with pytest.raises(UnsupportedError, match=r"override=False.*Fit all data at once"):
        la.fit(cut(x, y, 6), override=False)
    with pytest.raises(
        OptionError, match=r"per weight \(24 values\) cannot be added to .*kernels|has one for all weights"
    ):
        la.prior_precision = torch.ones(24)
    with pytest.raises(UnsupportedError, match="no form for prior_structure='diag'"):
        la.optimize_prior_precision(prior_structure="diag")
    assert torch.equal(la(x, pred_type="gp"), la(x))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"n_subset": 0}, "n_subset=0 must be a whole number of at least 1"),
        ({"n_subset": 2.5}, "n_subset=2.5 must be a whole number"),
        ({"n_subset": True}, "n_subset=True must be a whole number"),
        ({"seed": -1}, "seed=-1 must be a whole number of at least 0"),
        ({"seed": "a"}, "seed='a' must be"),
        ({"independent_outputs": 1}, "independent_outputs=1 must be True or False"),
        ({"functional_approximation": "svgp"}, r"functional_approximation='svgp'.*'sod', 'nystrom', 'variational'"),
        ({"inducing": "kmeans"}, r"inducing='kmeans' belongs to .*'variational'; 'gp' with .*'sod' has no"),
        ({"functional_approximation": "variational", "inducing": "grid"}, "inducing='grid' must be 'random', 'kmeans'"),
        ({"functional_approximation": "variational", "inducing_steps": -1}, "inducing_steps=-1 must be a whole number"),
        (
            {"rank": 3},
            r"rank=3 belongs to .*'gp' with functional_approximation='nystrom'; 'gp' with .*'sod' has no",
        ),
        ({"functional_approximation": "nystrom", "rank": 0.5}, "rank=0.5 must be a whole number of at least 1"),
        ({"functional_approximation": "nystrom", "independent_outputs": True}, "independent_outputs=True belongs to"),
        ({"damping": True}, "damping=True belongs to hessian_structure='kron'"),
        ({"hessian_structure": "kron", "n_subset": 5}, "n_subset=5 belongs to hessian_structure='gp'"),
        ({"hessian_structure": "diag", "seed": 5}, "seed=5 belongs to hessian_structure='matrix_free' or 'gp'; 'diag'"),
        ({"hessian_structure": "full", "functional_approximation": "nystrom"}, "belongs to hessian_structure='gp'"),
        ({"subset_of_weights": "all", "curvature": "hessian"}, "'gp' cannot hold an exact Hessian"),
    ],
)
def test_wrong_options_say_what_is_right(options, says):
    with pytest.raises((OptionError, UnsupportedError), match=says):
        Laplace(nn.Linear(2, 2), "classification", **({"hessian_structure": "gp"} | options))


def test_more_points_than_there_are_and_inputs_without_examples_are_refused():
    model, x, y = make("mlp", "classification")
    with pytest.raises(InputError, match=r"n_subset=24 is more than the 23 examples.*at most 23"):
        Laplace(model, "classification", hessian_structure="gp", n_subset=24).fit(cut(x, y, 6))
    batch = ({"x": x, "extra": torch.zeros(1)}, y)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = model

        def forward(self, x, extra):
            return self.net(x)

    with pytest.raises(InputError, match="inputs of 23 examples cannot be split into examples"):
        Laplace(Model(), "classification", hessian_structure="gp").fit([batch])


def test_a_kernel_that_cannot_fit_is_refused_with_its_bytes():
    model, x, y = make("mlp", "classification")
    with pytest.raises(MemoryBudgetError, match=r"of 23 points with 2 vectors each needs 1\d\d kB .*smaller n_subset"):
        Laplace(model, "classification", hessian_structure="gp", memory_budget=50_000).fit(cut(x, y, 6))
    Laplace(model, "classification", hessian_structure="gp", memory_budget=50_000, n_subset=5).fit(cut(x, y, 6))


def test_memory_and_coverage_say_what_is_kept():
    la, _, _ = fitted(n_subset=6)
    assert {row.kept for row in la.coverage()} == {"kernel 12 x 12"}  # two vectors for three classes
    assert la.coverage().bytes == 2 * 8 * 12**2
    la, _, _ = fitted(n_subset=6, independent_outputs=True)
    assert {row.kept for row in la.coverage()} == {"3 kernels 6 x 6"}

    class One:
        parameters = (Outer(Stored(torch.zeros(1, 1, 7, 1)), torch.zeros(3, 1, 1, 4, 1)),)

    layout = Layout(("w",), ((4, 7),))
    sizes = [make(n).memory(One(), layout, 4) for make in (GP, Nystrom) for n in (10, 20)]
    assert sizes[1] == 4 * sizes[0] == 8 * 60**2 * 5
    assert sizes[3] > 3 * sizes[2] > 0
