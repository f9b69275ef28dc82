"""Keep running averages of the sums that a fit makes, and move by their evidence.

A fit's sums are totals over the data, X = sum over n of x_n: Kronecker factors, diagonals, log-likelihoods. A batch of
B examples gives the estimate (N / B) sum over the batch of x_n, at the weights of the moment. The average over past
batches forgets a batch after about an epoch:

    X <- (1 - w) X + w (N / B) sum over the batch of x_n,      w = k B / N, if every k-th batch is used

At rest, where weights stay near their optimum, X is what a fit would find, and so is the optimum of its evidence.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from laplace.errors import InputError
from laplace.inference.accumulate import Accumulator
from laplace.laplace import Laplace
from laplace.network.batches import Batch
from laplace.online.batch_runs import BatchRuns
from laplace.online.schedule import EveryFewBatches, refuse
from laplace.posterior.posterior import Fit, Posterior
from laplace.structures import Sums, adding
from laplace.weights.layout import Layout


@dataclass
class Running(EveryFewBatches):
    """Moves towards the optimum of the evidence of running sums. Any structure whose sums add can have them."""

    name = "running"

    examples: int = 0  # how many were seen in all batches that were used
    averages: dict[str, Sums] = field(default_factory=dict)  # per example: 'sums' of the structure, 'data'
    last: Posterior | None = None

    @classmethod
    def require(cls, la: Laplace, groups: str) -> None:
        """Refuse structures that need all data at once."""
        if not la.structure.adds:
            refuse(
                cls,
                f"averages sums of batches, and those of {la.structure.name!r} depend on all data at once",
                f"Take hessian_structure={adding()}, or evidence='epochs'.",
            )

    def __post_init__(self) -> None:
        self.runs = BatchRuns(self.la.runner)

    def move(self, batch: Batch, n: int) -> None:
        fit = self._averaged(self._fit(batch), n)
        la = self.la
        posterior = Posterior(fit, la.prior.detached(), la.noise_level.detach(), la.temperature)
        self.last = self.moved(posterior)
        la.prior, la.sigma_noise = self.last.prior, self.last.sigma

    def after_epoch(self, epoch: int, fit: Callable[[], None]) -> float | None:
        last, self.last = self.last, None
        return None if last is None else float(last.log_evidence)

    def state(self) -> dict[str, Any]:
        return super().state() | {"examples": self.examples, "averages": self.averages}

    def restore(self, state: Mapping[str, Any], layout: Layout) -> None:
        super().restore(state, layout)
        self.examples = int(state["examples"])
        self.averages = {of: dict(state["averages"][of]) for of in ("sums", "data") if state["averages"]}
        if not all(value.isfinite().all() for sums in self.averages.values() for value in sums.values()):
            raise InputError("the running averages hold NaN or infinite values")

    def _fit(self, batch: Batch) -> Fit:
        """Return the fit of one batch at the current weights."""
        engine, spec = self.runs.engine(batch), self.la.runner.spec
        layout = self.runs.weights.layout
        parts = (spec.likelihood, spec.structure, layout, self.runs.estimator, self.generator, spec.budget)
        sums = Accumulator(engine, *parts)
        sums.run([batch], lambda: [batch])
        self.runs.done(engine)
        mean = layout.join(self.runs.weights.tensors(self.la.model))
        return sums.fit(mean.detach().to(torch.promote_types(mean.dtype, torch.float32), copy=True))

    def _averaged(self, fit: Fit, n: int) -> Fit:
        """Add the fit of a batch to the averages, and return the fit of n examples that they stand for."""
        self.examples += fit.n_data
        weight = min(1.0, max(self.frequency * fit.n_data / n, fit.n_data / self.examples))
        new = {of: {key: v / fit.n_data for key, v in sums.items()} for of, sums in _both(fit).items()}
        if _shapes(new) != _shapes(self.averages):  # the first batch, or one that uses a layer in another way
            self.averages, self.examples = new, fit.n_data
        for of, sums in new.items():
            kept = self.averages[of]
            self.averages[of] = {key: torch.lerp(kept[key], v.to(kept[key]), weight) for key, v in sums.items()}
        whole = {of: {key: n * v for key, v in sums.items()} for of, sums in self.averages.items()}
        return replace(fit, sums=whole["sums"], data=whole["data"], n_data=n)


def _both(fit: Fit) -> dict[str, Sums]:
    return {"sums": fit.sums, "data": fit.data}


def _shapes(averages: Mapping[str, Mapping[str, Tensor]]) -> dict[tuple[str, str], torch.Size]:
    return {(of, key): value.shape for of, sums in averages.items() for key, value in sums.items()}
