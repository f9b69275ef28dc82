"""`Prediction`, which `la.predict` returns: a distribution, its summaries, and the two kinds of uncertainty."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.distributions import Dirichlet, Distribution

from laplace.checks import how_many, shown
from laplace.errors import InputError, OptionError
from laplace.linalg.sampling import Draws
from laplace.linalg.softmax import softmax
from laplace.predictive.distributions import concatenate, map_parameters
from laplace.predictive.mixtures import OutputMixture, Outputs, joined
from laplace.predictive.outputs import OutputGaussian, OutputSamples
from laplace.predictive.summaries import Summaries, kind_of, label_of, rows_at
from laplace.predictive.tables import table_of

T = TypeVar("T")


class Later(Generic[T]):
    """Makes a value when it is first asked for. Copies and pickles hold the value, not what makes it."""

    def __init__(self, make: Callable[[], T]) -> None:
        self._make: Callable[[], T] | None = make
        self._made: tuple[T] | None = None

    def __call__(self) -> T:
        """Return the value."""
        made, make = self._made, self._make
        if made is None:
            assert make is not None
            made = self._made = (make(),)
            self._make = None  # another thread that asks now has read both before, and makes it again
        return made[0]

    def __getstate__(self) -> dict[str, Any]:
        return {"_made": (self(),), "_make": None}


class Prediction(Summaries):
    """Holds p(y given x, data): the predictive distribution at N inputs.

    `len(prediction)` is N, `prediction[3]`, `prediction[:5]` and `prediction[mask]` are predictions of some inputs, and
    `np.asarray(prediction)` is the mean.

    Attributes:
        mean: E[y] for regression and counts, (N, C); the probabilities of classes or labels, (N, C).
        inverse_link: Maps outputs f to what they stand for.
        quantiles: Maps `outputs` and quantiles of a standard normal to quantiles of `inverse_link(f)`; returns None, or
            is None, if there is no closed form.

    Args:
        distribution: A `torch.distributions` object, or what makes it when it is first read.
        outputs: The distribution of the outputs f, or what makes it when it is first read.
        epistemic: The uncertainty that more data could remove. None if `parts` computes it.
        aleatoric: The rest. None if `parts` computes it.
        parts: Computes both when one of them is first read.
    """

    def __init__(
        self,
        distribution: Distribution | Callable[[], Distribution],
        mean: Tensor,
        epistemic: Tensor | None,
        aleatoric: Tensor | None,
        outputs: Outputs | Callable[[], Outputs],
        inverse_link: Callable[[Tensor], Tensor] = softmax,
        quantiles: Callable[[OutputGaussian, Tensor], Tensor | None] | None = None,
        parts: Callable[[], tuple[Tensor, Tensor]] | None = None,
    ) -> None:
        self._distribution, self.mean, self._outputs = distribution, mean, outputs
        self.inverse_link, self.quantiles = inverse_link, quantiles
        self._epistemic, self._aleatoric, self._parts = epistemic, aleatoric, parts

    @property
    def distribution(self) -> Distribution:
        """Return a `torch.distributions` object that includes the observation noise."""
        made = self._distribution
        if not isinstance(made, Distribution):
            made = self._distribution = made()
        return made

    @property
    def outputs(self) -> Outputs:
        """Return the distribution of the outputs f, an `OutputGaussian`, `OutputSamples` or `OutputMixture`."""
        made = self._outputs
        if not isinstance(made, (OutputGaussian, OutputSamples, OutputMixture)):
            made = self._outputs = made()
        return made

    @property
    def epistemic(self) -> Tensor:
        """Return the uncertainty that more data could remove.

        Regression and counts: the variance of E[y given f], (N, C). Classes: the mutual information of y and the
        weights, (N,). Binary labels: the same for each label, (N, C). The last two take draws, which are made when
        this is first read.
        """
        return self._part()[0]

    @property
    def aleatoric(self) -> Tensor:
        """Return the uncertainty that more data could not remove: the noise variance, or the rest of the entropy."""
        return self._part()[1]

    def _part(self) -> tuple[Tensor, Tensor]:
        if self._epistemic is None or self._aleatoric is None:
            assert self._parts is not None
            self._epistemic, self._aleatoric = self._parts()
            self._parts = None
        return self._epistemic, self._aleatoric

    @property
    def kind(self) -> str:
        """Return what y is: 'classes', 'labels' (0 or 1 each), 'regression', or 'counts'."""
        return kind_of(self.distribution)

    @property
    def label(self) -> Tensor:  # (N,) or (N, C)
        """Return the most probable class of each input; for labels, whether each is more probable than not.

        Raises:
            UnsupportedError: y is a number.
        """
        return label_of(self.mean, self.kind)

    def quantile(self, q: float | Tensor) -> Tensor:
        """Return the q-quantile of y for regression; for other models, of each probability or rate under the posterior.

        Exact for regression, and for rates, labels and ordered classes under a Gaussian over outputs. For probabilities
        of several classes, the quantiles are those of 1,000 seeded draws: from the Dirichlet of a bridge link,
        otherwise from the outputs. The mean of these draws is that of link 'mc', which the other links approximate.
        Below 0.001 and above 0.999, the result is the outermost draw.

        Args:
            q: A number strictly between 0 and 1, or Q of them.

        Returns:
            (N, C), or (Q, N, C) for a vector of Q levels.

        Raises:
            OptionError: q is not strictly between 0 and 1.
        """
        try:
            levels = torch.as_tensor(q, dtype=torch.float64, device=self.mean.device)
        except (TypeError, ValueError, RuntimeError):
            levels = torch.tensor(torch.nan)
        if levels.dim() > 1 or not len(levels.reshape(-1)) or not ((levels > 0) & (levels < 1)).all():
            raise OptionError(f"q={shown(q)} must be a number, or a vector of numbers, strictly between 0 and 1.")
        found = self._at(levels.reshape(-1), torch.special.ndtri(levels.reshape(-1)))
        return found.reshape(*levels.shape, *found.shape[1:])

    def interval(self, level: float = 0.95) -> tuple[Tensor, Tensor]:
        """Return the central interval that holds `level` of the probability.

        Args:
            level: A number strictly between 0 and 1.

        Returns:
            The lower and the upper end, (N, C) each.

        Raises:
            OptionError: the level is not strictly between 0 and 1.
        """
        try:
            inside = 0 < float(level) < 1
        except (TypeError, ValueError, RuntimeError):
            inside = False
        if not inside:
            raise OptionError(f"level={shown(level)} must lie strictly between 0 and 1, as in interval(0.95).")
        level = float(level)
        tail = (1 - level) / 2
        levels = torch.tensor([tail, 1 - tail], dtype=torch.float64, device=self.mean.device)
        z = torch.special.ndtri(levels[:1]) if level > 0.5 else -math.sqrt(2) * torch.erfinv(levels.new_tensor([level]))
        low, high = self._at(levels, torch.cat([z, -z]))  # the upper end by symmetry: 1 - tail is rounded
        return low, high

    def _at(self, levels: Tensor, z: Tensor) -> Tensor:  # (Q,), (Q,) -> (Q, N, C)
        """Return the quantiles at `levels`; z are the standard normal's quantiles there. In float64 until the end."""
        if self.is_regression:
            spread = self.total.double().sqrt()
            return (self.mean.double() + spread * z.reshape(-1, *[1] * spread.dim())).to(self.mean.dtype)
        if isinstance(self.distribution, Dirichlet):
            return _dirichlet_draws(self.distribution.concentration).to(levels).quantile(levels, 0).to(self.mean.dtype)
        if self.quantiles is not None and isinstance(self.outputs, OutputGaussian):
            exact = self.quantiles(self.outputs, z)
            if exact is not None:
                return exact.to(self.mean.dtype)
        how = Draws(1000, torch.Generator(self.mean.device).manual_seed(0))
        weights = self.outputs.weights_of_draws(how)
        drawn = (self.inverse_link(part).double() for part in self.outputs.draws(how))
        return torch.cat([_quantiles(values, weights, levels) for values in drawn], dim=-2).to(self.mean.dtype)

    def to(self, device: torch.device | str) -> Prediction:
        """Return the prediction with all tensors on another device.

        Args:
            device: As `torch.Tensor.to` takes it.
        """
        if self.mean.device == torch.device(device):
            return self
        return self._map_rows(lambda t: t.to(device))

    @classmethod
    def cat(cls, predictions: Sequence[Prediction]) -> Prediction:
        """Join predictions of further inputs into one, as those of consecutive batches.

        Args:
            predictions: At least one, all made with the same options.

        Raises:
            InputError: they do not go together, or there are none.
        """
        predictions = list(predictions)
        if not predictions or not all(isinstance(p, cls) for p in predictions):
            raise InputError("Prediction.cat needs a list of at least one Prediction.")
        first, *others = predictions
        outputs = [p.outputs for p in predictions]
        if any(p.mean.shape[1] != first.mean.shape[1] for p in others) or len(set(map(_form, outputs))) > 1:
            came = ", ".join(f"{_form(p.outputs)[0]} {tuple(p.mean.shape)}" for p in predictions[:4])
            raise InputError(f"these predictions cannot be joined: {came}. Predict all inputs with the same options.")
        return cls(
            concatenate([p.distribution for p in predictions]),
            torch.cat([p.mean for p in predictions]),
            torch.cat([p.epistemic for p in predictions]),
            torch.cat([p.aleatoric for p in predictions]),
            joined(outputs),
            first.inverse_link,
            first.quantiles,
        )

    def to_pandas(self, names: Sequence[str] | None = None, level: float | None = None) -> Any:
        """Return a table with a row for each input. Needs pandas.

        Classes have columns `label`, `p_0`, ..., `epistemic` and `aleatoric`; others `mean`, `std`, `epistemic` and
        `aleatoric`, with the name of the output behind it if there are several.

        Args:
            names: The names of the classes or outputs; their numbers by default.
            level: Adds the ends of `interval(level)` as columns `lower` and `upper`.

        Returns:
            A `pandas.DataFrame`.

        Raises:
            OptionError: another number of names than of classes or outputs.
            ImportError: pandas is not installed.
        """
        return table_of(self, names, level)

    def __getitem__(self, index: Any) -> Prediction:
        """Return the prediction of some of the inputs: an index, a slice, a mask, or several indices."""
        chosen = rows_at(index, len(self), self.mean.device)
        return self._map_rows(lambda t: t[chosen])

    def _map_rows(self, f: Callable[[Tensor], Tensor]) -> Prediction:
        """Return the prediction with f applied to all tensors, whose rows are the inputs."""
        return Prediction(
            map_parameters(self.distribution, f),
            f(self.mean),
            f(self.epistemic),
            f(self.aleatoric),
            self.outputs.map_rows(f),
            self.inverse_link,
            self.quantiles,
        )

    def __len__(self) -> int:
        return self.mean.shape[0]

    def __repr__(self) -> str:
        kind = type(self.distribution).__name__
        n, c = self.mean.shape
        return (
            f"Prediction({how_many(n, 'input')}, {how_many(c, 'output')}, {kind}, "
            f"mean epistemic {float(self.epistemic.mean()):.3g}, mean aleatoric {float(self.aleatoric.mean()):.3g})"
        )


