"""A Laplace posterior as a BoTorch model: Bayesian linear regression and dense joint covariances are the oracles."""

from __future__ import annotations

import copy
import subprocess
import sys

import pytest
import torch
from botorch.acquisition import (
    PosteriorMean,
    qKnowledgeGradient,
    qLogExpectedImprovement,
    qLogNoisyExpectedImprovement,
)
from botorch.acquisition.objective import ScalarizedPosteriorTransform
from botorch.models.transforms import Normalize, Standardize
from botorch.optim import optimize_acqf
from botorch.posteriors import GPyTorchPosterior
from botorch.sampling import SobolQMCNormalSampler
from torch import Tensor, nn

from laplace import Laplace
from laplace.errors import InputError, NotFittedError, OptionError, UnsupportedError
from laplace.integrations.botorch import LaplaceModel

NOISE, DELTA = 0.3, 2.0


@pytest.fixture(autouse=True)
def _float64():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(before)


def network(m: int = 1, d: int = 2) -> nn.Sequential:
    return nn.Sequential(nn.Linear(d, 6), nn.Tanh(), nn.Linear(6, m))


def data(n: int, m: int = 1, d: int = 2) -> tuple[Tensor, Tensor]:
    x = torch.rand(n, d)
    return x, torch.cat([torch.sin((3 + k) * x.sum(1, keepdim=True)) for k in range(m)], 1) + 0.1 * torch.randn(n, m)


def fitted(m: int = 1, weights: str = "last_layer", structure: str = "full", n: int = 20) -> Laplace:
    x, y = data(n, m)
    return Laplace(network(m), "regression", weights, structure, sigma_noise=NOISE, prior_precision=DELTA).fit([(x, y)])


class Regression:
    """Bayesian linear regression on fixed features, one output after the other, in closed form."""

    def __init__(self, features: nn.Module, x: Tensor, y: Tensor) -> None:
        self.features, phi = features, self.phi(features, x)
        self.precision = phi.T @ phi / NOISE**2 + DELTA * torch.eye(phi.shape[1])
        self.mean = torch.linalg.solve(self.precision, phi.T @ y / NOISE**2)  # (H + 1, m)

    @staticmethod
    def phi(features: nn.Module, x: Tensor) -> Tensor:
        with torch.no_grad():
            return torch.cat([features(x), torch.ones(*x.shape[:-1], 1)], -1)

    def at(self, x: Tensor) -> tuple[Tensor, Tensor]:  # (q, d) -> (q, m), (q, q) of each output
        phi = self.phi(self.features, x)
        return phi @ self.mean, phi @ torch.linalg.solve(self.precision, phi.T)

    def laplace(self, x: Tensor, y: Tensor) -> Laplace:
        """The same posterior as a network whose last layer has the mean's weights."""
        head = nn.Linear(self.mean.shape[0] - 1, self.mean.shape[1])
        with torch.no_grad():
            head.weight.copy_(self.mean[:-1].T)
            head.bias.copy_(self.mean[-1])
        model = nn.Sequential(*copy.deepcopy(self.features), head)
        la = Laplace(model, "regression", "last_layer", "full", sigma_noise=NOISE, prior_precision=DELTA)
        return la.fit([(x, y)])


def close(a: Tensor, b: Tensor, atol: float = 1e-9) -> None:
    torch.testing.assert_close(a.detach(), b.detach(), atol=atol, rtol=1e-9)


def both_outputs(covariance: Tensor, m: int) -> Tensor:
    """The covariance of m independent outputs, point after point."""
    return torch.kron(covariance, torch.eye(m))


