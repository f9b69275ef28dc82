"""A mixture of Laplaces has the Gaussians of its members, weighted."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from laplace import Laplace
from laplace.decisions import acquire
from laplace.errors import NotFittedError, OptionError
from laplace.rivals import Ensemble, Mixture

X = torch.randn(9, 3, generator=torch.Generator().manual_seed(0)).double()
NEW = torch.randn(6, 3, generator=torch.Generator().manual_seed(1)).double()
WEIGHTS = (0.5, 0.2, 0.3)
Y = {
    "classification": torch.arange(9) % 3,
    "multilabel": (torch.arange(18).reshape(9, 2) % 3 == 0).double(),
    "regression": X[:, :2].sin(),
    "poisson": (torch.arange(18).reshape(9, 2) % 4).double(),
}


def fitted(likelihood: str, **options) -> list[Laplace]:
    torch.manual_seed(3)
    outputs = 3 if likelihood == "classification" else 2
    nets = [nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, outputs)).double() for _ in range(3)]
    return [Laplace(net, likelihood, prior_precision=2.0, **options).fit([(X, Y[likelihood])]) for net in nets]


def close(found: Tensor, expected: Tensor, rtol: float = 1e-9) -> None:
    torch.testing.assert_close(found, expected, rtol=rtol, atol=1e-12)


def weighted(values: list[Tensor]) -> Tensor:
    return torch.einsum("k,k...->...", torch.tensor(WEIGHTS, dtype=torch.float64), torch.stack(values))


@pytest.mark.parametrize("link", [None, "probit", "one_vs_rest", "bridge", "delta"])
@pytest.mark.parametrize("subset", ["last_layer", "all"])
def test_class_probabilities_are_the_weighted_mean_of_the_members(link, subset):
    members = fitted("classification", subset_of_weights=subset)
    found = Mixture(members, WEIGHTS).predict(NEW, link_approx=link)
    close(found.mean, weighted([la.predict(NEW, link_approx=link).mean for la in members]))


def test_members_keep_their_own_temperature_and_the_mixture_has_one_besides():
    members = fitted("classification")
    members[0].softmax_temperature = 3.0
    close(Mixture(members, WEIGHTS).predict(NEW).mean, weighted([la.predict(NEW).mean for la in members]))
    for la in members:
        la.softmax_temperature *= 2.0
    twice = weighted([la.predict(NEW).mean for la in members])
    for la in members:
        la.softmax_temperature /= 2.0
    close(Mixture(members, WEIGHTS, softmax_temperature=2.0).predict(NEW).mean, twice)


def test_the_epistemic_part_is_the_information_about_member_and_weights():
    members = fitted("classification")
    found = Mixture(members, WEIGHTS).predict(NEW, link_approx="mc", n_samples=3000)
    generator = torch.Generator().manual_seed(0)
    drawn = [la.predictive_samples(NEW, n_samples=20000, generator=generator) for la in members]  # (S, N, C)
    mean = weighted([p.mean(0) for p in drawn])
    entropies = weighted([torch.special.entr(p).sum(-1).mean(0) for p in drawn])
    torch.testing.assert_close(found.mean, mean, rtol=0, atol=5e-3)
    torch.testing.assert_close(found.epistemic, torch.special.entr(mean).sum(-1) - entropies, rtol=0.03, atol=2e-3)


def test_labels_are_weighted():
    members = fitted("multilabel")
    close(Mixture(members, WEIGHTS).predict(NEW).mean, weighted([la.predict(NEW).mean for la in members]))


@pytest.mark.parametrize("structure", ["kron", "full"])
def test_regression_obeys_the_law_of_total_variance(structure):
    members = fitted("regression", hessian_structure=structure)
    for la, sigma in zip(members, (0.2, 0.5, 1.0), strict=True):
        la.sigma_noise = sigma
    mixture = Mixture(members, WEIGHTS)
    mean = weighted([la(NEW)[0] for la in members])
    off = [la(NEW)[0] - mean for la in members]
    covariance = weighted([la(NEW)[1] + d.unsqueeze(2) * d.unsqueeze(1) for la, d in zip(members, off, strict=True)])
    noise = weighted([la.sigma_noise.square().double() for la in members])
    found = mixture.predict(NEW)
    close(found.mean, mean)
    close(found.epistemic, covariance.diagonal(dim1=1, dim2=2))
    close(found.aleatoric, noise.expand_as(mean), 1e-6)
    close(mixture(NEW)[1], covariance)
    joint = mixture(NEW, joint=True)[1]
    moved = [la(NEW, joint=True)[1] + torch.outer(d.flatten(), d.flatten()) for la, d in zip(members, off, strict=True)]
    close(joint, weighted(moved))
    assert len(acquire(mixture, NEW, 2).indices) == 2


def test_counts_are_a_mixture_of_the_members_distributions():
    members = fitted("poisson")
    found, y = Mixture(members, WEIGHTS).predict(NEW), torch.tensor([1.0, 4.0]).double().expand(6, 2)
    each = [la.predict(NEW) for la in members]
    mean = weighted([p.mean for p in each])
    close(found.mean, mean)
    close(found.distribution.log_prob(y), weighted([p.distribution.log_prob(y).exp() for p in each]).log(), 1e-7)
    close(found.distribution.cdf(y), weighted([p.distribution.cdf(y) for p in each]), 1e-7)
    second = weighted([p.epistemic + p.mean.square() for p in each])
    close(found.epistemic, second - mean.square(), 1e-7)
    close(found.variance, found.distribution.variance)
    low, high = found.interval(0.9)
    assert (low < found.mean).all()
    assert (high > found.mean).all()
    drawn = found.distribution.sample((4000,))
    torch.testing.assert_close(drawn.mean(0), mean, rtol=0.2, atol=0.1)


def test_functions_come_from_the_members_in_proportion_to_their_weights():
    mixture = Mixture(fitted("classification"), WEIGHTS)
    drawn = mixture.functional_samples(NEW, n_samples=10)
    assert drawn.shape == (10, 6, 3)
    assert len(acquire(mixture, NEW, 2, "batch_bald", n_samples=20).indices) == 2
    low, high = mixture.predict(NEW).interval(0.9)
    assert (low < high).all()


def test_a_mixture_of_narrow_posteriors_is_the_ensemble():
    members = fitted("classification")
    for la in members:
        la.prior_precision = 1e12
    ensemble = Ensemble([la.model for la in members], "classification", WEIGHTS).predict(NEW)
    found = Mixture(members, WEIGHTS).predict(NEW, link_approx="probit")
    close(found.mean, ensemble.mean, 1e-6)
    close(found.epistemic, ensemble.epistemic, 1e-4)


def test_members_may_be_rivals_and_mixtures():
    members = fitted("classification")
    ensemble = Ensemble([la.model for la in members], "classification")
    mixed = Mixture([members[0], ensemble], (0.25, 0.75)).predict(NEW)
    close(mixed.mean, 0.25 * members[0].predict(NEW).mean + 0.75 * ensemble.predict(NEW).mean)
    nested = Mixture([Mixture(members[:2]), members[2]], (0.5, 0.5)).predict(NEW)
    flat = Mixture(members, (0.25, 0.25, 0.5)).predict(NEW)
    close(nested.mean, flat.mean)
    assert mixed[:2].mean.shape == (2, 3)
    close(type(flat).cat([flat[:2], flat[2:]]).mean, flat.mean)


def test_the_noise_of_a_mixture_may_be_set_to_one_positive_number():
    mixture = Mixture(fitted("regression"))
    mixture.sigma_noise = 0.3
    close(mixture.predict(NEW).aleatoric, torch.full((6, 2), 0.09).double(), 1e-6)
    for wrong in (-1.0, 0.0, float("nan"), None, "loud", [1.0, -2.0]):
        with pytest.raises(OptionError, match="sigma_noise"):
            mixture.sigma_noise = wrong
    with pytest.raises(OptionError, match="relative to each other is that of the members"):
        mixture.sigma_noise = [1.0, 2.0]
    close(mixture.sigma_noise, torch.tensor(0.3).double(), 1e-6)
    members = fitted("regression", sigma_noise=[0.2, 0.4])
    mixture = Mixture(members)
    mixture.sigma_noise = [0.6, 1.2]  # the members' relation, on another level
    close(mixture.predict(NEW).aleatoric, torch.tensor([[0.36, 1.44]]).double().expand(6, 2), 1e-6)


def test_wrong_use_is_refused():
    with pytest.raises(OptionError, match="an empty list"):
        Mixture([])
    with pytest.raises(OptionError, match=r"members is one Laplace; write Mixture"):
        Mixture(fitted("regression")[0])
    with pytest.raises(OptionError, match="members is Linear"):
        Mixture([nn.Linear(2, 2)])
    with pytest.raises(OptionError, match="classification, regression"):
        Mixture([*fitted("classification"), *fitted("regression")])
    with pytest.raises(NotFittedError):
        Mixture([Laplace(nn.Linear(3, 2).double(), "classification")]).predict(NEW)
