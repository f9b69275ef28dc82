"""A mixture of Laplace posteriors as a BoTorch model: its members one by one are the oracle."""

from __future__ import annotations

import pytest
import torch
from botorch.acquisition import (
    LogExpectedImprovement,
    PosteriorMean,
    UpperConfidenceBound,
    qKnowledgeGradient,
    qLogExpectedImprovement,
    qLogNoisyExpectedImprovement,
)
from botorch.acquisition.objective import IdentityMCObjective, ScalarizedPosteriorTransform
from botorch.models.transforms import Log, Standardize
from botorch.optim import optimize_acqf
from botorch.sampling import SobolQMCNormalSampler
from torch import Tensor, nn

from laplace import Laplace
from laplace.errors import OptionError, UnsupportedError
from laplace.integrations.botorch import LaplaceMixtureModel, LaplaceModel


@pytest.fixture(autouse=True)
def _float64():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(before)


def members(m: int = 1, k: int = 3) -> list[LaplaceModel]:
    """Networks of their own, fitted to the same data, with different noise."""
    x = torch.rand(15, 2)
    y = torch.cat([torch.sin((3 + j) * x.sum(1, keepdim=True)) for j in range(m)], 1)
    standardize, found = Standardize(m), []
    scaled, _ = standardize(y)
    for sigma in [0.1, 0.2, 0.4][:k]:
        net = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, m))
        la = Laplace(net, "regression", "last_layer", "full", sigma_noise=sigma).fit([(x, scaled)])
        found.append(LaplaceModel(la, outcome_transform=standardize, train_X=x, train_Y=y))
    return found