@pytest.mark.parametrize("m", [1, 2])
def test_posterior_is_bayesian_linear_regression_for_every_batch_shape(m):
    features, (x, y) = network()[:2], data(20, m)
    oracle = Regression(features, x, y)
    model = LaplaceModel(oracle.laplace(x, y))
    for shape in [(4, 2), (1, 2), (3, 4, 2), (5, 1, 2), (2, 3, 4, 2), (1, 130, 2), (70, 3, 2)]:
        X = torch.rand(*shape)
        posterior = model.posterior(X)
        assert isinstance(posterior, GPyTorchPosterior)
        assert posterior.mean.shape == (*shape[:-1], m)
        covariance = posterior.distribution.covariance_matrix
        for index, one in zip(torch.cartesian_prod(*map(torch.arange, shape[:-2])).reshape(-1, len(shape) - 2)
                              if len(shape) > 2 else [()], X.reshape(-1, *shape[-2:]), strict=True):  # fmt: skip
            mean, each = oracle.at(one)
            close(posterior.mean[tuple(index)], mean)
            close(covariance[tuple(index)], both_outputs(each, m))


@pytest.mark.parametrize("structure", ["full", "kron", "diag", "lowrank", "gp"])
@pytest.mark.parametrize("weights", ["last_layer", "all"])
def test_blocks_are_the_joint_covariances_of_the_posterior(weights, structure):
    la = fitted(2, weights, structure)
    X = torch.rand(3, 4, 2)
    posterior = LaplaceModel(la).posterior(X)
    for b in range(3):
        mean, covariance = la(X[b], joint=True)
        close(posterior.mean[b].flatten(), mean)
        close(posterior.distribution.covariance_matrix[b], covariance)


@pytest.mark.parametrize("m", [1, 2])
def test_conditioning_equals_a_fit_to_all_data(m):
    features, (x, y), (x2, y2), (x3, y3) = network()[:2], data(15, m), data(4, m), data(3, m)
    model = LaplaceModel(Regression(features, x, y).laplace(x, y))
    model = model.condition_on_observations(x2, y2).condition_on_observations(x3, y3)
    everything = torch.cat([x, x2, x3]), torch.cat([y, y2, y3])
    refitted = LaplaceModel(Regression(features, *everything).laplace(*everything))
    for X in (torch.rand(5, 2), torch.rand(3, 4, 2)):
        now, then = model.posterior(X), refitted.posterior(X)
        close(now.mean, then.mean, 1e-8)
        close(now.distribution.covariance_matrix, then.distribution.covariance_matrix, 1e-8)


def test_sets_of_observations_side_by_side_are_conditioned_each_by_itself():
    model = LaplaceModel(fitted(2))
    X, Y, at = torch.rand(3, 2, 2), torch.randn(5, 3, 2, 2), torch.rand(3, 4, 2)
    together = model.condition_on_observations(X, Y)
    assert together.batch_shape == (5, 3)
    posterior = together.posterior(at)
    assert posterior.mean.shape == (5, 3, 4, 2)
    for i in range(5):
        for b in range(3):
            one = model.condition_on_observations(X[b], Y[i, b]).posterior(at[b])
            close(posterior.mean[i, b], one.mean)
            close(posterior.distribution.covariance_matrix[i, b], one.distribution.covariance_matrix)
    other = model.condition_on_observations(X[0], Y[:, 0]).condition_on_observations(X[1], Y[:, 1])
    one = model.condition_on_observations(X[0], Y[2, 0]).condition_on_observations(X[1], Y[2, 1])
    close(other.posterior(at[0]).mean[2], one.posterior(at[0]).mean)


def test_given_noise_replaces_that_of_the_likelihood():
    model, X, Y = LaplaceModel(fitted()), torch.rand(3, 2), torch.randn(3, 1)
    same = model.condition_on_observations(X, Y, noise=torch.full((3, 1), NOISE**2))
    close(same.posterior(X).mean, model.condition_on_observations(X, Y).posterior(X).mean)
    exact = model.condition_on_observations(X, Y, noise=torch.full((3, 1), 1e-10)).posterior(X)
    close(exact.mean, Y, 1e-5)


