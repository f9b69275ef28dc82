"""`repr(la)`: what it is and what it has seen, on a few lines."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from laplace.curved_prior import CurvedPrior
from laplace.errors import LaplaceError

if TYPE_CHECKING:
    from laplace.laplace import Laplace


def summary(la: Laplace) -> str:
    """A readable description of a Laplace object, fitted or not."""
    rows = [
        ("network", type(la.model).__name__),
        (
            "likelihood",
            la.likelihood.described + (f", noise {_shown(la.sigma_noise)}" if la.likelihood.has_noise else ""),
        ),
        ("structure", f"{la.structure.described}; curvature {la.curvature}"),
        ("prior", f"precision {_shown(la.prior_precision)}, mean {_shown(la.prior_mean)}" + _earlier(la)),
    ]
    if la.temperature != 1:
        rows.append(("temperature", f"{la.temperature:g}"))
    weights = la._subset.label
    if la.is_fitted:
        weights += f": {', '.join(la.posterior.fit.layout.names)} ({la.n_params:,} weights)"
        rows.append(("fitted", f"on {la.n_data:,} examples, {la.n_outputs} outputs, {_evidence(la)}"))
    else:
        rows.append(("fitted", "not yet: call la.fit(train_loader)"))
    rows.insert(1, ("weights", weights))
    return "Laplace(\n" + "".join(f"  {key:<12}{value}\n" for key, value in rows) + ")"


def _evidence(la: Laplace) -> str:
    try:
        return f"log evidence {float(la.posterior.log_evidence.detach()):.2f}"
    except LaplaceError as error:  # of values that were set since
        return f"no evidence: {error}"


def _earlier(la: Laplace) -> str:
    return f", and {la.prior.n_data:,} examples of earlier tasks" if isinstance(la.prior, CurvedPrior) else ""


def _shown(value: Tensor) -> str:
    value = value.detach()
    if value.numel() == 1:
        return f"{float(value):.4g}"
    return f"{value.numel()} values in [{float(value.min()):.3g}, {float(value.max()):.3g}]"
