"""The hyperparameters that are tuned, as one vector x of logarithms: precisions, then sigma, then T."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from laplace.errors import OptionError, UnsupportedError
from laplace.posterior import Posterior
from laplace.structures import per_weight


@dataclass(frozen=True)
class Space:
    """What of a posterior is tuned: precisions by `groups` (None: not these), the noise, the temperature."""

    posterior: Posterior
    groups: str | None
    noise: bool = False
    temperature: bool = False

    def __post_init__(self) -> None:
        fit = self.posterior.fit
        if self.groups is not None and self.groups not in fit.structure.prior_structures:
            allowed = ", ".join(map(repr, fit.structure.prior_structures))
            raise UnsupportedError(
                f"{fit.structure.name} has no form for prior_structure={self.groups!r}. It has: {allowed}; "
                f"a precision per weight needs hessian_structure={per_weight()}."
            )
        if self.noise and not fit.likelihood.has_noise:
            raise OptionError(f"tuning sigma_noise is for regression; {fit.likelihood.name} has no noise to tune.")

    @property
    def sizes(self) -> list[int]:
        """How many weights each tuned precision is for."""
        layout = self.posterior.fit.layout
        sizes = {"scalar": [layout.n_params], "layerwise": layout.sizes, "diag": [1] * layout.n_params}
        return [] if self.groups is None else sizes[self.groups]

    @property
    def kinds(self) -> list[str]:
        """What each coordinate is."""
        last = ["sigma_noise"] * self.noise + ["temperature"] * self.temperature
        return ["prior_precision"] * len(self.sizes) + last

    def start(self, precision: float | Tensor) -> Tensor:  # (K,)
        """Precisions at one value, or at those given for each group; the rest as it is."""
        x = torch.as_tensor(precision, dtype=torch.float64, device=self.posterior.fit.mean.device).log().reshape(-1)
        x = (x if len(x) == len(self.sizes) else x.mean()).expand(len(self.sizes))
        rest = [float(self.posterior.sigma.log())] * self.noise
        rest += [math.log(self.posterior.temperature)] * self.temperature
        return torch.cat([x, x.new_tensor(rest)])

    def at(self, x: Tensor) -> Posterior:
        """The posterior with these hyperparameters, differentiable in precisions and sigma."""
        posterior, n = self.posterior, len(self.sizes)
        prior, sigma = posterior.prior.detached(), posterior.sigma.detach()
        if self.groups is not None:
            precision = x[:n].exp().to(posterior.fit.mean.dtype)
            prior = prior.with_precision(precision.squeeze(0) if self.groups == "scalar" else precision)
        if self.noise:
            sigma = x[n].exp()
        temperature = float(x[-1].exp()) if self.temperature else posterior.temperature
        return replace(posterior, prior=prior, sigma=sigma, temperature=temperature)

    def described(self, index: list[int]) -> str:
        """Some coordinates of one kind in words."""
        kind = self.kinds[index[0]].replace("prior_precision", "prior precision")
        if self.groups != "layerwise" or kind != "prior precision" or len(index) == len(self.sizes):
            return kind
        names = [self.posterior.fit.layout.names[i] for i in index]
        return f"{kind} of {', '.join(names[:3])}{f' and {len(names) - 3} more' if len(names) > 3 else ''}"


def groups_of(posterior: Posterior) -> str:
    """By which groups the precision of a posterior's prior is given."""
    count = posterior.prior.precision.numel()
    if count == 1:
        return "scalar"
    return "layerwise" if count == len(posterior.fit.layout.names) else "diag"