def test_other_weights_are_conditioned_in_the_linearised_network_or_refitted():
    la, (x, y) = fitted(weights="all"), data(20)
    X, Y, at = torch.rand(3, 2), torch.randn(3, 1), torch.rand(4, 2)
    mean, covariance = la(torch.cat([at, X]), joint=True)
    gain = torch.linalg.solve(covariance[4:, 4:] + NOISE**2 * torch.eye(3), covariance[4:, :4]).T
    plain = LaplaceModel(la).condition_on_observations(X, Y).posterior(at)
    close(plain.mean.flatten(), mean[:4] + gain @ (Y.flatten() - mean[4:]))
    close(plain.distribution.covariance_matrix, covariance[:4, :4] - gain @ covariance[4:, :4])

    def refit(all_X: Tensor, all_Y: Tensor) -> LaplaceModel:
        calls.append((all_X, all_Y))
        return model

    calls: list[tuple[Tensor, Tensor]] = []
    model = LaplaceModel(la, train_X=x, train_Y=y, refit=refit)
    assert model.condition_on_observations(X, Y) is model
    close(calls[0][0], torch.cat([x, X]))
    close(calls[0][1], torch.cat([y, Y]))
    last = LaplaceModel(fitted(), train_X=x, train_Y=y, refit=refit).condition_on_observations(X, Y)
    assert len(calls) == 1  # a last layer is conditioned exactly
    assert len(last.train_targets) == len(last.train_inputs[0]) == 23


def test_training_data_has_the_shapes_of_botorch():
    x, y = data(20, 2)
    model = LaplaceModel(fitted(2), train_X=x, train_Y=y)
    close(model.train_targets, y.T)
    more = model.condition_on_observations(torch.rand(3, 2), torch.randn(3, 2))
    assert more.train_inputs[0].shape == (23, 2)
    assert more.train_targets.shape == (2, 23)
    assert model.train_targets.shape == (2, 20)


@pytest.mark.parametrize("weights", ["last_layer", "all"])
def test_gradients_are_those_of_finite_differences(weights):
    model = LaplaceModel(fitted(2, weights))
    conditioned = model.condition_on_observations(torch.rand(2, 2), torch.randn(2, 2))
    several = model.condition_on_observations(torch.rand(2, 2, 2), torch.randn(3, 2, 2, 2))
    path = conditioned.path(torch.Generator().manual_seed(0))

    def moments(of: LaplaceModel, X: Tensor) -> tuple[Tensor, Tensor]:
        posterior = of.posterior(X, observation_noise=True)
        return posterior.mean, posterior.distribution.covariance_matrix

    X = torch.rand(2, 3, 2, requires_grad=True)
    for of in (model, conditioned, several):
        assert torch.autograd.gradcheck(lambda X, of=of: moments(of, X), (X,))
    assert torch.autograd.gradcheck(path, (X,))
    new = torch.rand(2, 2, 2, requires_grad=True)  # where fantasies would be observed
    Y = torch.randn(3, 2, 2, 2)
    assert torch.autograd.gradcheck(
        lambda new: moments(model.condition_on_observations(new, Y), torch.full((2, 1, 2), 0.3)), (new,)
    )
    assert not model.posterior(X.detach()).mean.requires_grad


