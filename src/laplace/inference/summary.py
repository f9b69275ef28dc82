"""Describe a Laplace approximation on a few lines, for `repr(la)`."""

from __future__ import annotations

from textwrap import wrap

from torch import Tensor

from laplace.checks import how_many
from laplace.errors import LaplaceError
from laplace.inference.values import Holder, sigma_noise
from laplace.inference.values import posterior as posterior_of
from laplace.posterior.posterior import Posterior
from laplace.posterior.task_prior import CurvedPrior
from laplace.priors.base import Prior
from laplace.priors.gaussian import GaussianPrior

_NAMES = 4  # up to so many tensors are listed; of more, the first and the last
_WIDTH, _LONG = 80, 60  # the most columns of a line, and of a value that is not cut


def summary(la: Holder) -> str:
    """Describe a Laplace approximation, fitted or not."""
    runner, values, noise = la.runner, la.values, sigma_noise(la)
    spec, prior = runner.spec, values.prior
    temperature, softmax_temperature = values.temperature, values.softmax_temperature
    posterior = None if values.fit is None else posterior_of(la)
    curvature = spec.estimator.name if posterior is None else posterior.fit.kind
    rows = [
        ("network", type(runner.model).__name__),
        (
            "likelihood",
            _short(spec.likelihood.described) + (f", noise {_values(noise)}" if spec.likelihood.has_noise else ""),
        ),
        ("structure", f"{spec.structure.described}; curvature {curvature}"),
        ("prior", _prior(prior)),
    ]
    if isinstance(prior, CurvedPrior):
        rows.append(("", f"and {how_many(prior.n_data, 'example')} of earlier tasks"))
    if temperature != 1:
        rows.append(("temperature", f"{temperature:g} of the likelihood"))
    if softmax_temperature != 1:
        rows.append(("softmax", f"temperature {softmax_temperature:.4g}, which divides the logits of predictions"))
    if runner.next_tokens:
        rows.append(("labels", "shifted to the next tokens, as the network's own loss does"))
    weights = _short(spec.weights.label)
    if posterior is not None:
        fit = posterior.fit
        outputs = how_many(fit.n_outputs, "output")
        weights = f"{weights}: {_listed(fit.layout.names)} ({how_many(fit.layout.n_params, 'weight')})"
        rows.append(("fitted", f"on {how_many(fit.n_data, 'example')}, {outputs}, {_evidence(posterior)}"))
    else:
        rows.append(("fitted", "not yet: call la.fit(train_loader)"))
    rows.insert(1, ("weights", weights))
    lines = [line for key, value in rows for line in _wrapped(f"  {key:<12}{value}")]
    return "\n".join(["Laplace(", *lines, ")"])


def _wrapped(line: str) -> list[str]:
    return wrap(line, _WIDTH, subsequent_indent=" " * 14, break_long_words=False, break_on_hyphens=False)


def _short(text: str) -> str:
    """Cut the middle out of a long text."""
    return text if len(text) <= _LONG else f"{text[: _LONG - 15]}...{text[-12:]}"


def _listed(names: tuple[str, ...]) -> str:
    """List tensor names, or their number if there are many."""
    if len(names) <= _NAMES and len(", ".join(names)) <= _LONG:
        return ", ".join(names)
    return f"{len(names)} tensors, {names[0]} to {names[-1]}"


def _evidence(posterior: Posterior) -> str:
    try:
        if not posterior.gaussian.logdet_known:
            return "evidence not computed yet"
        return f"log evidence {float(posterior.log_evidence.detach()):.2f}"
    except LaplaceError as error:  # e.g. the prior or noise was set to extreme values
        return f"no evidence: {error}"


def _prior(prior: Prior) -> str:
    if not isinstance(prior, GaussianPrior):
        return repr(prior)
    return f"precision {_shown(prior.precision)}, mean {_shown(prior.mean)}"


def _values(value: Tensor) -> str:
    """Write out a few values, and the range of many."""
    few = 1 < value.numel() <= _NAMES
    return f"[{', '.join(f'{v:.4g}' for v in value.flatten().tolist())}]" if few else _shown(value)


def _shown(value: Tensor) -> str:
    value = value.detach()
    if value.numel() == 1:
        return f"{float(value):.4g}"
    return f"{value.numel()} values in [{float(value.min()):.3g}, {float(value.max()):.3g}]"
