"""Our likelihoods pass the suite that outsiders inherit."""

from __future__ import annotations

import torch
from torch import Tensor

from laplace.likelihoods import (
    LIKELIHOODS,
    Bernoulli,
    Categorical,
    Gaussian,
    HeteroscedasticGaussian,
    Likelihood,
    Multilabel,
    Ordinal,
    Poisson,
    Preference,
    from_log_prob,
)
from laplace.testing import LikelihoodConformance

N = 6
WHOLE = torch.arange(N)
REAL = torch.linspace(-1, 2, 2 * N, dtype=torch.float64).reshape(N, 2)

CASES: dict[str, tuple[Likelihood, int, Tensor]] = {  # outputs, labels
    "Categorical": (Categorical(), 3, WHOLE % 3),
    "Gaussian": (Gaussian(), 2, REAL),
    "Bernoulli": (Bernoulli(), 1, WHOLE % 2),
    "Preference": (Preference(), 1, WHOLE % 2),
    "Multilabel": (Multilabel(), 3, torch.stack([WHOLE % 2, WHOLE // 3, (WHOLE + 1) % 2], 1)),
    "Poisson": (Poisson(), 2, torch.stack([WHOLE, WHOLE % 3], 1)),
    "Heteroscedastic": (HeteroscedasticGaussian(), 4, REAL),
    "Ordinal": (Ordinal([-1.0, 0.5]), 1, WHOLE % 3),
    "FromLogProb": (from_log_prob(lambda f, y: -0.25 * (f - y).pow(4).sum(-1) - (f - y).square().sum(-1)), 2, REAL),
}


def test_every_likelihood_is_here():  # that of given noise gets it in the batch
    assert {likelihood.name for likelihood, _, _ in CASES.values()} >= LIKELIHOODS.keys() - {"given_noise"}


def _suite(name: str) -> type[LikelihoodConformance]:
    likelihood, outputs, y = CASES[name]

    def data(self: LikelihoodConformance) -> tuple[Tensor, Tensor]:
        torch.manual_seed(3)
        return 0.8 * torch.randn(N, outputs, dtype=torch.float64), y

    return type(f"Test{name}", (LikelihoodConformance,), {"likelihood": lambda self: likelihood, "data": data})


globals().update({f"Test{name}": _suite(name) for name in CASES})
