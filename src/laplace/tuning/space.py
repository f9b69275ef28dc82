"""Treat the tuned hyperparameters as one vector x: those of the prior, then sigma, then T.

Coordinates are logarithms: of the precisions of a Gaussian prior, of the named hyperparameters of another (but for
those that may be negative, which are coordinates themselves), of sigma and of T.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from laplace.errors import OptionError, UnsupportedError
from laplace.posterior.posterior import Posterior
from laplace.priors.gaussian import GaussianPrior
from laplace.structures import per_weight


@dataclass(frozen=True)
class Space:
    """Says which hyperparameters of a posterior are tuned.

    Attributes:
        posterior: the one that is moved.
        groups: the prior's hyperparameters, by 'scalar', 'layerwise' or 'diag' groups of weights; None: not these.
        noise: whether sigma is tuned.
        temperature: whether T is tuned.
        names: of a prior that is not given by precisions, which of its hyperparameters.
    """

    posterior: Posterior
    groups: str | None
    noise: bool = False
    temperature: bool = False
    names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        fit, prior = self.posterior.fit, self.posterior.prior
        if self.names and self.groups == "diag":
            raise UnsupportedError(
                f"prior_structure='diag' is a precision per weight; {prior} has none. Take 'scalar' or 'layerwise'."
            )
        if not self.names and self.groups is not None and self.groups not in fit.structure.prior_structures:
            allowed = ", ".join(map(repr, fit.structure.prior_structures))
            raise UnsupportedError(
                f"{fit.structure.name} has no form for prior_structure={self.groups!r}. It has: {allowed}; "
                f"a precision per weight needs hessian_structure={per_weight()}."
            )
        if self.noise and not fit.likelihood.has_noise:
            raise OptionError(f"tuning sigma_noise is for regression; {fit.likelihood.name} has no noise to tune.")

    @property
    def sizes(self) -> list[int]:
        """Return how many weights each tuned value of the prior belongs to."""
        layout = self.posterior.fit.layout
        if self.names:
            return [layout.n_params] * sum(value.numel() for value in self._values.values())
        sizes = {"scalar": [layout.n_params], "layerwise": layout.sizes, "diag": [1] * layout.n_params}
        return [] if self.groups is None else sizes[self.groups]

    @property
    def kinds(self) -> list[str]:
        """Return the kind of each coordinate."""
        last = ["sigma_noise"] * self.noise + ["temperature"] * self.temperature
        if self.names:
            return [name for name, value in self._values.items() for _ in range(value.numel())] + last
        return ["prior_precision"] * len(self.sizes) + last

    @property
    def _values(self) -> dict[str, Tensor]:
        """Return the named hyperparameters, in the shapes that are tuned."""
        prior, layout = self.posterior.prior, self.posterior.fit.layout
        own = prior.detached().grouped(self.names, self.groups or "scalar", layout).hyperparameters
        return {name: own[name] for name in self.names}

    def start(self, precision: float | Tensor) -> Tensor:  # (K,)
        """Return a point with the given precisions, one or one per group, and the rest as it is now."""
        if self.names:
            x = [self._coordinate(name, value) for name, value in self._values.items()]
            return torch.cat([*x, x[0].new_tensor(self._rest())])
        x = torch.as_tensor(precision, dtype=torch.float64, device=self.posterior.fit.mean.device).log().reshape(-1)
        x = (x if len(x) == len(self.sizes) else x.mean()).expand(len(self.sizes))
        return torch.cat([x, x.new_tensor(self._rest())])

    def _rest(self) -> list[float]:
        rest = [float(self.posterior.sigma.log())] * self.noise
        return rest + [math.log(self.posterior.temperature)] * self.temperature

    def _coordinate(self, name: str, value: Tensor) -> Tensor:
        value = value.to(self.posterior.fit.mean.device, torch.float64).reshape(-1)
        return value if name in self.posterior.prior.unrestricted else value.log()

    def _named(self, x: Tensor) -> dict[str, Tensor]:
        """Return the named hyperparameters at a point."""
        shapes = {name: value.shape for name, value in self._values.items()}
        parts = x.split([shape.numel() for shape in shapes.values()])
        pairs = zip(shapes.items(), parts, strict=True)
        free = self.posterior.prior.unrestricted
        return {name: (part if name in free else part.exp()).reshape(shape) for (name, shape), part in pairs}

    def at(self, x: Tensor) -> Posterior:
        """Return the posterior with these hyperparameters, differentiable in precisions and sigma."""
        posterior, n = self.posterior, len(self.sizes)
        prior, sigma = posterior.prior.detached(), posterior.sigma.detach()
        if self.names:
            prior = prior.with_hyperparameters(**self._named(x[:n]))
        elif self.groups is not None:
            assert isinstance(prior, GaussianPrior)
            precision = x[:n].exp().to(posterior.fit.mean.dtype)
            prior = prior.with_precision(precision.squeeze(0) if self.groups == "scalar" else precision)
        if self.noise:
            sigma = x[n].exp()
        temperature = float(x[-1].exp()) if self.temperature else posterior.temperature
        return replace(posterior, prior=prior, sigma=sigma, temperature=temperature)

    def described(self, index: list[int]) -> str:
        """Describe some coordinates of one kind in words."""
        kind = self.kinds[index[0]].replace("prior_precision", "prior precision")
        if self.groups != "layerwise" or kind != "prior precision" or len(index) == len(self.sizes):
            return kind
        names = [self.posterior.fit.layout.names[i] for i in index]
        return f"{kind} of {', '.join(names[:3])}{f' and {len(names) - 3} more' if len(names) > 3 else ''}"


def groups_of(posterior: Posterior) -> str | None:
    """Return the groups of weights that share a prior precision; None for a prior without precisions."""
    if not isinstance(posterior.prior, GaussianPrior):
        return None
    count = posterior.prior.precision.numel()
    if count == 1:
        return "scalar"
    return "layerwise" if count == len(posterior.fit.layout.names) else "diag"