def test_transforms_are_undone():
    x, y = data(25)
    raw_x, raw_y = 10 * x - 3, 50 * y + 7
    normalize, standardize = Normalize(2, bounds=torch.tensor([[-3.0, -3.0], [7.0, 7.0]])), Standardize(1)
    y_t, _ = standardize(raw_y)
    la = Laplace(network(), "regression", "last_layer", "full", sigma_noise=NOISE).fit([(normalize(raw_x), y_t)])
    model = LaplaceModel(la, normalize, standardize)
    X = 10 * torch.rand(2, 3, 2) - 3
    inner = LaplaceModel(la).posterior(normalize(X))
    posterior = model.posterior(X, observation_noise=True)
    scale = raw_y.std()
    close(posterior.mean, inner.mean * scale + raw_y.mean())
    close(posterior.variance, (inner.variance + NOISE**2) * scale**2)
    Y = 50 * torch.randn(3, 1)
    now = model.condition_on_observations(X[0], Y).posterior(X)
    then = (
        LaplaceModel(la).condition_on_observations(normalize(X[0]), (Y - raw_y.mean()) / scale).posterior(normalize(X))
    )
    close(now.mean, then.mean * scale + raw_y.mean())
    seed = [torch.Generator().manual_seed(3) for _ in range(2)]
    close(model.path(seed[0])(X), LaplaceModel(la).path(seed[1])(normalize(X)) * scale + raw_y.mean())


def test_noise_is_added_once_on_the_diagonal():
    model, X = LaplaceModel(fitted(2)), torch.rand(3, 2, 2)
    plain, noisy = model.posterior(X), model.posterior(X, observation_noise=True)
    difference = noisy.distribution.covariance_matrix - plain.distribution.covariance_matrix
    close(difference, (NOISE**2 * torch.eye(4)).expand(3, 4, 4))
    given = model.posterior(X, observation_noise=torch.tensor([[0.5, 2.0]]))
    close(given.variance - plain.variance, torch.tensor([0.5, 2.0]).expand(3, 2, 2))


def test_some_outputs_are_the_rows_of_all():
    model, X = LaplaceModel(fitted(3)), torch.rand(2, 4, 2)
    whole, some = model.posterior(X, observation_noise=True), model.subset_output([2, 0])
    assert some.num_outputs == 2
    part = some.posterior(X, observation_noise=True)
    close(part.mean, whole.mean[..., [2, 0]])
    rows = torch.tensor([3 * n + k for n in range(4) for k in (2, 0)])
    close(part.distribution.covariance_matrix, whole.distribution.covariance_matrix[:, rows][:, :, rows])
    close(model.posterior(X, output_indices=[1]).mean, whole.mean[..., [1]])
    assert model.num_outputs == 3
    close(some.subset_output([1]).posterior(X).mean, whole.mean[..., [0]])
    seeds = [torch.Generator().manual_seed(1) for _ in range(2)]
    close(some.path(seeds[0])(X), model.path(seeds[1])(X)[..., [2, 0]])
    Y = torch.randn(4, 3)
    conditioned = model.condition_on_observations(X[0], Y)
    close(conditioned.subset_output([2]).posterior(X).mean, conditioned.posterior(X).mean[..., [2]])


def test_noise_for_some_outputs_is_given_in_their_order():
    model, X, noise = LaplaceModel(fitted(2)), torch.rand(3, 4, 2), torch.tensor([[0.5, 2.0]])
    some = model.subset_output([1, 0])
    found = some.posterior(X, observation_noise=noise).variance - some.posterior(X).variance
    close(found, noise.expand(3, 4, 2))
    close(model.posterior(X, [1, 0], noise).variance, some.posterior(X, observation_noise=noise).variance)


@pytest.mark.parametrize("conditioned", [False, True])
def test_paths_are_functions_with_the_moments_of_the_posterior(conditioned):
    model, X, generator = LaplaceModel(fitted(structure="full")), torch.rand(3, 2), torch.Generator().manual_seed(0)
    if conditioned:
        model = model.condition_on_observations(torch.rand(2, 2), torch.randn(2, 1))
    path = model.path(generator)
    close(path(X), path(X))
    close(path(X.flip(0)[None]), path(X).flip(0)[None])
    close(path.posterior(X).mean, path(X))
    draws = torch.stack([model.path(generator)(X).flatten() for _ in range(700)])
    expected = model.posterior(X)
    spread = expected.distribution.covariance_matrix
    error = (draws.mean(0) - expected.mean.flatten()) / (spread.diagonal() / 700).sqrt()
    assert error.abs().max() < 4
    assert (draws.T.cov() - spread).abs().max() < 0.15 * spread.diagonal().max()


