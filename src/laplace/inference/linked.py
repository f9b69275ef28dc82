"""Send the outputs at some inputs through a link, one of ours or one of the user's."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from laplace.errors import NumericalError, OptionError
from laplace.inference.linearised import through_link
from laplace.inference.source import Part, Source
from laplace.linalg.sampling import Draws
from laplace.predictive.links import Link
from laplace.predictive.mixtures import averaged
from laplace.predictive.outputs import OutputGaussian, require_finite
from laplace.predictive.queries import Contrasts, Query, Variances


def linked(
    source: Source, name: str, link: Link, part: Part, draws: Draws, independent: bool = False
) -> Tensor:  # (N, K)
    """Return the mean of the inverse link at some inputs."""

    def through(outputs: OutputGaussian) -> Tensor:
        p, outside = through_link(link, outputs, draws)
        if outside:
            source.warn_once(
                "simplex",
                f"the {name} approximation left the simplex for {outside} of {len(p)} inputs (its variances are "
                "too large); clipped and renormalised. link_approx='probit' and 'mc' have no such limit.",
            )
        _require_own_mean(p, len(outputs.mean), name)
        return p

    outputs = part.outputs.marginals() if independent else part.outputs
    return require_finite(averaged(outputs, through, source.likelihood.response.inverse_link), f"the mean of {name}")


def needed_by(link: Link, independent: bool) -> Query:
    """Return the query of a link; only variances if the outputs are to be treated as independent."""
    need = link.needs()
    return Variances() if independent and need != Contrasts() else need


def _require_own_mean(p: Any, n: int, name: str) -> None:
    """Refuse a result of the user's link that is not a mean: a shape other than (N, K), or NaN."""
    if name != "own link":
        return
    if not isinstance(p, Tensor) or p.dim() != 2 or len(p) != n:
        came = tuple(p.shape) if isinstance(p, Tensor) else type(p).__name__
        raise OptionError(f"the link in link_approx= returned {came}; one row per input, ({n}, K), is needed.")
    if not p.isfinite().all():
        raise NumericalError(
            "the link in link_approx= returned NaN or infinite values for a finite mean and variance. Correct its "
            "function, or leave out link_approx=."
        )
