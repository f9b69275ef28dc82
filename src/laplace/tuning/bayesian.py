"""Bayesian optimisation of the validation score, for too many precisions to search one by one.

A Gaussian process over the logarithms models the score; each next point is where it expects the largest improvement.
The first points are a grid of one value for all precisions, and some points that fill the box evenly. Needs BoTorch.
"""

from __future__ import annotations

import warnings
from importlib import import_module

import torch
from torch import Tensor
from torch.quasirandom import SobolEngine

from laplace.tuning.search import Search

_RESTARTS, _RAW = 4, 64  # of the search for the next point, which does not read the data


def bayesian_search(search: Search, evaluations: int, seed: int) -> None:
    """Score the tied grids, then some scattered points, then `evaluations` points chosen one by one."""
    tools = _tools()
    for index in search.tied:
        search.move(index, search.grids[index[0]])
    low = torch.stack([grid[0] for grid in search.grids])
    width = torch.stack([grid[-1] for grid in search.grids]) - low
    scattered = SobolEngine(len(low), scramble=True, seed=seed).draw(2 * len(low), dtype=torch.float64)
    search.look(list(low + scattered.to(low) * width))
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about scaling and convergence: the surrogate only picks the next point
        torch.manual_seed(seed)
        for _ in range(evaluations):
            x = (torch.stack([x for x, _ in search.seen]) - low) / width
            y = torch.tensor([score for _, score in search.seen], dtype=torch.float64)
            search.look([low + _next(tools, x.cpu(), y).to(low) * width])


@torch.enable_grad()
def _next(tools: _Tools, x: Tensor, y: Tensor) -> Tensor:  # (M, K), (M,) -> (K,)
    """Return the point where a Gaussian process of the scores so far expects the largest improvement."""
    better = -y.unsqueeze(1)
    better = (better - better.mean()) / better.std().clamp(min=1e-12)
    model = tools.SingleTaskGP(x, better)
    tools.fit_gpytorch_mll(tools.ExactMarginalLogLikelihood(model.likelihood, model))
    box = torch.stack([torch.zeros(x.shape[1]), torch.ones(x.shape[1])]).double()
    gain = tools.LogExpectedImprovement(model, best_f=better.max())
    point, _ = tools.optimize_acqf(gain, bounds=box, q=1, num_restarts=_RESTARTS, raw_samples=_RAW)
    return point.detach()[0]


class _Tools:
    """Holds the parts of BoTorch and GPyTorch that are used."""

    def __init__(self) -> None:
        self.SingleTaskGP = import_module("botorch.models").SingleTaskGP
        self.fit_gpytorch_mll = import_module("botorch.fit").fit_gpytorch_mll
        self.LogExpectedImprovement = import_module("botorch.acquisition").LogExpectedImprovement
        self.optimize_acqf = import_module("botorch.optim").optimize_acqf
        self.ExactMarginalLogLikelihood = import_module("gpytorch.mlls").ExactMarginalLogLikelihood


def _tools() -> _Tools:
    try:
        return _Tools()
    except ImportError as error:
        raise ImportError("method='bayesian' needs BoTorch: pip install 'laplace-redux[botorch]'") from error
