"""Define the predictive side of a likelihood: from the distribution of the outputs to p(y given x)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor
from torch.distributions import Distribution, Normal

from laplace.checks import choice, shown
from laplace.errors import OptionError, UnsupportedError
from laplace.linalg.autocast import plainly
from laplace.linalg.sampling import Draws
from laplace.predictive.links import Link
from laplace.predictive.mixtures import Outputs as Outputs
from laplace.predictive.outputs import OutputGaussian, require_finite
from laplace.predictive.prediction import Later, Prediction


class Response(ABC):
    """Leads from N(f, S), or draws of f, to p(y given x).

    If there are `links`, predictions are the mean of `inverse_link(f)` through one of them. If there are none, they are
    the mean and covariance of the outputs themselves.

    Attributes:
        links: What `link_approx` may be, by name. The first is the default of `la(x)` and of
            `la.optimize_prior_precision`: the one of the paper and of laplace-torch.
        default_link: The name of the default everywhere else: `la.predict`, tuning, calibration and the guard. Empty
            for the first of `links`.
        only_differences: Whether a shift of all outputs leaves `inverse_link(f)` as it is, as with softmax.
        joint: Whether covariances between outputs enter the distribution of y.
        drawn_uncertainty: Whether `uncertainty` makes seeded draws, and nothing else that changes a state. Then a
            prediction makes them when it is first asked for them.
    """

    links: Mapping[str, Link] = {}
    default_link: str = ""
    only_differences: bool = False
    joint: bool = False
    drawn_uncertainty: bool = False

    def link_named(self, name: str | None, as_in_paper: bool = False, what: str = "link_approx") -> str:
        """Return the name of the link. For None, `default_link`, or the first of `links` if `as_in_paper`.

        Without links, any name is accepted. `what` is the name of the argument in errors.
        """
        if not self.links:
            return ""
        if name is None:
            first = next(iter(self.links))
            return first if as_in_paper else self.default_link or first
        return choice(name, self.links, what)

    def link_of(
        self, link: str | Link | None, as_in_paper: bool = False, what: str = "link_approx"
    ) -> tuple[str, Link | None]:
        """Return a link with its name: the one of that name, the default, or one of the user's own.

        The name is empty, and there is no link, where outputs stand for themselves. `as_in_paper` and `what` are those
        of `link_named`.
        """
        if isinstance(link, Link):
            if not self.links:
                raise OptionError(
                    f"{what}=Link(...) is for likelihoods with links; the outputs of {type(self).__name__} stand "
                    "for themselves. Leave it out."
                )
            return "own link", link
        if callable(link) and not isinstance(link, str):
            raise OptionError(
                f"{what}={shown(link)} is a function; write Link.of_variances(fn) for a mean of (f, variance)."
            )
        name = self.link_named(link, as_in_paper, what)
        return name, self.links[name] if name else None

    def location_outputs(self, n_outputs: int) -> slice:
        """Return which of the outputs give the location of y."""
        return slice(0, n_outputs)

    @abstractmethod
    def inverse_link(self, f: Tensor) -> Tensor:
        """Return what the outputs stand for: E[y given f], or the probabilities of the classes."""

    @abstractmethod
    def distribution(self, outputs: Outputs, p: Tensor | None, sigma: Tensor, link: str = "") -> Distribution:
        """Return p(y given x, data). `p` is the mean of `inverse_link(f)` through the link, if there are links."""

    @abstractmethod
    def uncertainty(self, outputs: Outputs, p: Tensor | None, sigma: Tensor, draws: Draws) -> tuple[Tensor, Tensor]:
        """Return the epistemic part and the aleatoric part."""

    def quantiles(self, outputs: OutputGaussian, z: Tensor) -> Tensor | None:  # (Q,) -> (Q, N, K)
        """Return quantiles of `inverse_link(f)` at quantiles z of a standard normal, in float64.

        None if they have no closed form.
        """
        return None

    def prediction(self, outputs: Outputs, p: Tensor | None, sigma: Tensor, link: str, draws: Draws) -> Prediction:
        """Return the full `Prediction`."""
        mean = outputs.mean[:, self.location_outputs(outputs.mean.shape[1])] if p is None else p
        require_finite(mean, "the predictive mean")
        given, shown = (outputs, p, sigma, draws), (outputs, self.inverse_link, self.quantiles)
        distribution = self.distribution(outputs, p, sigma, link)
        if self.drawn_uncertainty and draws.generator is None and not torch.is_grad_enabled():
            return Prediction(distribution, mean, None, None, *shown, partial(self._later, *given))
        return Prediction(distribution, mean, *self._parts(*given), *shown)

    def prediction_later(
        self, outputs: Callable[[], Outputs], p: Tensor, sigma: Tensor, link: str, draws: Draws
    ) -> Prediction:
        """Return the full `Prediction` for a mean that is known and finite; all else is computed when it is read."""
        made, parts = partial(self._made, outputs, p, sigma, link), partial(self._parts_of, outputs, p, sigma, draws)
        return Prediction(Later(made), p, None, None, outputs, self.inverse_link, self.quantiles, Later(parts))

    @plainly
    @torch.no_grad()
    def _made(self, outputs: Callable[[], Outputs], p: Tensor, sigma: Tensor, link: str) -> Distribution:
        return self.distribution(outputs(), p, sigma, link)

    def _parts_of(
        self, outputs: Callable[[], Outputs], p: Tensor, sigma: Tensor, draws: Draws
    ) -> tuple[Tensor, Tensor]:
        return self._later(outputs(), p, sigma, draws)

    @plainly
    @torch.no_grad()
    def _later(self, outputs: Outputs, p: Tensor | None, sigma: Tensor, draws: Draws) -> tuple[Tensor, Tensor]:
        """Return the same parts, whatever mode of torch they are asked for in."""
        return self._parts(outputs, p, sigma, draws)

    def _parts(self, outputs: Outputs, p: Tensor | None, sigma: Tensor, draws: Draws) -> tuple[Tensor, Tensor]:
        """Return the epistemic part and the aleatoric part. Refuse them if they are not finite."""
        epistemic, aleatoric = self.uncertainty(outputs, p, sigma, draws)
        require_finite(epistemic + aleatoric, "the predictive uncertainty")
        return epistemic, aleatoric

    def entropy(self, outputs: Outputs, p: Tensor | None, sigma: Tensor) -> Tensor:  # (N,)
        """Return the entropy of p(y given x, data)."""
        try:
            return rowwise(self.distribution(outputs, p, sigma).entropy())
        except NotImplementedError:
            raise UnsupportedError(
                f"{type(self).__name__} has no closed form for its entropy, which ood_loader= needs. Leave that out."
            ) from None


class Latent(Response):
    """Predicts the outputs f themselves, without observation noise."""

    def inverse_link(self, f: Tensor) -> Tensor:
        return f

    def distribution(self, outputs: Outputs, p: Tensor | None, sigma: Tensor, link: str = "") -> Distribution:
        return Normal(outputs.mean, outputs.variance.clamp(min=torch.finfo(outputs.mean.dtype).tiny).sqrt())

    def uncertainty(self, outputs: Outputs, p: Tensor | None, sigma: Tensor, draws: Draws) -> tuple[Tensor, Tensor]:
        return outputs.variance, torch.zeros_like(outputs.variance)


def at_quantiles(outputs: OutputGaussian, z: Tensor) -> Tensor:  # (Q,) -> (Q, N, C)
    """Return the quantiles of each output, in float64. An increasing function maps them to its own quantiles."""
    return outputs.mean.double() + outputs.variance.double().sqrt() * z.reshape(-1, 1, 1)


def rowwise(values: Tensor) -> Tensor:  # (N,) or (N, C) -> (N,)
    """Sum over the outputs of each example."""
    return values.flatten(1).sum(1) if values.dim() > 1 else values
