"""What is made of the distribution of the outputs: the predictive side of a likelihood."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.distributions import Distribution, Normal

from laplace.checks import choice
from laplace.draws import Draws
from laplace.errors import UnsupportedError
from laplace.predictive.links import Link
from laplace.predictive.outputs import OutputGaussian, OutputSamples, require_finite
from laplace.predictive.prediction import Prediction

Outputs = OutputGaussian | OutputSamples


class Response(ABC):
    """From N(f, S), or draws of f, to p(y given x).

    Where there are `links`, `la(x)` is the mean of `inverse_link(f)` through one of them, the first unless another is
    named; where there are none, it is mean and covariance of the outputs themselves.

    Attributes:
        links: what `link_approx` may be, by name.
        joint: whether covariances between outputs enter the distribution of y.
    """

    links: Mapping[str, Link] = {}
    joint: bool = False

    def link_named(self, name: str | None) -> str:
        """The link of that name, or the usual one; any name will do where there are none."""
        if not self.links:
            return ""
        return next(iter(self.links)) if name is None else choice(name, self.links, "link_approx")

    def located(self, n_outputs: int) -> slice:
        """Those of the outputs that say where y is."""
        return slice(0, n_outputs)

    @abstractmethod
    def inverse_link(self, f: Tensor) -> Tensor:
        """What the outputs stand for: E[y given f], or the probabilities of the classes."""

    @abstractmethod
    def distribution(self, outputs: Outputs, p: Tensor | None, sigma: Tensor, link: str = "") -> Distribution:
        """p(y given x, data); `p` is the mean of `inverse_link(f)` through the link, where there are links."""

    @abstractmethod
    def uncertainty(self, outputs: Outputs, p: Tensor | None, sigma: Tensor, draws: Draws) -> tuple[Tensor, Tensor]:
        """The epistemic part and the aleatoric part."""

    def prediction(self, outputs: Outputs, p: Tensor | None, sigma: Tensor, link: str, draws: Draws) -> Prediction:
        """All of it together."""
        mean = outputs.mean[:, self.located(outputs.mean.shape[1])] if p is None else p
        require_finite(mean, "the predictive mean")
        epistemic, aleatoric = self.uncertainty(outputs, p, sigma, draws)
        require_finite(epistemic + aleatoric, "the predictive uncertainty")
        distribution = self.distribution(outputs, p, sigma, link)
        return Prediction(distribution, mean, epistemic, aleatoric, outputs, self.inverse_link)

    def entropy(self, outputs: Outputs, p: Tensor | None, sigma: Tensor) -> Tensor:  # (N,)
        """Of p(y given x, data)."""
        try:
            return rowwise(self.distribution(outputs, p, sigma).entropy())
        except NotImplementedError:
            raise UnsupportedError(
                f"{type(self).__name__} has no closed form of its entropy, which ood_loader= needs. Leave it out."
            ) from None


class Latent(Response):
    """The outputs themselves: nothing is observed of them here."""

    def inverse_link(self, f: Tensor) -> Tensor:
        return f

    def distribution(self, outputs: Outputs, p: Tensor | None, sigma: Tensor, link: str = "") -> Distribution:
        return Normal(outputs.mean, outputs.variance.clamp(min=torch.finfo(outputs.mean.dtype).tiny).sqrt())

    def uncertainty(self, outputs: Outputs, p: Tensor | None, sigma: Tensor, draws: Draws) -> tuple[Tensor, Tensor]:
        return outputs.variance, torch.zeros_like(outputs.variance)


def rowwise(values: Tensor) -> Tensor:  # (N,) or (N, C) -> (N,)
    """Summed over the outputs of each example."""
    return values.flatten(1).sum(1) if values.dim() > 1 else values
