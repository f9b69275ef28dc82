"""Classes of combinations construct ours, take laplace-torch's order, and are what `isinstance` accepts."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import laplace
from laplace import Laplace
from laplace.curvature import AsdlEF, CurvlinopsGGN
from laplace.errors import OptionError
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
