"""Predictions are made of rows; here they are put back into the shape that the network has."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributions import Distribution

from laplace.backprop.gradients import Forward
from laplace.errors import InputError, UnsupportedError
from laplace.positions import Positions
from laplace.predictive.prediction import Prediction

_OTHERWISE = {"probs": ("logits",), "scale_tril": ("covariance_matrix", "precision_matrix")}  # the same, said otherwise


@dataclass
class InShape:
    """Looks at the runs that a prediction is made of, and puts what was made of their rows into shape."""

    _seen: list[Positions] = field(default_factory=list)

    def watch(self, runs: Iterable[Forward], further: bool = False) -> Iterator[Forward]:
        """The same runs; those of `further` inputs after others, or of the same ones again."""
        if not further:
            self._seen.clear()
        for run in runs:
            if not self._seen or self._seen[-1] is not run.positions:  # parts of a run share its positions
                self._seen.append(run.positions)
            yield run

    def add(self, further: InShape) -> None:
        """Behind what was seen, what another has seen of further inputs."""
        self._seen += further._seen

    @property
    def positions(self) -> Positions:
        """Of all inputs together."""
        first = self._seen[0]
        shapes = {seen.shape for seen in self._seen}
        if len(shapes) > 1:
            listed = ", ".join(map(str, sorted(shapes)))
            raise InputError(
                f"the batches have outputs at positions of shapes {listed}, which do not go into one tensor. Pad all "
                "to one length, or predict batch by batch."
            )
        return replace(first, n=sum(seen.n for seen in self._seen))

    def __call__(self, rows: Tensor, lead: int = 0) -> Tensor:
        """Outputs, variances or probabilities, `lead` dimensions before."""
        return self.positions.shaped(rows, lead)

    def covariance(self, rows: Tensor) -> Tensor:  # (N * T, C, C) -> (N, *positions, C, C)
        """Covariances between the outputs of each position."""
        return self.positions.matrices(rows)

    def each(self, rows: Tensor) -> Tensor:  # (N * T,) -> (N, *positions)
        """One number for each row."""
        return self.positions.each(rows)

    def prediction(self, rows: Prediction) -> Prediction | PredictionAtPositions:
        """A prediction of rows in shape."""
        plain = not self.positions.several and self.positions.dim is not None
        return rows if plain else PredictionAtPositions(rows, self.positions)


@dataclass(frozen=True)
class PredictionAtPositions:
    """p(y given x, data) in the shape of the network's outputs, as `Prediction` has it; the outputs are in `rows`.

    Attributes:
        rows: the same for each position of each example by itself, (N * T, C).
        positions: the shape of the outputs.
    """

    rows: Prediction
    positions: Positions

    @property
    def distribution(self) -> Distribution:
        """Of each position, (N, *positions); its outputs, where it has several, come last."""
        of = self.rows.distribution
        given = {key: value for key in of.arg_constraints if isinstance(value := of.__dict__.get(key), Tensor)}
        for key, others in _OTHERWISE.items():  # what was asked for before is kept beside what was given
            given = {k: v for k, v in given.items() if key not in given or k not in others}
        if not given:
            raise UnsupportedError(f"a {type(of).__name__} has no shape of positions. Take .rows.distribution.")
        one = self.positions.dim is None and not of.event_shape  # (N * T, 1) -> (N, *positions)
        shaped = {key: value.unflatten(0, self.positions.grid) for key, value in given.items()}
        make: Any = type(of)
        return make(**{key: value.squeeze(-1) if one else value for key, value in shaped.items()})

    @property
    def mean(self) -> Tensor:
        """E[y], or the class probabilities."""
        return self._shaped(self.rows.mean)

    @property
    def epistemic(self) -> Tensor:
        """What more data could take away."""
        return self._shaped(self.rows.epistemic)

    @property
    def aleatoric(self) -> Tensor:
        """What it could not."""
        return self._shaped(self.rows.aleatoric)

    @property
    def total(self) -> Tensor:
        """Both together."""
        return self.epistemic + self.aleatoric

    @property
    def is_regression(self) -> bool:
        """Whether y is continuous."""
        return self.rows.is_regression

    def quantile(self, q: float | Tensor) -> Tensor:
        """As `Prediction.quantile`, in shape.

        Args:
            q: a number strictly between 0 and 1, or Q of them.

        Raises:
            OptionError: a q outside its range.
        """
        return self._shaped(self.rows.quantile(q), torch.as_tensor(q).dim())

    def interval(self, level: float = 0.95) -> tuple[Tensor, Tensor]:
        """As `Prediction.interval`, in shape.

        Args:
            level: strictly between 0 and 1.

        Raises:
            OptionError: a level outside its range.
        """
        low, high = self.rows.interval(level)
        return self._shaped(low), self._shaped(high)

    def numpy(self) -> dict[str, Any]:
        """Mean, epistemic and aleatoric uncertainty as numpy arrays."""
        return {key: getattr(self, key).detach().cpu().numpy() for key in ("mean", "epistemic", "aleatoric")}

    def __len__(self) -> int:
        return self.positions.n

    def __repr__(self) -> str:
        return f"PredictionAtPositions({self.positions.n} inputs, positions {self.positions.shape}, {self.rows!r})"

    def _shaped(self, rows: Tensor, lead: int = 0) -> Tensor:
        return self.positions.each(rows) if rows.dim() == 1 else self.positions.shaped(rows, lead)
