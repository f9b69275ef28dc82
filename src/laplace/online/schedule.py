"""Say when prior and noise move during training, and by which evidence: usually that of all data, after an epoch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from laplace.errors import UnsupportedError
from laplace.laplace import Laplace
from laplace.network.batches import Batch
from laplace.posterior.posterior import Posterior
from laplace.priors.gaussian import GaussianPrior
from laplace.tuning.evidence import climb
from laplace.tuning.space import Space
from laplace.weights.layout import Layout


@dataclass
class Schedule(ABC):
    """Moves prior and noise during training, if asked before each batch and after each epoch.

    Attributes:
        name: its name for `evidence=`.
        la: the posterior whose prior and noise move, with its network.
        groups: one prior precision for all weights ('scalar'), per tensor ('layerwise') or per weight ('diag').
        noise: whether the noise moves.
        max_steps: the most Newton steps at a time.
        reach: the longest step of a logarithm.
        frequency: how many epochs, or batches, lie between two moves.
        burnin: how many epochs go by before the first.
        generator: the generator of random curvatures. None uses torch's own.
    """

    name: ClassVar[str]

    la: Laplace
    groups: str
    noise: bool
    max_steps: int
    reach: float
    frequency: int
    burnin: int
    generator: torch.Generator | None = None

    @classmethod
    def require(cls, la: Laplace, groups: str) -> None:
        """Refuse structures, priors and curvatures that this evidence does not exist for."""
        return

    @abstractmethod
    def is_ever_due(self, epochs: int, batches: int) -> bool:
        """Return whether anything moves in so many epochs of so many batches each."""

    def before_batch(self, batch: Batch, epoch: int, n: int) -> bool:
        """Move before this batch of `n` examples in all is trained on, if it is time. Return whether anything moved."""
        return False

    @abstractmethod
    def after_epoch(self, epoch: int, fit: Callable[[], None]) -> float | None:
        """Move after this epoch, if it is time. `fit` fits the posterior to all data. Return a log evidence, if any."""

    def state(self) -> dict[str, Any]:
        """Return what a training continues from, besides prior and noise."""
        return {}

    def restore(self, state: Mapping[str, Any], layout: Layout) -> None:
        """Continue from such a state. Raise any exception for one that was not written by `state`."""
        return

    def moved(self, posterior: Posterior) -> Posterior:
        """Return the posterior with prior and noise moved towards the optimum of its evidence."""
        with torch.no_grad():
            prior = posterior.prior
            gaussian = isinstance(prior, GaussianPrior)
            names = () if gaussian else prior.tuned
            space = Space(posterior, self.groups if gaussian or names else None, self.noise, names=names)
            if not space.kinds:
                return posterior
            return climb(space, space.start(prior.precision if gaussian else 1.0), self.max_steps, self.reach)


class Epochs(Schedule):
    """Fits a posterior to all data every few epochs, and moves towards the optimum of its evidence."""

    name = "epochs"

    def is_ever_due(self, epochs: int, batches: int) -> bool:
        return any(map(self._is_due, range(1, epochs + 1)))

    def after_epoch(self, epoch: int, fit: Callable[[], None]) -> float | None:
        if not self._is_due(epoch):
            return None
        fit()
        found = self.moved(self.la.posterior.detached())
        self.la.prior, self.la.sigma_noise = found.prior, found.sigma
        return float(self.la.posterior.log_evidence)

    def _is_due(self, epoch: int) -> bool:
        return epoch > self.burnin and epoch % self.frequency == 0


@dataclass
class EveryFewBatches(Schedule):
    """Moves before every k-th batch, by what this batch shows."""

    batches: int = 0  # seen after the burn-in

    def is_ever_due(self, epochs: int, batches: int) -> bool:
        return (epochs - self.burnin) * batches >= self.frequency

    def before_batch(self, batch: Batch, epoch: int, n: int) -> bool:
        if epoch <= self.burnin:
            return False
        self.batches += 1
        if self.batches % self.frequency:
            return False
        self.move(batch, n)
        return True

    @abstractmethod
    def move(self, batch: Batch, n: int) -> None:
        """Move by the evidence that this batch of `n` examples in all shows."""

    def state(self) -> dict[str, Any]:
        return {"batches": self.batches}

    def restore(self, state: Mapping[str, Any], layout: Layout) -> None:
        self.batches = int(state["batches"])


def refuse(schedule: type[Schedule], what: str, instead: str) -> None:
    """Raise UnsupportedError: this way of computing the evidence cannot do that."""
    raise UnsupportedError(f"evidence={schedule.name!r} {what}. {instead}")
