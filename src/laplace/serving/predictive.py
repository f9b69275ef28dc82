"""From outputs and features of a last layer to the prediction: the response with all that the posterior fixes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from laplace.budget import Budget
from laplace.linalg.contrasts import centred
from laplace.posterior.fixing import Seen, spread_of
from laplace.posterior.rows import RowPredictive, row_predictive
from laplace.posterior.spread import Factored, Kept, Spread
from laplace.predictive.links import Link
from laplace.predictive.queries import Contrasts, Products, with_covariances
from laplace.predictive.response import Response
from laplace.serving.outputs import FixedDraws, FixedOutputs, fixed_noise, linked
from laplace.structures.gaussian import Gaussian
from laplace.weights.layout import Layout

MAX_COVARIANCE = 32  # with more outputs than this, as in la.predict, draws treat them as independent
OUTPUTS = ("mean", "variance", "epistemic", "aleatoric")


class Predictive(Kept):
    """Computes what a prediction holds from the outputs f and the features phi of the last layer.

    Each part is the one of `la.predict` for a single input: where draws are needed, their noise is fixed.

    Args:
        response: maps outputs to what they stand for.
        link: the link, or None where outputs stand for themselves.
        wanted: which of `OUTPUTS` are returned.
        n_samples: how many draws, for those that need them.
        seed: what the draws are made from.
        temperature: the softmax temperature.
        noise_level: the level of the observation noise, ().
    """

    noise_level: Tensor
    noise: Tensor | None  # (S, C)

    def __init__(
        self,
        response: Response,
        link: Link | None,
        wanted: Sequence[str],
        n_samples: int,
        seed: int,
        temperature: float,
        noise_level: Tensor,
    ) -> None:
        super().__init__()
        self.response, self.link, self.wanted = response, link, tuple(wanted)
        self.n_samples, self.seed, self.temperature = n_samples, seed, temperature
        self.uncertain = "epistemic" in wanted or "aleatoric" in wanted
        self.products = link is not None and isinstance(link.needs(), Products)
        self.closed_form: Callable[[Tensor, Tensor], Tensor] | None = None  # of f and variances, if they are enough
        self.keep("noise_level", noise_level)
        self.keep("noise", None)
        self.same_squares = False  # of the two that follow
        self.outputs: Spread | None = None
        self.contrasts: Spread | None = None

    def fix(self, gaussian: Gaussian, layout: Layout, c: int, budget: Budget) -> None:
        """Keep what is needed of the posterior of a last layer with c outputs."""
        need = None if self.link is None else self.link.needs()
        asked = need is not None and with_covariances(need)
        drawn = self.uncertain and self.link is not None  # the parts of an entropy come from draws
        joint = asked or (drawn and c <= MAX_COVARIANCE)
        differences = self.response.only_differences  # draws are made of contrasts then
        scale = 1 / self.temperature
        self.joint = joint and not differences
        self.joint_contrasts = joint and differences
        if isinstance(need, Contrasts) or (differences and (asked or drawn)):
            seen = Seen(c, scale, contrasts=True, covariances=self.joint_contrasts)
            self.contrasts = spread_of(gaussian, layout, seen, budget)
        if self.contrasts is None or self.joint or self.uncertain or "variance" in self.wanted:
            seen = Seen(c, scale, covariances=self.joint or self.products)
            self.outputs = spread_of(gaussian, layout, seen, budget)
        self.same_squares = isinstance(self.contrasts, Factored) and self.contrasts.same_squares(self.outputs)
        if not self.uncertain and self.link is not None:
            self.closed_form = self.link.closed_form
        if drawn or (self.link is not None and self.link.makes_draws):
            like = gaussian.marginal_variances()
            self.keep("noise", fixed_noise(self.n_samples, c, like, self.seed).to(like.device))

    def forward(self, f: Tensor, phi: Tensor) -> dict[str, Tensor]:  # (M, C), (M, H) -> (M, K) each
        """Return what was asked for, one row for each row of the inputs."""
        f = f if self.temperature == 1 else f / self.temperature
        if self.closed_form is not None:
            return self._in_closed_form(f, phi, self.closed_form)
        outputs, draws = self._gaussian(f, phi), FixedDraws(self.n_samples, noise=self.noise)
        p = None if self.link is None else linked(self.link, outputs, draws)
        found = {"mean": f[:, self.response.location_outputs(f.shape[1])] if p is None else p}
        if "variance" in self.wanted:
            found["variance"] = outputs.variance
        if self.uncertain:
            drawn_from = outputs if self.response.only_differences else replace(outputs, contrasts=None)
            parts = self.response.uncertainty(drawn_from, p, self.noise_level, draws)
            found["epistemic"], found["aleatoric"] = parts
        return {name: found[name] for name in self.wanted}

    def row(self) -> RowPredictive | None:
        """Return the same for a single row in NumPy, of the buffers as they are now.

        None where that has no form, or is not faster: probit is as few operations here as there.
        """
        if self.closed_form is None or self.contrasts is None or "mean" not in self.wanted:
            return None
        return row_predictive(self.closed_form, self.contrasts, self.outputs if "variance" in self.wanted else None)

    def _in_closed_form(self, f: Tensor, phi: Tensor, form: Callable[[Tensor, Tensor], Tensor]) -> dict[str, Tensor]:
        """Return means and variances with as few operations as can be."""
        spread: Any = self._modules.get("outputs")  # None, and then no module
        contrasts: Any = self._modules.get("contrasts")
        if spread is None or contrasts is None:
            variance = None if spread is None else spread.variance(phi)
            used = variance if contrasts is None else contrasts.variance(phi)
        elif self.same_squares:
            squares = spread.squares(phi)
            variance, used = spread.variance_of(squares), contrasts.variance_of(squares)
        else:
            variance, used = spread.variance(phi), contrasts.variance(phi)
        assert used is not None
        if used.dtype != f.dtype:  # a network that was rounded; the posterior never is
            used, variance = used.to(f.dtype), None if variance is None else variance.to(f.dtype)
        if variance is None or self.wanted == ("mean",):
            return {"mean": form(f, used)}
        if self.wanted == ("variance",):
            return {"variance": variance}
        found = {"mean": form(f, used), "variance": variance}
        return found if self.wanted[0] == "mean" else {name: found[name] for name in self.wanted}

    def _gaussian(self, f: Tensor, phi: Tensor) -> FixedOutputs:
        """Return as much of the Gaussian of the outputs as is needed."""
        contrasts = _seen(self.contrasts, centred(f), phi, self.joint_contrasts) if self.contrasts is not None else None
        spread = self.outputs
        if spread is None:
            assert contrasts is not None
            return replace(contrasts, contrasts=contrasts)
        outputs = _seen(spread, f, phi, self.joint, contrasts)
        return replace(outputs, times=lambda v: spread.product(phi, v)) if self.products else outputs


def _seen(spread: Spread, f: Tensor, phi: Tensor, joint: bool, contrasts: FixedOutputs | None = None) -> FixedOutputs:
    if not joint:
        return FixedOutputs(f, spread.variance(phi).to(f.dtype), contrasts=contrasts)
    covariance = spread.covariance(phi).to(f.dtype)
    return FixedOutputs(f, covariance.diagonal(dim1=1, dim2=2), covariance, contrasts=contrasts)
