"""Classes of combinations construct ours, take laplace-torch's order, and are what `isinstance` accepts."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import laplace
from laplace import Laplace, compat
from laplace.curvature import AsdlEF, CurvlinopsGGN
from laplace.errors import LaplaceWarning, OptionError
from laplace.utils import Kron, KronDecomposed

torch.manual_seed(0)
X, Y, CLASSES = torch.randn(11, 3).double(), torch.randn(11, 2).double(), torch.randint(2, (11,))
REGRESSION, CLASSIFICATION = [(X[:6], Y[:6]), (X[6:], Y[6:])], [(X, CLASSES)]
INDICES = torch.tensor([0, 3, 7, 12])

COMBINATIONS = {
    "FullLaplace": ("all", "full"),
    "KronLaplace": ("all", "kron"),
    "DiagLaplace": ("all", "diag"),
    "LowRankLaplace": ("all", "lowrank"),
    "FunctionalLaplace": ("all", "gp"),
    "FullLLLaplace": ("last_layer", "full"),
    "KronLLLaplace": ("last_layer", "kron"),
    "DiagLLLaplace": ("last_layer", "diag"),
    "FunctionalLLLaplace": ("last_layer", "gp"),
    "FullSubnetLaplace": ("subnetwork", "full"),
    "DiagSubnetLaplace": ("subnetwork", "diag"),
}


def network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).double()


def further(name: str) -> dict[str, object]:
    if "Functional" in name:
        return {"n_subset": 11}
    return {"subnetwork_indices": INDICES} if "Subnet" in name else {}


@pytest.mark.parametrize("name", COMBINATIONS)
@pytest.mark.parametrize(("likelihood", "data"), [("regression", REGRESSION), ("classification", CLASSIFICATION)])
def test_a_class_gives_the_numbers_of_its_combination(name, likelihood, data):
    theirs = getattr(laplace, name)(network(), likelihood, prior_precision=2.0, **further(name)).fit(data)
    ours = Laplace(network(), likelihood, *COMBINATIONS[name], prior_precision=2.0, **further(name)).fit(data)
    for a, b in zip(_tuple(theirs(X)), _tuple(ours(X)), strict=True):
        torch.testing.assert_close(a, b)
    torch.testing.assert_close(theirs.log_marginal_likelihood(), ours.log_marginal_likelihood())


def _tuple(out: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return out if isinstance(out, tuple) else (out,)


@pytest.mark.parametrize("name", COMBINATIONS)
def test_isinstance_goes_by_the_combination(name):
    la = Laplace(network(), "regression", *COMBINATIONS[name], **further(name))
    accepted = {other for other in COMBINATIONS if isinstance(la, getattr(laplace, other))}
    general = {"FullLLLaplace": "FullLaplace", "KronLLLaplace": "KronLaplace", "DiagLLLaplace": "DiagLaplace"}
    general |= {"FunctionalLLLaplace": "FunctionalLaplace", "FullSubnetLaplace": "FullLaplace"}
    general |= {"DiagSubnetLaplace": "DiagLaplace"}
    assert accepted == {name} | ({general[name]} if name in general else set())
    assert isinstance(la, laplace.BaseLaplace)
    assert isinstance(la, laplace.ParametricLaplace) != isinstance(la, laplace.BaseFunctionalLaplace)
    assert isinstance(la, laplace.LLLaplace) == name.endswith("LLLaplace") or "Functional" in name
    assert isinstance(la, laplace.SubnetLaplace) == ("Subnet" in name)
    assert not isinstance(3, laplace.BaseLaplace)


@pytest.mark.parametrize("name", COMBINATIONS)
def test_the_function_of_laplace_torch_makes_the_class_of_the_combination(name):
    weights, structure = (
        laplace.SubsetOfWeights(COMBINATIONS[name][0]),
        laplace.HessianStructure(COMBINATIONS[name][1]),
    )
    la = compat.Laplace(network(), "regression", weights, structure, prior_precision=2.0, **further(name))
    assert type(la) is getattr(laplace, name)
    assert la.prior_precision.shape == (1,)


def test_the_function_of_laplace_torch_has_its_defaults_order_and_approximations():
    assert type(compat.Laplace(network(), "regression")) is laplace.KronLLLaplace
    la = compat.Laplace(network(), "regression", "all", "full", 0.5, 3.0)
    assert (float(la.sigma_noise), float(la.prior_precision)) == (0.5, 3.0)
    for kind, name in {"nystrom": laplace.ELLA, "variational": laplace.VaLLA}.items():
        made = compat.Laplace(network(), "regression", "all", "gp", functional_approximation=kind, n_subset=5)
        assert type(made) is name
    assert type(compat.Laplace(network(), "regression", "all", "ekfac")) is Laplace
    la = compat.Laplace(network(), "classification").fit(CLASSIFICATION)
    assert la.model.last_layer is la.last_layer
    assert len(la.H.eigenvalues) == 2
    la = compat.Laplace(network(), "classification", "subnetwork", "full", subnetwork_indices=INDICES).fit(
        CLASSIFICATION
    )
    assert la.sample(3).shape == (3, 32)


def test_arguments_have_laplace_torchs_order():
    la = laplace.KronLaplace(network(), "regression", 0.5, 2.0, 0.1, 3.0, True, "a", "b", CurvlinopsGGN, True)
    assert (float(la.sigma_noise), float(la.prior_precision), float(la.prior_mean)) == (0.5, 2.0, pytest.approx(0.1))
    assert (la.temperature, la.enable_backprop, la.dict_key_x, la.dict_key_y) == (3.0, True, "a", "b")
    assert (la.curvature, la.damping) == ("ggn", True)
    la = laplace.KronLLLaplace(network(), "regression", 0.5, 2.0, 0.0, 1.0, False, None, "a", "b", AsdlEF, "2", True)
    assert (la.last_layer_name, la.damping, la.curvature) == ("2", True, "ef")
    la = laplace.FunctionalLLLaplace(network(), "regression", 7, 0.5, 2.0, 0.0, 1.0, False, None, "a", "b", "2")
    assert (la.n_subset, float(la.sigma_noise), la.last_layer_name) == (7, 0.5, "2")
    la = laplace.DiagSubnetLaplace(network(), "regression", INDICES, 0.5, 2.0)
    assert torch.equal(la.subnetwork_indices, INDICES)
    la = laplace.LowRankLaplace(network(), "regression", CurvlinopsGGN, 0.5, 2.0)
    assert (la.curvature, float(la.sigma_noise), float(la.prior_precision)) == ("ggn", 0.5, 2.0)
    la = laplace.ELLA(network(), "regression", 9, 4, 0.5, 2.0)
    assert (la.n_subset, la.rank, la.functional_approximation) == (9, 4, "nystrom")
    assert isinstance(la, laplace.ELLA)
    assert not isinstance(la, laplace.FunctionalLaplace)


def test_wrong_arguments_are_refused():
    with pytest.raises(OptionError, match=r"several classes. Write Laplace"):
        laplace.BaseLaplace(network(), "regression")
    with pytest.raises(OptionError, match="twice"):
        laplace.FullLaplace(network(), "regression", 0.5, sigma_noise=1.0)
    with pytest.raises(OptionError, match="takes 9 arguments"):
        laplace.FullLaplace(network(), "regression", *range(20))
    with pytest.raises(OptionError, match="Did you mean 'prior_precision'"):
        laplace.FullLaplace(network(), "regression", prior_precison=1.0)
    with pytest.raises(OptionError, match="curvature="):
        laplace.FullLaplace(network(), "regression", asdl_fisher_kwargs={"a": 1})


def test_a_class_may_be_subclassed():
    class Mine(laplace.DiagLaplace):
        def __init__(self, model, likelihood):
            super().__init__(model, likelihood, prior_precision=3.0)
            self.mine = True

    la = Mine(network(), "regression").fit(REGRESSION)
    assert la.mine
    assert float(la.prior_precision) == 3.0
    assert isinstance(la, laplace.DiagLaplace)
    assert not isinstance(laplace.DiagLaplace(network(), "regression"), Mine)


def test_a_subclass_whose_methods_nothing_here_calls_is_warned_of():
    with pytest.warns(LaplaceWarning, match=r"Fixed overrides functional_variance, sample, .*write a structure"):

        class Fixed(laplace.DiagLaplace):
            def sample(self, n_samples=100, generator=None):
                return self.mean.expand(n_samples, -1)

            def functional_variance(self, Js):
                return torch.ones(len(Js), Js.shape[1], Js.shape[1])

    la = Fixed(network(), "regression").fit(REGRESSION)
    assert not la.sample(3).var(0).any()
    with warnings.catch_warnings():
        warnings.simplefilter("error")

        class Counting(laplace.DiagLaplace):
            def fit(self, train_loader, **options):
                self.fits = getattr(self, "fits", 0) + 1
                return super().fit(train_loader, **options)


def test_ella_scores_and_tunes_on_validation_data():
    la = laplace.ELLA(network(), "regression", 11, 8, 0.5, 2.0)
    la.fit(REGRESSION, val_loader=REGRESSION, val_steps=3)
    (score,) = la.fit_history_["val_nll"]
    rows = [la.predict(x).distribution.log_prob(y).sum() for x, y in REGRESSION]
    assert score == pytest.approx(-float(sum(rows)) / 11)
    la.optimize_hyperparameters(REGRESSION, [0.1, (3.0, 0.7), (torch.tensor(50.0), 4.0)])
    tried = la.fit_history_["tuning"]
    assert [(each["prior_precision"], each["sigma_noise"]) for each in tried] == [
        (pytest.approx(0.1), 0.5),
        (3.0, pytest.approx(0.7)),
        (50.0, 4.0),
    ]
    best = min(tried, key=lambda each: each["val_nll"])
    assert (float(la.prior_precision), float(la.sigma_noise)) == (best["prior_precision"], best["sigma_noise"])
    with pytest.raises(ValueError, match="0 values of the grid"):
        la.optimize_hyperparameters(REGRESSION, [])
    with pytest.raises(OptionError, match="balanced=True is not available"):
        la.fit(REGRESSION, balanced=True)


def test_ella_takes_the_options_of_fit():
    x, y = (torch.cat([*parts]) for parts in zip(*REGRESSION, strict=True))
    options = {"override": True, "progress_bar": False, "batch_size": 4}
    la = laplace.ELLA(network(), "regression", 11, 8).fit(x, y=y, **options)
    torch.testing.assert_close(la.posterior.fit.n_data, 11)
    with pytest.raises(TypeError, match=r"Laplace\.fit has no option 'val_loadr'"):
        laplace.ELLA(network(), "regression", 11, 8).fit(REGRESSION, val_loadr=REGRESSION)


def test_options_may_be_given_by_their_enums():
    approximation = laplace.FunctionalApproximation.VARIATIONAL
    la = Laplace(network(), "regression", "all", "gp", functional_approximation=approximation, n_subset=3)
    assert isinstance(la, laplace.VaLLA)
    la = Laplace(network(), "classification").fit(CLASSIFICATION)
    torch.testing.assert_close(la(X, link_approx=laplace.LinkApprox.ONE_VS_REST), la.predict(X).mean)


@pytest.mark.parametrize("name", ["FullLaplace", "KronLLLaplace", "FunctionalLaplace"])
def test_the_likelihood_can_be_set_after_fit(name):
    la = getattr(laplace, name)(network(), "regression", **further(name)).fit(REGRESSION)
    mean, _ = la(X)
    la.likelihood = "classification"
    assert la.likelihood == "classification"
    torch.testing.assert_close(la(X, link_approx="mc", n_samples=3).sum(-1), torch.ones(len(X)).double())
    la.likelihood = "regression"
    torch.testing.assert_close(la(X)[0], mean)


def test_the_outputs_of_a_classifier_can_be_read_as_a_regression():
    la = laplace.KronLaplace(network(), "classification").fit(CLASSIFICATION)
    la.likelihood = "regression"
    mean, covariance = la(X)
    torch.testing.assert_close(mean, la.model(X))
    assert covariance.shape == (*mean.shape, mean.shape[1])


def test_hyperparameters_have_laplace_torchs_shapes():
    la = laplace.KronLaplace(network(), "regression", prior_precision=2.0)
    assert la.prior_precision.shape == (1,)
    assert la.prior_precision[0] == 2.0
    assert float(la.loss) == 0
    la.fit(REGRESSION)
    assert la.loss.item() == pytest.approx(Laplace(network(), "regression", "all").fit(REGRESSION).loss)
    la.prior_precision = torch.ones(4)
    assert la.prior_precision.shape == (4,)


def test_before_fit_there_are_sizes_and_zeros():
    la = laplace.KronLaplace(network(), "regression")
    assert la.n_params == 32
    assert la.n_layers == 4
    assert float(la.mean) == 0
    assert isinstance(la.H, Kron)
    assert not laplace.FullLaplace(network(), "regression").H.any()
    assert laplace.DiagLLLaplace(network(), "regression").n_params is None
    assert laplace.DiagLLLaplace(network(), "regression", last_layer_name="2").n_params == 12


def test_kron_matrices_are_those_of_the_posterior():
    la = laplace.KronLaplace(network(), "regression", prior_precision=torch.tensor([1.0, 2.0, 3.0, 4.0]).double())
    la.fit(REGRESSION)
    ours = Laplace(network(), "regression", "all", "kron", prior_precision=la.prior_precision).fit(REGRESSION)
    assert isinstance(la.H, KronDecomposed)
    torch.testing.assert_close(la.H.to_matrix(), ours.H.to_matrix())
    precision = la.posterior_precision
    torch.testing.assert_close(precision.to_matrix(), ours.posterior_precision.to_matrix())
    torch.testing.assert_close(precision.to_matrix(exponent=-1), ours.posterior_covariance)
    torch.testing.assert_close(precision.logdet(), ours.log_det_posterior_precision.to(precision.deltas))
    torch.testing.assert_close(precision.diag(exponent=-1), ours.posterior_variance)


def test_a_subnetwork_has_all_weights_in_mean_and_samples():
    model = network()
    la = laplace.FullSubnetLaplace(model, "regression", INDICES).fit(REGRESSION)
    whole = torch.cat([p.detach().flatten() for p in model.parameters()])
    assert (la.n_params, la.n_params_subnet) == (len(whole), len(INDICES))
    torch.testing.assert_close(la.mean, whole)
    torch.testing.assert_close(la.mean_subnet, whole[INDICES])
    samples = la.sample(5, generator=torch.Generator().manual_seed(0))
    fixed = torch.ones(len(whole), dtype=torch.bool).index_fill(0, INDICES, False)
    assert torch.equal(samples[:, fixed], whole[fixed].expand(5, -1))
    ours = Laplace(model, "regression", "subnetwork", "full", subnetwork_indices=INDICES).fit(REGRESSION)
    torch.testing.assert_close(samples[:, INDICES], ours.sample(5, generator=torch.Generator().manual_seed(0)))


def test_save_and_load_keep_the_class(tmp_path):
    model = network()
    la = laplace.DiagLaplace(model, "regression").fit(REGRESSION)
    la.save(tmp_path / "la.safetensors")
    again = laplace.DiagLaplace.load(tmp_path / "la.safetensors", model)
    assert type(again) is laplace.DiagLaplace
    torch.testing.assert_close(again(X)[1], la(X)[1])
    other = laplace.DiagLaplace(model, "regression")
    other.load_state_dict(state_dict=la.state_dict())
    torch.testing.assert_close(other(X)[1], la(X)[1])


def test_a_gps_state_holds_its_points():
    model = network()
    la = laplace.FunctionalLaplace(model, "regression", 11).fit(REGRESSION)
    other = laplace.FunctionalLaplace(model, "regression", 11)
    other.load_state_dict(la.state_dict())
    torch.testing.assert_close(other(X)[1], la(X)[1])


def test_mean_may_be_set():
    la = laplace.DiagLaplace(network(), "regression").fit(REGRESSION)
    la.mean = torch.zeros(32)
    assert not la.mean.any()
    torch.testing.assert_close(la.square_norm(la.mean), torch.zeros((), dtype=torch.float64))


def test_joint_makes_no_difference_for_classes():
    la = laplace.DiagLaplace(network(), "classification").fit(CLASSIFICATION)
    torch.testing.assert_close(la(X, joint=True), la(X))


def test_a_library_may_construct_an_object_from_the_names_of_the_arguments():
    la = Laplace(network(), "regression", "all", "full", sigma_noise=0.3, prior_precision=2.0)
    names = la.__init__.__code__.co_varnames
    same = type(la)(**{name: getattr(la, name) for name in names if hasattr(la, name)})
    torch.testing.assert_close(same.fit(REGRESSION)(X)[1], la.fit(REGRESSION)(X)[1])


@pytest.mark.parametrize("name", ["FullLaplace", "DiagLaplace", "KronLaplace", "KronLLLaplace", "FullSubnetLaplace"])
def test_the_curvature_may_be_set(name):
    la = getattr(laplace, name)(network(), "regression", **further(name)).fit(REGRESSION)
    before, evidence = la(X)[1], la.log_marginal_likelihood()
    la.H = la.H
    torch.testing.assert_close(la(X)[1], before)
    torch.testing.assert_close(la.log_marginal_likelihood(), evidence)
    la.H = la.H * 4.0
    other = getattr(laplace, name)(network(), "regression", sigma_noise=0.5, **further(name)).fit(REGRESSION)
    torch.testing.assert_close(la(X)[1], other(X)[1])  # as four times as much data, or half the noise
    with pytest.raises(ValueError, match="is no curvature of structure"):
        la.H = torch.ones(3)
    la.H = None
    assert not la.is_fitted


def test_before_fit_there_is_the_density_of_the_prior():
    la = laplace.DiagLaplace(network(), "regression", prior_precision=2.0)
    value = torch.linspace(-1, 1, 32, dtype=torch.float64)
    expected = torch.distributions.Normal(0.0, 2.0**-0.5).log_prob(value).sum()
    torch.testing.assert_close(la.log_prob(value), expected)
    torch.testing.assert_close(la.log_prob(value, normalized=False), -value.square().sum())
    per_tensor = laplace.DiagLaplace(network(), "regression", prior_precision=torch.tensor([2.0, 2.0, 2.0, 2.0]))
    torch.testing.assert_close(per_tensor.log_prob(value), expected)


@pytest.mark.filterwarnings("ignore:the best prior precision")
def test_a_grid_is_searched_by_a_method_that_may_be_replaced():
    class Coarse(laplace.DiagLaplace):
        def _gridsearch(self, loss, interval, val_loader, **options):
            self.seen = interval
            return super()._gridsearch(loss, interval[::2], val_loader, **options)

    options = {"method": "gridsearch", "val_loader": REGRESSION, "log_prior_prec_min": -1, "log_prior_prec_max": 1}
    la, plain = Coarse(network(), "regression").fit(REGRESSION), Laplace(network(), "regression", "all", "diag")
    la.optimize_prior_precision(**options, grid_size=5)
    torch.testing.assert_close(la.seen, torch.logspace(-1, 1, 5))
    plain.fit(REGRESSION).optimize_prior_precision(**options, grid_size=3)
    torch.testing.assert_close(la.prior_precision[0], plain.prior_precision.to(la.prior_precision))


def test_a_gp_draws_functions_whatever_is_asked_for_and_says_which_points_it_keeps():
    la = laplace.FunctionalLaplace(network(), "regression", 5)
    loader = DataLoader(TensorDataset(X, Y), batch_size=4)
    chosen = torch.cat([x for x, _ in la._get_SoD_data_loader(loader)])
    la.fit(loader)
    points = la.posterior.fit.points
    assert points is not None
    assert torch.equal(chosen, torch.cat([part.inputs.x for part in points.parts]))
    draws = [la.functional_samples(X, kind, 3, generator=torch.Generator().manual_seed(0)) for kind in ("nn", "glm")]
    assert torch.equal(*draws)


def test_valla_takes_laplace_torchs_calls():
    loader = DataLoader(TensorDataset(X, Y), batch_size=4)
    la = laplace.VaLLA(network(), "regression", "kmeans", 4, None, 0.5, 2.0)
    assert (la.num_inducing, float(la.sigma_noise), float(la.prior_precision)) == (4, 0.5, 2.0)
    assert la.inducing_locations is None
    assert isinstance(
        Laplace(network(), "regression", "all", "gp", functional_approximation="variational"), laplace.VaLLA
    )
    la.fit(loader, iterations=5, lr=1e-2, val_loader=loader, val_steps=2)
    assert la.inducing_locations.shape == (4, 3)
    first, last = la.fit_history_["objective"]
    assert last < first  # prior and noise were tuned
    assert len(la.fit_history_["val_nll"]) == 1
    mean, covariance = la(X)
    covariance = covariance + la.sigma_noise.square() * torch.eye(2)
    expected = -torch.distributions.MultivariateNormal(mean, covariance).log_prob(Y).mean()
    assert la.fit_history_["val_nll"][0] == pytest.approx(float(expected), rel=1e-5)
    where = la.inducing_locations
    la.fit(loader, iterations=5, override=False)
    assert la.fit_history_["objective"][-1] <= last + 1e-6
    assert not torch.equal(la.inducing_locations, where)
    other = laplace.VaLLA(network(), "regression", "kmeans", 4)
    other.load_state_dict(la.state_dict())
    torch.testing.assert_close(other(X)[1], la(X)[1])
    with pytest.warns(UserWarning, match="alpha=1.0 is not used"):
        la = laplace.VaLLA(network(), "classification", X[:3], inducing_classes=torch.tensor([0, 1, 0]), alpha=1.0)
    la.fit(CLASSIFICATION, iterations=3)
    assert la.num_inducing == 3
    assert la(X).shape == (11, 2)
    for options, says in (({"num_inducing": None}, "num_inducing= is needed"), ({"alpha": 2.0}, "between 0 and 1")):
        with pytest.raises(ValueError, match=says):
            laplace.VaLLA(network(), "regression", "random", **({"num_inducing": 3} | options))


def test_valla_keeps_words_where_they_are():
    words = nn.Sequential(nn.Embedding(9, 4), nn.Flatten(), nn.Linear(12, 2))
    ids = torch.arange(30).reshape(10, 3) % 9
    la = laplace.VaLLA(words, "classification", ids[:4]).fit([(ids, torch.arange(10) % 2)], iterations=5)
    assert torch.equal(la.inducing_locations, ids[:4])


def test_the_network_of_a_last_layer_has_it():
    model = network()
    la = laplace.KronLLLaplace(model, "classification").fit(CLASSIFICATION)
    assert la.model.last_layer is model[2]
    loss, Js, f, Lambda = la.backend.gp_quantities(X, CLASSES)
    torch.testing.assert_close(loss, la.loss)
    torch.testing.assert_close(f, model(X).detach())
    torch.testing.assert_close(torch.einsum("ncp,ncd,ndq->pq", Js, Lambda, Js).diagonal(), _squares(model))


def _squares(model: nn.Module) -> Tensor:
    return Laplace(model, "classification", "last_layer", "diag").fit(CLASSIFICATION).H.double()
