"""Hold the result of tuning, and all points that were evaluated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from laplace.checks import choice, how_many, shown
from laplace.errors import OptionError
from laplace.posterior.posterior import Posterior
from laplace.priors.base import Prior
from laplace.priors.gaussian import GaussianPrior

KINDS = ("prior_precision", "sigma_noise", "temperature")


@dataclass(frozen=True)
class Point:
    """Holds one setting of the hyperparameters, and its score.

    Attributes:
        prior_precision: (), one per tensor or one per weight; empty, (0,), for a prior without precisions.
        sigma_noise: the noise of a regression.
        temperature: the temperature of the likelihood.
        score: the log evidence, or the validation score.
        hyperparameters: the hyperparameters by name, for a prior that is not given by precisions.
    """

    prior_precision: Tensor
    sigma_noise: float
    temperature: float
    score: float
    hyperparameters: Mapping[str, Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, posterior: Posterior, score: float) -> Point:
        """Return the setting of a posterior."""
        prior, rest = posterior.prior, (float(posterior.sigma), posterior.temperature, score)
        if isinstance(prior, GaussianPrior):
            return cls(prior.precision.detach(), *rest)
        return cls(posterior.sigma.new_empty(0), *rest, prior.detached().hyperparameters)

    def applied(self, posterior: Posterior) -> Posterior:
        """Return a posterior of the same fit with this setting."""
        prior, sigma = posterior.prior, posterior.sigma
        if self.hyperparameters:
            prior = prior.with_hyperparameters(**self.hyperparameters)
        elif isinstance(prior, GaussianPrior):
            prior = prior.with_precision(self.prior_precision)
        noise = torch.as_tensor(self.sigma_noise, dtype=sigma.dtype, device=sigma.device)
        return replace(posterior, prior=prior, sigma=noise, temperature=self.temperature)

    def __str__(self) -> str:
        values = self.hyperparameters or {"prior precision": self.prior_precision}
        prior = ", ".join(f"{name} {_shown(value)}" for name, value in values.items())
        noise = "" if self.sigma_noise == 1 else f", sigma_noise {self.sigma_noise:.4g}"
        return f"{prior}{noise}, temperature {self.temperature:.4g}"


def _shown(value: Tensor) -> str:
    """Write one number, or the first few."""
    values = value.reshape(-1)
    if len(values) == 1:
        return f"{float(values[0]):.4g}"
    shown = ", ".join(f"{v:.4g}" for v in values[:4].tolist())
    if len(values) > 4:
        shown = f"{shown}, ... ({len(values)} values, {float(values.min()):.3g} to {float(values.max()):.3g})"
    return f"[{shown}]"


@dataclass(frozen=True, repr=False)
class Tuned:
    """Holds the best point, all points in the order in which they were evaluated, and the effort.

    Attributes:
        method: the method that was used: 'evidence'; 'guarded evidence', whose prior precision was raised until the
            posterior did no harm; 'residuals and evidence', noise and prior of a regression by 'auto'; 'loo',
            'validation', 'bayesian', or the name of your own method.
        best: the chosen `Point`, with the largest log evidence or the smallest score. For 'guarded evidence', its score
            is the log evidence at that point.
        points: all points that were evaluated.
        steps: the number of Newton steps, or of rounds of a search.
        factorisations: how many posteriors were computed.
        notes: the warnings, and why this method was used.
        converged: whether the search ended because nothing nearby was better, and not because of its number of steps.
            None for a plain grid and for 'bayesian', which do not check this.
        by_evidence: whether your own method maximised the log evidence, so that the scores are log evidences.
    """

    method: str
    best: Point
    points: tuple[Point, ...]
    steps: int
    factorisations: int
    notes: tuple[str, ...] = ()
    converged: bool | None = None
    by_evidence: bool = False

    @property
    def prior_precision(self) -> Tensor:
        """Return the best prior precision. For a prior without precisions, use `hyperparameters`."""
        return self.best.prior_precision

    @property
    def hyperparameters(self) -> Mapping[str, Tensor]:
        """Return the best hyperparameters by name, for a prior that is not given by precisions."""
        return self.best.hyperparameters

    @property
    def sigma_noise(self) -> float:
        """Return the best noise."""
        return self.best.sigma_noise

    @property
    def temperature(self) -> float:
        """Return the best temperature."""
        return self.best.temperature

    @property
    def score(self) -> float:
        """Return the best log evidence, or the best validation score."""
        return self.best.score

    def curve(self, name: str = "prior_precision", index: int = 0) -> tuple[Tensor, Tensor]:  # (n,), (n,)
        """Return the evaluated values of one hyperparameter, in ascending order, and their scores, for a plot.

        Args:
            name: the name of the hyperparameter.
            index: which one of several prior precisions.

        Returns:
            Values (n,) and scores (n,).

        Raises:
            OptionError: the name or the index is unknown.
        """
        own = self.best.hyperparameters
        name = choice(name, [*own, *KINDS[1:]] if own else KINDS, "name")
        if isinstance(index, bool) or not isinstance(index, int):
            raise OptionError(f"index={index!r}: the number of a prior precision, 0 for the first, is needed.")
        values = [point.hyperparameters[name] if name in own else getattr(point, name) for point in self.points]
        rows = [torch.as_tensor(value, dtype=torch.float64).reshape(-1) for value in values]
        if any(not -len(row) <= index < len(row) for row in rows):
            raise OptionError(f"index={index}: there are {min(map(len, rows))} values of {name}.")
        values = torch.stack([row[index] for row in rows])
        order = values.argsort(stable=True)
        return values[order], torch.tensor([point.score for point in self.points], dtype=torch.float64)[order]

    def __repr__(self) -> str:
        what = "log evidence" if self.by_evidence or self.method.endswith("evidence") else "score"
        ended = {True: ", converged", False: ", not converged", None: ""}[self.converged]
        lines = [
            f"Tuned by {self.method}: {what} {self.score:.6g} at {self.best}",
            f"  {how_many(len(self.points), 'point')} in {how_many(self.steps, 'step')}, "
            f"{how_many(self.factorisations, 'factorisation')}{ended}",
        ]
        return "\n".join([*lines, *(f"  note: {note}" for note in self.notes)])


def names_of(names: Sequence[str], prior: Prior, noise: bool) -> list[str]:
    """Return the named hyperparameters, each once. Without names: those of the prior, and the noise if asked for."""
    gaussian = isinstance(prior, GaussianPrior)
    valid = KINDS if gaussian else [*prior.hyperparameters, *KINDS[1:]]
    usual = ["prior_precision"] if gaussian else list(prior.tuned)
    if listed := [name for name in names if isinstance(name, (list, tuple, set))]:
        each = ", ".join(map(repr, listed[0]))
        raise OptionError(f"la.tune({shown(listed[0])}): give the names one by one: la.tune({each}).")
    found = [choice(name, valid, "hyperparameter") for name in names] or usual + ["sigma_noise"] * noise
    if not found:
        raise OptionError(f"{prior} has no hyperparameters to tune.")
    if len(set(found)) < len(found):
        raise OptionError(f"each hyperparameter is named once; got {', '.join(map(repr, found))}.")
    return found
