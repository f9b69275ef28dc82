"""Estimate a lower bound of the evidence from a single batch, and climb it with Adam (Immer et al. 2023).

Let G be the rows J^T v of the vectors v behind Lambda (sum of v v^T = Lambda), and K their kernel, the sum over tensors
b of G_b G_b^T / delta_b. By Fischer's inequality a determinant is at most the product of those of its diagonal blocks:

    log det(s H + D) - log det D = log det(1 + s K) <= sum over parts of log det(1 + s K_part)

Parts are batches, or single vectors of the root of Lambda in a batch. So for a batch of B of the N examples

    (N/B) [ (1/T) log p(batch) - 1/2 log det(1 + s K_batch) ] - 1/2 sum of delta_b |theta_b - mu_b|^2

is an unbiased estimate of a lower bound of the log evidence of hessian_structure='full'. With all data in one batch it
is that evidence. With x_b = log delta_b, z = log sigma, s ~ sigma^(-2q) and tau_b = tr((1 + s K)^-1 s K_b / delta_b):

    d/dx_b = 1/2 [ (N/B) tau_b - delta_b |theta_b - mu_b|^2 ],    d/dz = (N/B) [ L'/T + q sum of tau_b ]
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import Adam

from laplace.curvature import GGN
from laplace.errors import InputError, OptionError, within
from laplace.inference.targets import counted
from laplace.laplace import Laplace
from laplace.likelihoods import Likelihood
from laplace.linalg.symmetric import cholesky
from laplace.network.batches import Batch
from laplace.online.batch_runs import BatchRuns
from laplace.online.schedule import EveryFewBatches, refuse
from laplace.posterior.task_prior import vector_of
from laplace.priors.gaussian import GaussianPrior
from laplace.structures.base import Sums
from laplace.structures.functional.kernel import own_kernels
from laplace.tuning.evidence import BOUND
from laplace.weights.layout import Layout

HYPERSTEPS = 10  # the default of n_hypersteps


@dataclass(frozen=True)
class BatchBound:
    """Holds the kernels of a batch. The data's part of the bound follows for every prior precision and noise.

    Attributes:
        kernels: G_b G_b^T of each tensor at unit precision, (parts, R, R), in float64.
        repeats: how many parts of the whole data each part stands for.
        data: the likelihood's sums over the batch.
        batches: how many batches of this size make the data, N/B.
        likelihood: the likelihood.
        empirical: whether the curvature is made of scores at the labels.
    """

    kernels: list[Tensor]
    repeats: float
    data: Sums
    batches: float
    likelihood: Likelihood
    empirical: bool

    def at(self, deltas: Tensor, sigma: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
        """Return the data's part, its derivatives in log delta of each tensor, (b,), and in log sigma, ()."""
        scale = (
            self.likelihood.curvature_scale("ef" if self.empirical else "ggn", sigma.double()).double() / temperature
        )
        ratios = scale / deltas.double()
        total = torch.eye(self.kernels[0].shape[-1], dtype=torch.float64, device=deltas.device)
        for ratio, block in zip(ratios, self.kernels, strict=True):
            total = total + ratio * block
        root = cholesky(total)
        inverse = torch.cholesky_inverse(root)
        shares = torch.stack([r * (inverse * k).sum() for r, k in zip(ratios, self.kernels, strict=True)])
        shares = self.repeats * shares  # (N/B) tau_b
        logdet = 2 * self.repeats * root.diagonal(dim1=-2, dim2=-1).log().sum()
        value, slope = self._log_likelihood(sigma)
        power = 2.0 if self.empirical else 1.0
        fit = self.batches / temperature
        return fit * value - 0.5 * logdet, 0.5 * shares, fit * slope + power * shares.sum()

    def _log_likelihood(self, sigma: Tensor) -> tuple[Tensor, Tensor]:
        """Return log p(batch given theta) and its derivative in log sigma."""
        with torch.inference_mode(False), torch.enable_grad():
            z = sigma.detach().double().log().clone().requires_grad_()
            value = self.likelihood.log_likelihood(self.data, z.exp())
            (slope,) = torch.autograd.grad(value, z, allow_unused=True) if value.requires_grad else (None,)
        return value.detach(), torch.zeros_like(z) if slope is None else slope


def batch_bound(runs: BatchRuns, batch: Batch, n: int, generator: torch.Generator | None = None) -> BatchBound:
    """Run the network on a batch of `n` examples in all, and return what the bound needs of it.

    The exact GGN is one part of R = B C rows. For a sketch, `samples` vectors of the root are drawn, the same ones for
    all examples, and each is a part of B rows.
    """
    engine, spec = runs.engine(batch), runs.runner.spec
    with within(f"batch {batch.index}"):
        forward, targets, _ = counted(engine.forward(batch.inputs), batch, spec.likelihood)
    estimator = runs.estimator
    drawn = estimator.draws
    make = GGN() if drawn else estimator
    with torch.no_grad():
        curvature = make(spec.likelihood, forward.outputs, targets.y, None).weighted(targets.weights)
        vectors = forward.vectors(curvature)
        count = len(vectors)
        if drawn:
            device = None if generator is None else generator.device
            chosen = torch.randperm(count, generator=generator, device=device)[: estimator.vectors].tolist()
            v = torch.cat([vectors[i : i + 1] for i in chosen])
        else:
            v = vectors[0:count]
        uses = [*forward.sent(v)]
        parts, rows = (len(v), uses[0].shape[1]) if drawn else (1, len(v) * uses[0].shape[1])
        spec.budget.require(
            8 * parts * rows**2 * (len(uses) + 4),
            forward.outputs.device,
            f"evidence='bound' of a batch with {rows:,} rows",
            "Take smaller batches, curvature='sketch' (one vector per example), or evidence='running'.",
        )
        blocks = own_kernels(uses, drawn, spec.budget.chunk)
        batches = n / forward.positions.n
        data = spec.likelihood.sums(forward.outputs, targets)
    runs.done(engine)
    repeats = batches * (count / len(v) if drawn else 1.0)
    return BatchBound(blocks, repeats, data, batches, spec.likelihood, make.empirical)


