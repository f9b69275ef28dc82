"""One pass over the data: every batch is run through the network once, and leaves its sums."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from laplace.algebra import GramSum, Rows, in_sums
from laplace.backprop.gradients import Forward, Moments
from laplace.batches import Inputs
from laplace.curvature import CURVATURES
from laplace.errors import InputError
from laplace.likelihoods.base import Likelihood
from laplace.posterior import Fit
from laplace.structures import Structure, Sums
from laplace.weights.layout import Layout

_HELD = 2**23  # numbers held back before their moments are taken


class Engine(Protocol):
    """What fitting and predicting need of a network: one run on a batch."""

    linear: bool  # whether the outputs are linear in the weights

    def forward(self, inputs: Inputs, with_grad: bool = False) -> Forward:
        """Run the network."""
        ...


class Accumulator:
    """Sums of the curvature and of the log-likelihood, batch by batch."""

    def __init__(
        self,
        engine: Engine,
        likelihood: Likelihood,
        structure: Structure,
        layout: Layout,
        kind: str,
        samples: int,
        generator: torch.Generator | None,
    ) -> None:
        self.engine, self.likelihood, self.structure, self.layout = engine, likelihood, structure, layout
        self.kind, self.samples, self.generator = kind, samples, generator
        self.sums: dict[str, Any] = {}
        self.data: Sums = {}
        self.n_data = self.n_outputs = 0
        self._pending: list[Moments] = []
        self._held = 0

    def add(self, inputs: Inputs, y: Tensor, index: int) -> None:
        """Run one batch and add what it leaves; nothing is added where the batch is refused."""
        forward = self.engine.forward(inputs)
        f = forward.outputs
        try:
            self.likelihood.check_outputs(f)
            check_finite(f, "the network's outputs hold")
            y = self.likelihood.check_targets(f, y.to(f.device))
        except InputError as error:
            raise InputError(f"batch {index}: {error}") from None
        if self.n_outputs not in (0, f.shape[1]):
            raise InputError(
                f"batch {index}: the network has {f.shape[1]} outputs here and had {self.n_outputs} before."
            )
        with torch.no_grad():
            for moments in self._moments(forward, y):
                self._pending.append(moments)
                self._held += moments.held
                if self._held > _HELD:
                    self._take()
            _add(self.data, self.likelihood.sums(f, y))
        self.n_data, self.n_outputs = self.n_data + f.shape[0], f.shape[1]

    def fit(self, mean: Tensor) -> Fit:
        """What has been added, at the weights `mean`."""
        with torch.no_grad():
            self._take()
            sums = {k: v.flush().unsqueeze(0) if isinstance(v, GramSum) else v for k, v in self.sums.items()}
        counts = (self.n_data, self.n_outputs)
        parts = (self.structure, self.likelihood, self.kind, self.layout, mean, sums, self.data)
        return Fit(*parts, *counts, linear=self.engine.linear)

    def _moments(self, forward: Forward, y: Tensor) -> Iterator[Moments]:
        if self.kind == "hessian":
            exact = forward.hessian(lambda f: -self.likelihood.log_prob(f, y).sum(), self.structure.name == "diag")
            if exact is not None:
                yield exact
                return
        curvature = CURVATURES[self.kind](self.likelihood, forward.outputs, y, self.samples, self.generator)
        yield from forward.moments(curvature)

    def _take(self) -> None:
        """Take the moments of the batches that were held back: one large product instead of many small ones."""
        if self._pending:
            first, *others = self._pending
            _add(self.sums, self.structure.sums(first.merged(others) if others else first, self.layout))
            self._pending, self._held = [], 0


def check_finite(f: Tensor, what: str) -> None:
    """Refuse NaN and infinity."""
    if not f.sum().isfinite() and not f.isfinite().all():
        rows = (~f.isfinite()).flatten(1).any(1).nonzero().flatten().tolist()
        raise InputError(
            f"{what} NaN or infinite values for {len(rows)} examples, the first is number {rows[0]} of the batch."
        )


def _add(total: dict[str, Any], part: Mapping[str, Tensor | Rows]) -> None:
    for key, value in part.items():
        if isinstance(value, Rows):
            total.setdefault(key, GramSum()).add(value.rows)
        elif key in total:
            total[key] += value
        else:
            total[key] = in_sums(value).clone()