def test_nn_paths_are_the_network_with_drawn_weights():
    la = fitted(weights="all", structure="diag")
    path = LaplaceModel(la).path(torch.Generator().manual_seed(5), pred_type="nn")
    X = torch.rand(2, 3, 2)
    seed = int(torch.randint(2**31, (), generator=torch.Generator().manual_seed(5)))
    weights = la.sample(1, torch.Generator().manual_seed(seed))[0]
    drawn = copy.deepcopy(la.model)
    nn.utils.vector_to_parameters(weights, drawn.parameters())
    close(path(X), drawn(X))


def test_fantasies_are_conditions_on_draws():
    model, X = LaplaceModel(fitted(2)), torch.rand(2, 1, 2)
    sampler = SobolQMCNormalSampler(torch.Size([4]), seed=0)
    fantasy = model.fantasize(X, sampler)
    drawn = sampler(model.posterior(X, observation_noise=True))
    at = torch.rand(4, 2, 3, 2)
    close(fantasy.posterior(at).mean, model.condition_on_observations(X, drawn).posterior(at).mean)
    assert fantasy.batch_shape == (4, 2)
    noisy = model.fantasize(X, sampler, observation_noise=torch.full((1, 2), 0.5))
    assert noisy.posterior(at).variance.mean() > fantasy.posterior(at).variance.mean()


@pytest.mark.parametrize("weights", ["last_layer", "all"])
def test_acquisition_functions_find_the_best_point_of_a_grid(weights):
    la = fitted(weights=weights)
    x, y = next(iter(la.training_data))
    model, bounds = LaplaceModel(la), torch.tensor([[0.0, 0.0], [1.0, 1.0]])
    grid = torch.cartesian_prod(torch.linspace(0, 1, 15), torch.linspace(0, 1, 15))[:, None]
    few = {"num_restarts": 6, "raw_samples": 128, "bounds": bounds, "q": 1}
    path = model.path(torch.Generator().manual_seed(0))
    for acquisition in (
        qLogExpectedImprovement(model, best_f=y.max()),
        qLogNoisyExpectedImprovement(model, x),
        PosteriorMean(path),
    ):
        candidate, value = optimize_acqf(acquisition, **few)
        assert candidate.shape == (1, 2)
        assert value > acquisition(grid).max() - 1e-3
    two, _ = optimize_acqf(qLogExpectedImprovement(model, best_f=y.max()), **{**few, "q": 2})
    assert two.shape == (2, 2)


def test_knowledge_gradient_and_scalarised_outcomes():
    model = LaplaceModel(fitted(2))
    transform = ScalarizedPosteriorTransform(torch.tensor([1.0, -1.0]))
    gradient = qKnowledgeGradient(model, num_fantasies=4, posterior_transform=transform)
    X = torch.rand(3, 5, 2, requires_grad=True)  # one point, and one for each fantasy
    gradient(X).sum().backward()
    assert X.grad is not None
    assert (X.grad[:, :1] != 0).all()
    posterior = model.posterior(X, posterior_transform=transform)
    whole = model.posterior(X)
    close(posterior.mean, whole.mean[..., :1] - whole.mean[..., 1:])


def test_a_float32_network_serves_float64_inputs():
    x, y = data(20)
    model = network().float()
    la = Laplace(model, "regression").fit([(x.float(), y.float())])
    X = torch.rand(2, 3, 2)
    posterior = LaplaceModel(la).posterior(X)
    assert posterior.mean.dtype is posterior.variance.dtype is torch.float64
    close(posterior.mean, model(X.float()).double(), 1e-6)


