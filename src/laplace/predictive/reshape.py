"""Put predictions, which are computed for rows, back into the shape of the network's output."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor
from torch.distributions import Distribution

from laplace.errors import InputError
from laplace.predictive.distributions import map_parameters
from laplace.predictive.positions import Positions
from laplace.predictive.prediction import Prediction
from laplace.predictive.summaries import Summaries, rows_at
from laplace.predictive.tables import levels_of


class Run(Protocol):
    """Defines a run of the network, of which only the positions of its outputs are used here."""

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
        if len(self._seen) == 1:
            return first
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


class PredictionAtPositions(Summaries):
    """Holds p(y given x, data) in the shape of the network's outputs, with the members of `Prediction`.

    The distribution of the outputs f is in `rows.outputs`.

    Attributes:
        rows: The `Prediction` for each position of each example separately, (N * T, C).
        positions: The shape of the outputs.
    """

    def __init__(self, rows: Prediction, positions: Positions) -> None:
        self.rows, self.positions = rows, positions

    @property
    def distribution(self) -> Distribution:
        """Return the distribution at each position, (N, *positions). Several outputs per position come last."""
        of, grid = self.rows.distribution, self.positions.grid
        one = self.positions.dim is None and not of.event_shape  # (N * T, 1) -> (N, *positions)
        shaped = lambda t: t.unflatten(0, grid).squeeze(len(grid)) if one else t.unflatten(0, grid)  # noqa: E731
        return map_parameters(of, shaped)

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
    def kind(self) -> str:
        """Return what y is: 'classes', 'labels' (0 or 1 each), 'regression', or 'counts'."""
        return self.rows.kind

    @property
    def label(self) -> Tensor:
        """Return the most probable class at each position; for labels, whether each is more probable than not."""
        return self._shaped(self.rows.label)

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

    def to(self, device: torch.device | str) -> PredictionAtPositions:
        """Return the prediction with all tensors on another device.

        Args:
            device: As `torch.Tensor.to` takes it.
        """
        return PredictionAtPositions(self.rows.to(device), self.positions)

    @classmethod
    def cat(cls, predictions: Sequence[PredictionAtPositions]) -> PredictionAtPositions:
        """Join predictions of further inputs into one.

        Args:
            predictions: At least one, with positions of one shape.

        Raises:
            InputError: they do not go together, or there are none.
        """
        predictions = list(predictions)
        if not predictions or not all(isinstance(p, cls) for p in predictions):
            raise InputError("PredictionAtPositions.cat needs a list of at least one PredictionAtPositions.")
        seen = Reshaper([p.positions for p in predictions])
        return cls(Prediction.cat([p.rows for p in predictions]), seen.positions)

    def __getitem__(self, index: Any) -> PredictionAtPositions:
        """Return the prediction of some of the examples: an index, a slice, a mask, or several indices."""
        chosen = rows_at(index, len(self), self.rows.mean.device)
        count = self.positions.count
        rows = (chosen[:, None] * count + torch.arange(count, device=chosen.device)).flatten()
        return PredictionAtPositions(self.rows[rows], replace(self.positions, n=len(chosen)))

    def to_pandas(self, names: Sequence[str] | None = None, level: float | None = None) -> Any:
        """Return a table with a row for each position of each example. Needs pandas.

        Args:
            names: The names of the classes or outputs; their numbers by default.
            level: Adds the ends of `interval(level)` as columns.

        Returns:
            A `pandas.DataFrame`, whose index is (example, position, ...).
        """
        table = self.rows.to_pandas(names, level)
        table.index = levels_of(self.positions.grid)
        return table

    def __len__(self) -> int:
        return self.positions.n

    def __repr__(self) -> str:
        return f"PredictionAtPositions({self.positions.n} inputs, positions {self.positions.shape}, {self.rows!r})"

    def _shaped(self, rows: Tensor, lead: int = 0) -> Tensor:
        return self.positions.each(rows) if rows.dim() == 1 else self.positions.shaped(rows, lead)
