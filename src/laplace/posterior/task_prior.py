"""Use the posterior of earlier tasks as a prior N(mu, (H + diag(delta))^-1), with their curvature H and weights mu.

H is the sum of s_t H_t over the tasks, with each task's own s_t = c(sigma_t) / T_t. Kronecker factors are added, as in
the paper. delta is kept apart from H, so that it can be tuned. The evidence of the next task given the earlier ones is

    log p(data given theta) / T - 1/2 [ (theta - mu)^T (H + D) (theta - mu) + log det(s H_t + H + D) - log det(H + D) ]
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from laplace.errors import InputError, OptionError, UnsupportedError
from laplace.linalg.autocast import plain
from laplace.network.replica import plain_name, unwrap
from laplace.posterior.posterior import Fit, Posterior, added
from laplace.priors.base import Data, Prior
from laplace.priors.gaussian import GaussianPrior, Terms
from laplace.structures import Curvature, Gaussian, adding
from laplace.weights.layout import Layout

if TYPE_CHECKING:
    from collections.abc import Sequence


class Earlier:
    """Holds the curvature of earlier tasks, and joins that of one more task. Factorised once for all deltas."""

    def __init__(self, fit: Fit) -> None:
        self.fit = fit  # its sums are multiplied by their scales already; its mean is mu
        self._last: tuple[Fit, float, Curvature] | None = None

    def with_task(self, task: Fit, scale: Tensor) -> Curvature:
        """Return H + s H_t. A graph of s goes through eigenvectors, which is safe for log-determinants."""
        if scale.requires_grad and torch.is_grad_enabled():
            return self._joined(task, scale)
        last = self._last  # another thread may set it
        if last is None or last[0] is not task or last[1] != float(scale):
            with torch.no_grad():
                last = self._last = (task, float(scale), self._joined(task, scale))
        return last[2]

    def _joined(self, task: Fit, scale: Tensor) -> Curvature:
        sums = added(self.fit.sums, task.structure.scaled(task.sums, scale))
        return task.structure.curvature(sums, task.layout, task.mean.dtype)


@dataclass(frozen=True, repr=False, eq=False)
class CurvedPrior(GaussianPrior):
    """Is the prior for the next task: `Laplace(..., prior=la.as_prior())`, or the same in `marglik_training`.

    Attributes:
        precision: delta, the part that is tuned on each task.
        mean: the weights of the last task, (P,).
        earlier: the curvature of all tasks so far.
    """

    earlier: Earlier

    @classmethod
    def after(cls, posterior: Posterior) -> CurvedPrior:
        """Return the prior for the next task from the posterior of this one."""
        fit, prior = posterior.fit, posterior.prior.detached()
        if not isinstance(prior, GaussianPrior):
            raise UnsupportedError(
                f"as_prior() needs a prior with prior_precision, which the next task can tune; this is {prior}. Take "
                "prior_precision= instead of prior= on the first task."
            )
        if not fit.structure.adds:
            raise UnsupportedError(
                f"the sums of {fit.structure.name!r} depend on all data, so that another task cannot be added. "
                f"Take hessian_structure={adding()}."
            )
        whole = fit.whole_sums("as_prior()", "Fit without shard_factors=True.")
        sums = fit.structure.scaled(whole, posterior.scale.detach())
        n_data = fit.n_data
        if isinstance(prior, CurvedPrior):
            sums, n_data = added(prior.earlier.fit.sums, sums), n_data + prior.n_data
        return cls(prior.precision, fit.mean, Earlier(replace(fit, sums=sums, data={}, n_data=n_data)))

    @property
    def layout(self) -> Layout:
        """Return the layout of the weights that the prior is over."""
        return self.earlier.fit.layout

    @property
    def n_data(self) -> int:
        """Return the number of examples in all earlier tasks."""
        return self.earlier.fit.n_data

    def log_prob(self, weights: nn.Module | Tensor, normalized: bool = True) -> Tensor:
        """Return the log-density at some weights, differentiable in them.

        Without the constant it is -1/2 (theta - mu)^T (H + D) (theta - mu), the penalty for training on the next task.

        Args:
            weights: a network, or a vector (P,).
            normalized: whether to add the constant.

        Raises:
            InputError: the network lacks a parameter, or the number of weights is wrong.
        """
        theta = weights if isinstance(weights, Tensor) else self._vector(weights)
        if theta.shape != self.mean.shape:
            raise InputError(
                f"the weights have shape {tuple(theta.shape)}; the prior is over {len(self.mean)} weights."
            )
        out = -0.5 * self.scatter(theta, self.layout)
        if normalized:
            out = out + 0.5 * (self.logdet(self.layout, self.mean) - len(self.mean) * math.log(2 * math.pi))
        return out

    def check(self, layout: Layout, takes: Sequence[str] = ("diag",)) -> None:
        if (layout.names, layout.shapes) != (self.layout.names, self.layout.shapes):
            raise OptionError(
                f"the earlier tasks' prior is over {_described(self.layout)}; this network has {_described(layout)}. "
                "All tasks must share their uncertain weights. A task with another number of outputs needs its own "
                "head, outside the uncertain weights: write requires_grad_(False) on it, or give a network without it."
            )
        super().check(layout, takes)

    def with_mean(self, mean: Tensor | float) -> CurvedPrior:
        raise OptionError("prior_mean cannot be set: it is the weights of the earlier tasks. Leave it out.")

    def logdet(self, layout: Layout, like: Tensor) -> Tensor:
        """Return log det(H + D)."""
        return self._own().logdet()

    def scatter(self, theta: Tensor, layout: Layout) -> Tensor:
        """Return (theta - mu)^T (H + D) (theta - mu)."""
        return self._own().quadratic(theta - self.mean.to(theta)).double()

    def terms(self, theta: Tensor, layout: Layout, groups: str, distances: Tensor) -> Terms:
        return Terms(self._own().traces(groups), self.scatter(theta, layout), self.logdet(layout, theta))

    @property
    def curved(self) -> bool:
        return True

    def joined(self, data: Data, scale: Tensor) -> tuple[Curvature, Tensor]:
        assert isinstance(data, Fit)
        return self.earlier.with_task(data, scale), torch.ones_like(scale)

    def log_density(self, theta: Tensor, layout: Layout) -> Tensor:
        return self.log_prob(theta)

    def to(self, device: torch.device | str) -> CurvedPrior:
        return replace(super().to(device), earlier=Earlier(self.earlier.fit.to(device)))

    def __repr__(self) -> str:
        layout, values = self.layout, self.precision.detach().reshape(-1)
        delta = f"{float(values[0]):.4g}" if len(values) == 1 else f"{len(values)} values"
        return (
            f"CurvedPrior({self.earlier.fit.structure.described} of {layout.n_params:,} weights in {len(layout.names)} "
            f"tensors, {self.n_data:,} examples of earlier tasks, prior precision {delta})"
        )

    def _own(self) -> Gaussian:
        """Return N(0, (H + D)^-1). It is kept until delta changes, because training needs it at every batch."""
        if self.precision.requires_grad and torch.is_grad_enabled():
            return self._made()
        kept = self.__dict__.get("_kept")
        if kept is None or kept[0] != self.precision._version:
            with plain(), torch.no_grad():
                kept = (self.precision._version, self._made())
            object.__setattr__(self, "_kept", kept)
        return kept[1]

    def _made(self) -> Gaussian:
        one = torch.ones((), dtype=self.mean.dtype, device=self.mean.device)
        return self.earlier.fit.curvature.gaussian(one, self.blocks(self.layout, self.mean))

    def _vector(self, model: nn.Module) -> Tensor:
        return vector_of(model, self.layout)


def vector_of(model: nn.Module, layout: Layout) -> Tensor:  # (P,)
    """Return the weights of a network as one vector, with their graph."""
    parameters = {plain_name(name): p for name, p in unwrap(model).named_parameters()}
    wrong = [name for name in layout.names if name not in parameters]
    if wrong:
        raise InputError(f"the network has no parameter {wrong[0]!r}; needed: {', '.join(layout.names)}.")
    vector = layout.join([parameters[name] for name in layout.names])
    return vector.to(torch.promote_types(vector.dtype, torch.float32))


def prior_of(prior: Any, precision: float | Tensor | None, mean: float | Tensor | None, structure: str) -> Prior:
    """Return the first prior of a `Laplace`: a Gaussian, or the user's. One of earlier tasks must be of `structure`.

    Precision and mean may be None beside a prior that has none.
    """
    if prior is None:
        if precision is None or mean is None:
            raise OptionError(
                "prior_precision=None and prior_mean=None go with prior=, a prior of another kind. Write "
                "prior_precision=1.0, prior_mean=0.0, or leave them out."
            )
        return GaussianPrior.of(precision, mean)
    if isinstance(prior, type) and issubclass(prior, Prior):
        raise OptionError(f"prior={prior.__name__} is a class; give an object: {prior.__name__}(...).")
    if not isinstance(prior, Prior):
        raise OptionError(
            f"prior is a {type(prior).__name__}. Give a prior of laplace.priors, such as StudentT(df=4, scale=0.1), or "
            "la.as_prior() of an earlier task."
        )
    gaussian = isinstance(prior, GaussianPrior)
    if gaussian and type(prior) is not GaussianPrior and not isinstance(prior, CurvedPrior):
        raise OptionError(
            f"prior={prior!r} is of a class of your own, made from GaussianPrior, whose sums and files are those of a "
            "Gaussian. Make it from laplace.priors.Prior or Independent, or write from_log_density(...)."
        )
    own = (prior.precision if gaussian else None, getattr(prior, "mean", None))
    if not (_same(precision, own[0], 1.0) and _same(mean, own[1], 0.0)):
        raise OptionError(
            "prior= has its own precision and mean; leave prior_precision (prior_prec_init) and prior_mean out."
        )
    if not isinstance(prior, CurvedPrior):
        return GaussianPrior.of(prior.precision, prior.mean) if gaussian else prior
    before = prior.earlier.fit.structure.described
    if structure != before:
        raise OptionError(
            f"hessian_structure={structure!r} does not fit the prior of the earlier tasks, which is {before!r}. Take "
            "the same structure for all tasks."
        )
    return prior


def _same(given: float | Tensor | None, own: Tensor | None, usual: float) -> bool:
    """Return whether a value was left out, or equals the prior's own."""
    if given is None:
        return True
    if not isinstance(given, Tensor):
        return given == usual or (own is not None and own.numel() == 1 and given == float(own))
    if own is None:
        return given.numel() == 1 and float(given) == usual
    return given is own or (given.shape == own.shape and torch.equal(given.to(own), own))


def _described(layout: Layout) -> str:
    pairs = [f"{name} {shape}" for name, shape in zip(layout.names, layout.shapes, strict=True)]
    return ", ".join(pairs if len(pairs) <= 4 else [*pairs[:2], "...", *pairs[-2:]])
