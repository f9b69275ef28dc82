"""Put predictions, which are computed for rows, back into the shape of the network's output."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.distributions import Distribution

from laplace.errors import InputError, UnsupportedError
from laplace.predictive.positions import Positions
from laplace.predictive.prediction import Prediction, array_of

_OTHER_NAMES = {"probs": ("logits",), "scale_tril": ("covariance_matrix", "precision_matrix")}  # of a parameter


class Run(Protocol):
    """A run of the network, of which only the positions of its outputs are used here."""

    @property
    def positions(self) -> Positions: ...


AnyRun = TypeVar("AnyRun", bound=Run)


@dataclass
class Reshaper:
    """Records the positions of the runs behind a prediction, and reshapes what was computed from their rows."""

    _seen: list[Positions] = field(default_factory=list)

    def watch(self, runs: Iterable[AnyRun], further: bool = False) -> Iterator[AnyRun]:
        """Yield the same runs, recording their positions.

        With `further`, they are added to what was recorded: these runs are of other inputs. Otherwise the record starts
        anew.
        """
        if not further:
            self._seen.clear()
        for run in runs:
            if not self._seen or self._seen[-1] is not run.positions:  # parts of a run share its positions
                self._seen.append(run.positions)
            yield run

    def add(self, further: Reshaper) -> None:
        """Append the record of another one, which has seen the inputs that follow."""
        self._seen += further._seen

    @property
    def positions(self) -> Positions:
        """Return the positions of all recorded inputs together."""
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
        """Reshape outputs, variances or probabilities. The first `lead` dimensions stay in front."""
        return self.positions.shaped(rows, lead)

    def covariance(self, rows: Tensor) -> Tensor:  # (N * T, C, C) -> (N, *positions, C, C)
        """Reshape the covariances between the outputs of each position."""
        return self.positions.matrices(rows)

    def each(self, rows: Tensor) -> Tensor:  # (N * T,) -> (N, *positions)
        """Reshape one number per row."""
        return self.positions.each(rows)

    def prediction(self, rows: Prediction) -> Prediction | PredictionAtPositions:
        """Return a prediction in the shape of the network's output; unchanged if that is (N, C)."""
        plain = not self.positions.several and self.positions.dim is not None
        return rows if plain else PredictionAtPositions(rows, self.positions)


@dataclass(frozen=True)
class PredictionAtPositions:
    """p(y given x, data) in the shape of the network's outputs, with the members of `Prediction`.

    The distribution of the outputs f is in `rows.outputs`.

    Attributes:
        rows: The `Prediction` for each position of each example separately, (N * T, C).
        positions: The shape of the outputs.
    """

    rows: Prediction
    positions: Positions

    @property
    def distribution(self) -> Distribution:
        """Return the distribution at each position, (N, *positions). Several outputs per position come last."""
        of = self.rows.distribution
        given = {key: value for key in of.arg_constraints if isinstance(value := of.__dict__.get(key), Tensor)}
        for key, others in _OTHER_NAMES.items():  # torch caches the other names beside the given one
            given = {k: v for k, v in given.items() if key not in given or k not in others}
        if not given:
            raise UnsupportedError(f"a {type(of).__name__} cannot be reshaped to positions. Take .rows.distribution.")
        one = self.positions.dim is None and not of.event_shape  # (N * T, 1) -> (N, *positions)
        shaped = {key: value.unflatten(0, self.positions.grid) for key, value in given.items()}
        make: Any = type(of)
        return make(**{key: value.squeeze(len(self.positions.grid)) if one else value for key, value in shaped.items()})

    @property
    def mean(self) -> Tensor:
        """Return E[y], or the class probabilities."""
        return self._shaped(self.rows.mean)

    @property
    def epistemic(self) -> Tensor:
        """Return the uncertainty that more data could remove."""
        return self._shaped(self.rows.epistemic)

    @property
    def aleatoric(self) -> Tensor:
        """Return the uncertainty that more data could not remove."""
        return self._shaped(self.rows.aleatoric)

    @property
    def total(self) -> Tensor:
        """Return the sum of the epistemic and the aleatoric part."""
        return self.epistemic + self.aleatoric

    @property
    def is_regression(self) -> bool:
        """Whether y is continuous."""
        return self.rows.is_regression

    def quantile(self, q: float | Tensor) -> Tensor:
        """Return the quantiles of `Prediction.quantile`, in the shape of the outputs.

        Args:
            q: A number strictly between 0 and 1, or Q of them.

        Returns:
            A tensor in the shape of the outputs, with Q in front for a vector of Q levels.

        Raises:
            OptionError: q is not strictly between 0 and 1.
        """
        return self._shaped(self.rows.quantile(q), torch.as_tensor(q).dim())

    def interval(self, level: float = 0.95) -> tuple[Tensor, Tensor]:
        """Return the interval of `Prediction.interval`, in the shape of the outputs.

        Args:
            level: A number strictly between 0 and 1.

        Returns:
            The lower and the upper end.

        Raises:
            OptionError: the level is not strictly between 0 and 1.
        """
        low, high = self.rows.interval(level)
        return self._shaped(low), self._shaped(high)

    def numpy(self) -> dict[str, Any]:
        """Return mean, epistemic and aleatoric uncertainty as numpy arrays."""
        return {key: getattr(self, key).detach().cpu().numpy() for key in ("mean", "epistemic", "aleatoric")}

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """Return the mean, so that `np.asarray(prediction)` works."""
        return array_of(self.mean, dtype, copy)

    def __len__(self) -> int:
        return self.positions.n

    def __repr__(self) -> str:
        return f"PredictionAtPositions({self.positions.n} inputs, positions {self.positions.shape}, {self.rows!r})"

    def _shaped(self, rows: Tensor, lead: int = 0) -> Tensor:
        return self.positions.each(rows) if rows.dim() == 1 else self.positions.shaped(rows, lead)