def _form(outputs: Outputs) -> tuple[Any, ...]:
    """Return what outputs must have in common to be joined: covariances or not, or how many draws."""
    if isinstance(outputs, OutputSamples):
        return f"{len(outputs.samples)} draws", outputs.samples.shape[-1]
    if isinstance(outputs, OutputMixture):
        return f"a mixture of {len(outputs.members)}", *map(_form, outputs.members)
    covariances = "with" if outputs.covariance is not None else "without"
    contrasts = None if outputs.contrasts is None else _form(outputs.contrasts)
    return f"a Gaussian {covariances} covariances", outputs.mean.shape[1], contrasts


def _quantiles(values: Tensor, weights: Tensor | None, levels: Tensor) -> Tensor:  # (S, ...), (S,), (Q,) -> (Q, ...)
    """Return quantiles over the draws. With weights: the smallest value that has the level's weight up to it."""
    if weights is None:
        return values.quantile(levels, 0)
    ordered, order = values.sort(0)
    reached = weights.to(values)[order].cumsum(0)
    at = [(reached < level - 1e-12).sum(0, keepdim=True).clamp(max=len(values) - 1) for level in levels]
    return torch.cat([ordered.gather(0, index) for index in at])


def _dirichlet_draws(alpha: Tensor) -> Tensor:  # (N, C) -> (1000, N, C)
    """Return seeded draws. Computed in logarithms, because gamma variates of small alpha underflow."""
    a, rng = alpha.detach().cpu().double().numpy(), np.random.default_rng(0)
    size = (1000, *a.shape)
    logs = np.log(rng.standard_gamma(a + 1, size)) + np.log(1 - rng.random(size)) / a
    return torch.from_numpy(logs).softmax(-1)