@dataclass
class Bound(EveryFewBatches):
    """Takes a step of Adam up a lower bound of the evidence, estimated from a batch."""

    name = "bound"

    estimates: list[tuple[float, int]] = field(default_factory=list)  # in this epoch, and of how many examples each
    adam: Adam | None = None

    @classmethod
    def require(cls, la: Laplace, groups: str) -> None:
        """Refuse priors and curvatures that the bound does not hold for."""
        if not isinstance(la.prior, GaussianPrior) or la.prior.curved:
            refuse(cls, f"needs a Gaussian prior without earlier tasks; this is {la.prior}", "Take evidence='running'.")
        if groups == "diag":
            refuse(
                cls,
                "has one kernel per tensor, so that prior_structure='diag' would need one per weight",
                "Take 'scalar' or 'layerwise', or evidence='running'.",
            )
        name = la.runner.spec.estimator.name
        if name in ("mc", "hessian"):
            refuse(cls, f"is no bound with curvature={name!r}", "Take 'ggn', 'sketch' or 'ef'.")

    def __post_init__(self) -> None:
        if self.max_steps != HYPERSTEPS:
            raise OptionError(
                f"n_hypersteps={self.max_steps} is for Newton's method; evidence='bound' takes one step of Adam at a "
                "time. Leave it out, or change lr_hyp or marglik_frequency."
            )
        self.runs = BatchRuns(self.la.runner)

    def move(self, batch: Batch, n: int) -> None:
        la, found = self.la, batch_bound(self.runs, batch, n, self.generator)
        layout, prior, sigma = self.runs.weights.layout, la.prior.detached(), la.noise_level.detach()
        assert isinstance(prior, GaussianPrior)
        theta = vector_of(la.model, layout).detach()
        x = torch.stack([d.double().log().mean() for d in prior.blocks(layout, theta)])  # (b,)
        x = x.mean().expand(len(x)) if self.groups == "scalar" else x
        value, slopes, of_noise = found.at(x.exp(), sigma, la.temperature)
        scatter = x.exp() * prior.distances(theta, layout, "layerwise")
        self.estimates.append((float(value - 0.5 * scatter.sum()), len(batch.y)))
        slopes = slopes - 0.5 * scatter
        if self.groups == "scalar":
            x, slopes = x[:1], slopes.sum().reshape(1)
        if self.noise:
            x, slopes = torch.cat([x, sigma.double().log().reshape(1)]), torch.cat([slopes, of_noise.reshape(1)])
        x = self._step(x, slopes)
        precision = x[: len(x) - self.noise].exp().to(theta.dtype)
        la.prior = prior.with_precision(precision.squeeze(0) if self.groups == "scalar" else precision)
        if self.noise:
            la.sigma_noise = x[-1].exp()

    def after_epoch(self, epoch: int, fit: Callable[[], None]) -> float | None:
        """Return the mean of the epoch's estimates. If each batch was used once, that is the bound itself."""
        seen, self.estimates = self.estimates, []
        return sum(value * n for value, n in seen) / sum(n for _, n in seen) if seen else None

    def state(self) -> dict[str, Any]:
        return super().state() | {"adam": None if self.adam is None else self.adam.state_dict()}

    def restore(self, state: Mapping[str, Any], layout: Layout) -> None:
        super().restore(state, layout)
        self.adam = None
        if state["adam"] is not None:
            moments = [state["adam"]["state"][0][key] for key in ("exp_avg", "exp_avg_sq")]
            size = (1 if self.groups == "scalar" else len(layout.names)) + self.noise
            if any(m.shape != (size,) or not m.isfinite().all() for m in moments):
                raise InputError("the moments of the hyperparameters' gradients are not finite numbers, one for each")
            self.adam = self._made(torch.zeros_like(moments[0]))
            self.adam.load_state_dict(copy.deepcopy(dict(state["adam"])))  # a copy: it writes to the tensors

    def _made(self, x: Tensor) -> Adam:
        return Adam([x.clone().requires_grad_()], lr=self.reach, maximize=True)

    def _step(self, x: Tensor, slopes: Tensor) -> Tensor:
        """Return where a step of Adam leads from x."""
        if self.adam is None:
            self.adam = self._made(x)
        (own,) = self.adam.param_groups[0]["params"]
        with torch.no_grad():
            own.copy_(x)
        own.grad = slopes.clone()
        self.adam.step()
        return own.detach().clamp(-BOUND, BOUND)