def test_noise_that_the_network_predicts_and_rewards():
    x, y = data(20)
    la = Laplace(network(2), "heteroscedastic", "last_layer", "full").fit([(x, y)])
    model, X = LaplaceModel(la), torch.rand(2, 3, 2)
    assert model.num_outputs == 1
    added = model.posterior(X, observation_noise=True).variance - model.posterior(X).variance
    close(added.flatten(), la.predict(X.reshape(-1, 2)).aleatoric.flatten())
    assert model.path()(X).shape == (2, 3, 1)
    pairs, better = torch.rand(10, 2, 2), torch.randint(2, (10,))
    rewards = LaplaceModel(Laplace(network(), "reward_modeling", "last_layer", "full").fit([(pairs, better)]))
    assert rewards.posterior(X).mean.shape == (2, 3, 1)
    with pytest.raises(UnsupportedError, match=r"does not say how noisy .* observation_noise="):
        rewards.posterior(X, observation_noise=True)


def test_later_changes_of_the_posterior_do_not_reach_the_model():
    la = fitted()
    model, X = LaplaceModel(la), torch.rand(3, 2)
    before = model.posterior(X).variance
    la.prior_precision = 100.0
    close(model.posterior(X).variance, before)
    assert not la.enable_backprop


def test_wrong_input_is_refused():
    with pytest.raises(OptionError, match=r"la is a Sequential; a fitted Laplace"):
        LaplaceModel(network())
    with pytest.raises(NotFittedError):
        LaplaceModel(Laplace(network(), "regression"))
    classes = Laplace(network(2), "classification").fit([(torch.rand(4, 2), torch.tensor([0, 1, 0, 1]))])
    with pytest.raises(UnsupportedError, match=r"Take Laplace\(model, 'regression'\)"):
        LaplaceModel(classes)
    model = LaplaceModel(fitted())
    with pytest.raises(OptionError, match="refit= makes a model from all data"):
        LaplaceModel(fitted(), refit=lambda X, Y: model)
    with pytest.raises(InputError, match=r"X is \(2,\); \(\*batch, q, d\)"):
        model.posterior(torch.rand(2))
    with pytest.raises(InputError, match=r"Y is \(1, 3\) .* Write Y.unsqueeze\(-1\)"):
        model.condition_on_observations(torch.rand(3, 2), torch.rand(1, 3))
    with pytest.raises(InputError, match=r"train_Y is \(3, 2\)"):
        LaplaceModel(fitted(), train_X=torch.rand(3, 2), train_Y=torch.rand(3, 2))
    with pytest.raises(InputError, match=r"are \(3, 2\) and \(3,\); tensors"):
        model.condition_on_observations(torch.rand(3, 2), torch.rand(3))
    with pytest.raises(InputError, match="Y holds NaN"):
        model.condition_on_observations(torch.rand(1, 2), torch.full((1, 1), torch.nan))
    with pytest.raises(InputError, match="must hold variances"):
        model.posterior(torch.rand(3, 2), observation_noise=torch.full((3, 1), -1.0))
    for wrong in ([1], [], [-1], "0"):
        with pytest.raises(OptionError, match="list of indices from 0 to 0"):
            model.subset_output(wrong)
    with pytest.raises(UnsupportedError, match="and then take subset_output"):
        model.subset_output([0]).condition_on_observations(torch.rand(1, 2), torch.rand(1, 1))
    with pytest.raises(UnsupportedError, match="needs pred_type='glm'"):
        model.condition_on_observations(torch.rand(1, 2), torch.rand(1, 1)).path(pred_type="nn")
    with pytest.raises(UnsupportedError, match="has no weights whose draws"):
        LaplaceModel(fitted(structure="gp")).path()
    with pytest.raises(OptionError, match="pred_type"):
        model.path(pred_type="mc")


def test_a_missing_botorch_is_named():
    code = (
        "import sys; sys.modules['botorch'] = None\n"
        "import laplace, laplace.integrations\n"
        "try: import laplace.integrations.botorch\n"
        "except ImportError as error: print(error)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "pip install 'laplace-redux[botorch]'" in run.stdout