def close(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a.detach(), b.detach(), atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("m", [1, 2])
@pytest.mark.parametrize("shape", [(4, 2), (5, 1, 2), (2, 3, 4, 2)])
def test_posterior_holds_those_of_the_members(m, shape):
    each, X = members(m), torch.rand(*shape)
    posterior = LaplaceMixtureModel(each).posterior(X, observation_noise=True)
    alone = [member.posterior(X, observation_noise=True) for member in each]
    assert posterior.mean.shape == (*shape[:-2], 3, shape[-2], m)
    for k, one in enumerate(alone):
        close(posterior.mean[..., k, :, :], one.mean)
        close(posterior.distribution.covariance_matrix[..., k, :, :], one.distribution.covariance_matrix)
    means, variances = torch.stack([o.mean for o in alone]), torch.stack([o.variance for o in alone])
    close(posterior.mixture_mean, means.mean(0))
    close(posterior.mixture_variance, variances.mean(0) + means.var(0, unbiased=False))


def test_acquisition_functions_are_averaged_over_the_members():
    each, X = members(), torch.rand(6, 1, 2)
    model, best = LaplaceMixtureModel(each), each[0].train_targets.max()

    def averaged(values: list[Tensor]) -> Tensor:
        return torch.stack(values).mean(0)

    close(PosteriorMean(model)(X), averaged([PosteriorMean(one)(X) for one in each]))
    close(UpperConfidenceBound(model, 2.0)(X), averaged([UpperConfidenceBound(one, 2.0)(X) for one in each]))
    improvement = [LogExpectedImprovement(one, best)(X).exp() for one in each]
    close(LogExpectedImprovement(model, best)(X).exp(), averaged(improvement))
    sampler = SobolQMCNormalSampler(torch.Size([64]), seed=0)
    drawn = [qLogExpectedImprovement(one, best, sampler=sampler)(X).exp() for one in each]
    found = qLogExpectedImprovement(model, best, sampler=SobolQMCNormalSampler(torch.Size([64]), seed=0))(X)
    torch.testing.assert_close(found.exp(), averaged(drawn), rtol=1e-6, atol=1e-9)


def test_noisy_expected_improvement_is_optimised():
    model, box = LaplaceMixtureModel(members()), torch.tensor([[0.0, 0.0], [1.0, 1.0]])
    acquisition = qLogNoisyExpectedImprovement(model, model.train_inputs[0])
    candidate, value = optimize_acqf(acquisition, box, q=1, num_restarts=2, raw_samples=32)
    grid = torch.cartesian_prod(torch.linspace(0, 1, 9), torch.linspace(0, 1, 9))[:, None]
    assert candidate.shape == (1, 2)
    assert value > acquisition(grid).max() - 1e-2


def test_gradients_flow_to_the_inputs():
    model = LaplaceMixtureModel(members(k=2))
    X = torch.rand(2, 2, 2, requires_grad=True)

    def moments(X: Tensor) -> tuple[Tensor, Tensor]:
        posterior = model.posterior(X)
        return posterior.mean, posterior.distribution.covariance_matrix

    assert torch.autograd.gradcheck(moments, (X,))


def test_outputs_observations_and_transforms_are_those_of_the_members():
    each, X, Y, at = members(2), torch.rand(3, 2), torch.randn(3, 2), torch.rand(4, 2)
    model = LaplaceMixtureModel(each)
    close(model.subset_output([1]).posterior(at).mean, model.posterior(at).mean[..., [1]])
    close(model.posterior(at, output_indices=[1]).mean, model.posterior(at).mean[..., [1]])
    conditioned = model.condition_on_observations(X, Y).posterior(at)
    for k, one in enumerate(each):
        close(conditioned.mean[k], one.condition_on_observations(X, Y).posterior(at).mean)
    difference = ScalarizedPosteriorTransform(torch.tensor([1.0, -1.0]))
    whole = model.posterior(at).mean
    close(model.posterior(at, posterior_transform=difference).mean, whole[..., :1] - whole[..., 1:])


def test_paths_are_those_of_drawn_members():
    model, X = LaplaceMixtureModel(members()), torch.rand(1, 2)
    generator = torch.Generator().manual_seed(0)
    path = model.path(generator)
    close(path(X), path(X))
    draws = torch.stack([model.path(generator)(X).flatten() for _ in range(600)])
    expected = model.posterior(X)
    error = (draws.mean(0) - expected.mixture_mean.flatten()) / (expected.mixture_variance.flatten() / 600).sqrt()
    assert error.abs().max() < 4
    ratio = draws.var(0) / expected.mixture_variance.flatten()
    assert 0.7 < float(ratio) < 1.4


def test_wrong_members_are_refused():
    with pytest.raises(OptionError, match=r"members is an empty list; write \[LaplaceModel"):
        LaplaceMixtureModel([])
    with pytest.raises(OptionError, match="members is Laplace"):
        LaplaceMixtureModel([members(k=1)[0].laplace])  # pyright: ignore[reportArgumentType]
    with pytest.raises(OptionError, match=r"\[1, 2\] outcomes"):
        LaplaceMixtureModel([*members(1, 1), *members(2, 1)])
    each = members()
    with pytest.raises(UnsupportedError, match="without batch dimensions"):
        LaplaceMixtureModel(each).condition_on_observations(torch.rand(3, 2, 2), torch.rand(3, 2, 1))
    logarithm = LaplaceModel(each[0].laplace, outcome_transform=Log())
    with pytest.raises(UnsupportedError, match="outcome_transform that is linear"):
        LaplaceMixtureModel([logarithm]).posterior(torch.rand(3, 2))


@pytest.mark.parametrize("objective", [False, True])
def test_the_knowledge_gradient_is_averaged_over_the_members(objective):
    each, X = members(), torch.rand(5, 2 + 4, 2)  # two points, and one for each of four fantasies

    def value(model) -> Tensor:
        options = {"num_fantasies": 4, "sampler": SobolQMCNormalSampler(torch.Size([4]), seed=0)}
        if objective:
            options |= {
                "objective": IdentityMCObjective(),
                "inner_sampler": SobolQMCNormalSampler(torch.Size([8]), seed=1),
            }
        return qKnowledgeGradient(model, **options)(X)

    expected = torch.stack([value(one) for one in each]).mean(0)
    found = value(LaplaceMixtureModel(each))
    assert found.shape == (5,)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-8)


def test_fantasies_of_a_mixture_are_those_of_its_members():
    each, X, Z = members(2), torch.rand(3, 2, 2), torch.rand(3, 1, 2)
    sampler = SobolQMCNormalSampler(torch.Size([4]), seed=0)
    fantasies = LaplaceMixtureModel(each).fantasize(X, sampler)
    assert fantasies.batch_shape == (4, 3, 3)
    found = fantasies.posterior(Z).mean
    for k, one in enumerate(each):
        close(found[..., k, :, :], one.fantasize(X, sampler).posterior(Z).mean)


def test_the_knowledge_gradient_of_a_mixture_can_be_maximised():
    model = LaplaceMixtureModel(members())
    bounds = torch.tensor([[0.0, 0.0], [1.0, 1.0]])
    found, value = optimize_acqf(qKnowledgeGradient(model, 4), bounds, 1, 2, 4, options={"maxiter": 5})
    assert found.shape == (1, 2)
    assert value.isfinite()
