"""What tuning found, and what it looked at on the way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from laplace.checks import choice
from laplace.errors import OptionError
from laplace.posterior import Posterior

KINDS = ("prior_precision", "sigma_noise", "temperature")


@dataclass(frozen=True)
class Point:
    """One setting of the hyperparameters, and its score.

    Attributes:
        prior_precision: (), one per tensor or one per weight.
        sigma_noise: the noise of a regression.
        temperature: of the likelihood.
        score: the log evidence, or the validation score.
    """

    prior_precision: Tensor
    sigma_noise: float
    temperature: float
    score: float

    @classmethod
    def of(cls, posterior: Posterior, score: float) -> Point:
        """The setting of a posterior."""
        return cls(posterior.prior.precision.detach(), float(posterior.sigma), posterior.temperature, score)

    def __str__(self) -> str:
        values = self.prior_precision.reshape(-1)
        shown = f"{float(values[0]):.4g}"
        if len(values) > 1:
            shown = ", ".join(f"{v:.4g}" for v in values[:4].tolist())
            if len(values) > 4:
                shown = f"{shown}, ... ({len(values)} values, {float(values.min()):.3g} to {float(values.max()):.3g})"
            shown = f"[{shown}]"
        return f"prior precision {shown}, sigma_noise {self.sigma_noise:.4g}, temperature {self.temperature:.4g}"


@dataclass(frozen=True, repr=False)
class Tuned:
    """The best point, all points in the order in which they were looked at, and what that took.

    Attributes:
        method: 'evidence', 'validation' or 'bayesian'.
        best: the `Point` that was taken: of the largest log evidence, or of the smallest validation score.
        points: all that were looked at.
        steps: Newton's, or a search's rounds.
        factorisations: how many posteriors were made.
        notes: the warnings.
    """

    method: str
    best: Point
    points: tuple[Point, ...]
    steps: int
    factorisations: int
    notes: tuple[str, ...] = ()

    @property
    def prior_precision(self) -> Tensor:
        """The best prior precision."""
        return self.best.prior_precision

    @property
    def sigma_noise(self) -> float:
        """The best noise."""
        return self.best.sigma_noise

    @property
    def temperature(self) -> float:
        """The best temperature."""
        return self.best.temperature

    @property
    def score(self) -> float:
        """The best log evidence, or the best validation score."""
        return self.best.score

    def curve(self, name: str = "prior_precision", index: int = 0) -> tuple[Tensor, Tensor]:  # (n,), (n,)
        """The values looked at of one hyperparameter, in ascending order, and their scores: what one would plot.

        Args:
            name: which hyperparameter.
            index: which one of several prior precisions.

        Returns:
            Values (n,) and scores (n,).

        Raises:
            OptionError: a name or an index that there is not.
        """
        name = choice(name, KINDS, "name")
        if isinstance(index, bool) or not isinstance(index, int):
            raise OptionError(f"index={index!r}: the number of a prior precision, 0 for the first, is needed.")
        rows = [torch.as_tensor(getattr(point, name), dtype=torch.float64).reshape(-1) for point in self.points]
        if any(not -len(row) <= index < len(row) for row in rows):
            raise OptionError(f"index={index}: there are {min(map(len, rows))} values of {name}.")
        values = torch.stack([row[index] for row in rows])
        order = values.argsort(stable=True)
        return values[order], torch.tensor([point.score for point in self.points], dtype=torch.float64)[order]

    def __repr__(self) -> str:
        what = "log evidence" if self.method == "evidence" else "score"
        lines = [
            f"Tuned by {self.method}: {what} {self.score:.6g} at {self.best}",
            f"  {len(self.points)} points in {self.steps} steps, {self.factorisations} factorisations",
        ]
        return "\n".join([*lines, *(f"  note: {note}" for note in self.notes)])


def names_of(names: Sequence[str]) -> list[str]:
    """The hyperparameters of these names, each once; of no name the prior precision."""
    found = [choice(name, KINDS, "hyperparameter") for name in names] or ["prior_precision"]
    if len(set(found)) < len(found):
        raise OptionError(f"each hyperparameter is named once; got {', '.join(map(repr, found))}.")
    return found


def method_named(name: str) -> str:
    """'evidence', 'validation' or 'bayesian'; laplace-torch's names are other names for the first two."""
    word = str(getattr(name, "value", name))
    others = {"marglik": "evidence", "gridsearch": "validation", "CV": "validation"}
    return choice(others.get(word, name), ["evidence", "validation", "bayesian"], "method")
