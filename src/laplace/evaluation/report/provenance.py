"""Record where a report comes from: versions, options, data, digests, seeds and seconds, but no paths."""

from __future__ import annotations

import platform
import time
from datetime import datetime, timezone
from typing import Any

import numpy as np
import torch

from laplace._version import __version__
from laplace.evaluation.report.identity import Identity
from laplace.evaluation.report.reading import Reported
from laplace.network import digests
from laplace.network.batches import device_of
from laplace.priors.gaussian import GaussianPrior


class Stopwatch:
    """Measures the CPU seconds of the stages of a report."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._since = time.process_time()

    def lap(self, stage: str) -> None:
        """Count the time since the last lap for this stage."""
        now = time.process_time()
        self.seconds[stage] = self.seconds.get(stage, 0.0) + now - self._since
        self._since = now


def provenance(
    la: Reported, data: dict[str, Identity], seed: int, n_bootstrap: int, seconds: dict[str, float]
) -> dict[str, Any]:
    """Return what identifies the inputs of a report, so that others can check that theirs are the same."""
    model = la.runner.model
    return {
        "made": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "versions": {
            "laplace": __version__,
            "torch": torch.__version__,
            "numpy": np.__version__,
            "python": platform.python_version(),
        },
        "machine": {
            "system": platform.system(),
            "processor": platform.machine(),
            "device": str(device_of(model)),
            "threads": torch.get_num_threads(),
        },
        "network": {
            "class": type(model).__name__,
            "parameters": sum(p.numel() for p in model.parameters()),
            "digest": digests.of_tensors({name: p.detach() for name, p in model.named_parameters()})[:16],
        },
        "options": _options(la),
        "data": {name: identity.described() for name, identity in data.items()},
        "seed": seed,
        "bootstrap": n_bootstrap,
        "seconds": {stage: round(value, 2) for stage, value in seconds.items()},
    }


def _options(la: Reported) -> dict[str, Any]:
    posterior, spec = la.posterior, la.runner.spec
    fit, prior = posterior.fit, posterior.prior
    found: dict[str, Any] = {
        "likelihood": spec.likelihood.described,
        "subset_of_weights": spec.weights.label,
        "hessian_structure": fit.structure.described,
        "curvature": fit.kind,
        "link": spec.likelihood.response.link_named(None),
        "uncertain weights": fit.layout.n_params,
        "outputs": fit.n_outputs,
        "fitted to": fit.n_data,
    }
    found["prior"] = repr(prior) if not isinstance(prior, GaussianPrior) else f"precision {_range(prior.precision)}"
    if spec.likelihood.has_noise:
        found["sigma_noise"] = _range(spec.likelihood.noise_at(posterior.sigma))
    found["temperature"] = posterior.temperature
    found["softmax_temperature"] = la.softmax_temperature
    return {key: value for key, value in found.items() if value != ""}


def _range(values: torch.Tensor) -> str:
    low, high = float(values.detach().min()), float(values.detach().max())
    return f"{low:.4g}" if values.numel() == 1 else f"{low:.3g} to {high:.3g} ({values.numel()} values)"
