"""The best scale for each factor of the prior precision, on validation data, and the rule that picks one factor.

The objective is the mean negative log-likelihood, with outside inputs minus `ood_weight` times their mean entropy. A
hyperprior adds its negative logarithm, divided by the number of examples:

    [ log(1 + (log T / 0.3)^2) + min(d^2, 3^2) / 2 ] / N,    d = log10(prior precision / that of the evidence)

so 200 examples are held back by it, and 20,000 do not feel it. Its tails are heavy: a network that is far too sure, and
needs T = 3, is not held back by much. A posterior whose noise is below the residuals r of the data that the network was
fitted to gets (log(r / sigma) / 0.1)^2 / 2 in the place of the first term: noise is rarely smaller on new data, but a
few examples whose wide posterior happens to explain their errors ask for that.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from laplace.errors import NumericalError, OptionError
from laplace.tuning.held_out import NETWORK, HeldOut, Scored, Setting
from laplace.tuning.line import Line

HALF_DECADES: Final = 8  # of the grid, on each side of the present prior precision
CAP: Final = 0.005  # nats per example that the wider posterior may cost against the network and its rescaled self
NEGLIGIBLE: Final = 0.001  # nats per example: so much counts as equally good, however small the standard error is
_TEMPERATURES = math.log(20)  # of the search, on each side of 1
_WIDTH, _DECADES = 0.3, 3.0  # of the hyperprior: width of log T; decades beyond which it is flat
_BELOW = 0.1  # its width of log sigma below the residuals in training
_HOPELESS = 0.25  # nats per output above the best, where the search of a scale ends
_NO_MORE = 1e-4  # nats between the narrowest posterior of the grid and the network, or between its last two steps
_MOST_ADDED = 24  # half decades added to the grid on one side


@dataclass(frozen=True)
class Candidate:
    """A setting with its scores.

    Attributes:
        setting: The factor of the prior precision and the scale.
        scored: How it does on every example.
        objective: Its mean score.
        penalty: What the hyperprior adds to it.
    """

    setting: Setting
    scored: Scored
    objective: float
    penalty: float

    @property
    def total(self) -> float:
        """Return the objective with the hyperprior."""
        return self.objective + self.penalty


class Profile:
    """Searches the scale of each factor, and extends the grid of factors where its ends are not the end."""

    def __init__(self, held_out: HeldOut, ood_weight: float, start: float, centre: float | None) -> None:
        self.held_out, self.ood_weight, self.start, self.centre = held_out, ood_weight, start, centre
        self.lines: dict[float, Line] = {}
        self._line = _lines(held_out.scale, start)
        self._objectives: dict[Setting, float] = {}
        self._hopeless = _HOPELESS * (held_out.posterior.fit.n_outputs if held_out.scale == "sigma_noise" else 1)
        self._add([NETWORK, *half_decades(-HALF_DECADES, HALF_DECADES)])

    def search(self) -> None:
        """Find the best scale of each factor; those of posteriors are looked for around the network's own."""
        if self.held_out.scale == "softmax_temperature":
            self._score([(factor, 1.0) for factor in self.lines])  # all at once: the network runs once
            factors, self.lines = self.factors, {NETWORK: self.lines[NETWORK]}
            self._descend()
            self._line = _around(self.lines[NETWORK].best)
            self.lines |= {factor: self._line() for factor in factors}
        self._descend()
        line, top = self.lines[NETWORK], max(self.factors)
        shared = set(self.lines[top].seen) & set(line.seen)
        scale = _scale(min(shared, key=line.seen.__getitem__))
        away = abs(self._objectives[top, scale] - self._objectives[NETWORK, scale])
        if away > _NO_MORE:
            steps = min(_MOST_ADDED, math.ceil(2 * math.log10(away / _NO_MORE)))
            self._add([top * step for step in half_decades(1, steps)])
            self._descend()
        for _ in range(_MOST_ADDED // 4):
            widest, next_widest = sorted(self.factors)[:2]
            lowest = min(self.factors, key=lambda factor: self.lines[factor].value)
            gain = self.lines[next_widest].value - self.lines[widest].value
            if lowest != widest or gain < _NO_MORE or not self._add([widest * s for s in half_decades(-4, -1)]):
                break
            self._descend()

    @property
    def factors(self) -> list[float]:
        """Return the finite factors."""
        return [factor for factor in self.lines if factor != NETWORK]

    def candidates(self, further: Sequence[Setting]) -> list[Candidate]:
        """Return each factor at its best scale, and further settings, all scored on the same examples."""
        settings = [(factor, _scale(line.best)) for factor, line in sorted(self.lines.items())] + [*further]
        unique = list(dict.fromkeys(settings))
        found = dict(zip(unique, self.held_out.scores(unique, in_detail=True), strict=True))
        return [
            Candidate(setting, found[setting], self._objective(found[setting]), self.penalty(setting))
            for setting in settings
        ]

    def penalty(self, setting: Setting) -> float:
        """Return what the hyperprior adds to the objective."""
        factor, scale = setting
        if self.centre is None:
            return 0.0
        value = 0.0
        if self.held_out.scale == "softmax_temperature":
            value = math.log1p((math.log(scale) / _WIDTH) ** 2)
        elif self.held_out.scale == "sigma_noise" and factor < NETWORK:
            value = 0.5 * (max(0.0, math.log(self.start / scale)) / _BELOW) ** 2
        distance = math.log10(factor * self.held_out.rescaling(scale) / self.centre) if factor < NETWORK else _DECADES
        return (value + 0.5 * min(distance**2, _DECADES**2)) / count(self.held_out.weights, self.held_out.targets)

    def difference(self, one: Candidate, other: Candidate) -> tuple[float, float]:
        """Return how much larger the objective of `one` is, and the standard error of that."""
        mean, variance = paired(one.scored.losses - other.scored.losses, self.held_out.weights)
        outside = one.scored.entropies, other.scored.entropies
        if outside[0] is not None and outside[1] is not None:
            far, spread = paired(outside[0] - outside[1], None)
            mean, variance = mean - self.ood_weight * far, variance + self.ood_weight**2 * spread
        return mean, math.sqrt(variance)

    def _objective(self, scored: Scored) -> float:
        value = paired(scored.losses, self.held_out.weights)[0]
        return value - (0.0 if scored.entropies is None else self.ood_weight * float(scored.entropies.mean()))

    def _add(self, factors: Sequence[float]) -> bool:
        """Add factors to the grid. Leave out those at which there is no posterior in this dtype."""
        usable = [factor for factor in factors if factor == NETWORK or self._has_posterior(factor)]
        self.lines |= {factor: self._line() for factor in usable}
        return bool(usable)

    def _has_posterior(self, factor: float) -> bool:
        try:
            posterior = self.held_out.at(factor)
            return posterior.gaussian is not None
        except (NumericalError, OptionError):
            return False

    def _descend(self) -> None:
        """Search all scales in rounds, each of which scores a few scales of every factor."""
        while True:
            lowest = min((line.value for line in self.lines.values() if line.seen), default=math.inf)
            going = [f for f, line in self.lines.items() if not line.seen or line.value <= lowest + self._hopeless]
            asked = {factor: points for factor in going if (points := self.lines[factor].ask())}
            if not asked:
                return
            settings = [(factor, _scale(u)) for factor, points in asked.items() for u in points]
            self._score([setting for setting in settings if setting not in self._objectives])
            for factor, points in asked.items():
                here = [(factor, _scale(u)) for u in points]
                self.lines[factor].take(points, [self._objectives[s] + self.penalty(s) for s in here])

    def _score(self, settings: Sequence[Setting]) -> None:
        """Find the objectives of settings, and keep them."""
        found = [self._objective(scored) for scored in self.held_out.scores(settings)] if settings else []
        self._require_finite(settings, found)
        self._objectives |= dict(zip(settings, found, strict=True))

    def _require_finite(self, settings: Sequence[Setting], values: Sequence[float]) -> None:
        bad = [setting for setting, value in zip(settings, values, strict=True) if not math.isfinite(value)]
        if bad:
            factor, scale = bad[0]
            where = "of the network itself" if factor == NETWORK else f"at {factor:.3g} times the prior precision"
            name = self.held_out.scale or "scale"
            raise NumericalError(
                f"the validation score {where} with {name} {scale:.3g} is NaN or infinite ({len(bad)} of "
                f"{len(values)} settings); nothing changed. Look for infinite outputs or labels in val_loader."
            )


def best_of(candidates: Sequence[Candidate], references: Sequence[Candidate]) -> Candidate:
    """Return the lowest of the candidates that are no worse than each reference, without the hyperprior."""
    limit = min(each.objective for each in references)
    return min((c for c in [*candidates, *references] if c.objective <= limit), key=lambda each: each.total)


def widest_of(
    candidates: Sequence[Candidate],
    best: Candidate,
    references: Sequence[Candidate],
    difference: Callable[[Candidate, Candidate], tuple[float, float]],
) -> Candidate:
    """Return the widest posterior within one standard error of the best that surely costs little.

    It may cost up to its standard error against the references, and with another standard error added no more than
    `CAP`: the fewer the examples, the narrower it is.
    """
    limit = min(references, key=lambda each: each.objective)

    def eligible(each: Candidate) -> bool:
        extra, error = difference(each, limit)
        near = each.total - best.total <= max(difference(each, best)[1], NEGLIGIBLE)
        return near and extra <= max(error, NEGLIGIBLE) and extra + error <= CAP and each.setting[0] < NETWORK

    return min(filter(eligible, candidates), key=lambda each: each.setting[0], default=best)


def paired(differences: Tensor, weights: Tensor | None) -> tuple[float, float]:
    """Return the mean of numbers, one per example, and the variance of the mean."""
    w = torch.ones_like(differences) if weights is None else weights.to(differences)
    mean = float((w * differences).sum() / w.sum())
    n = int((w > 0).sum())
    spread = float((w * (differences - mean)).square().sum() / w.sum().square())
    return mean, spread * n / max(1, n - 1)


def count(weights: Tensor | None, targets: Tensor) -> float:
    """Return how many examples there are, by their weights."""
    return float(len(targets)) if weights is None else float(weights.sum())


def half_decades(first: int, last: int) -> list[float]:
    """Return 10^(first / 2) to 10^(last / 2)."""
    return [10 ** (step / 2) for step in range(first, last + 1)]


def _lines(scale: str | None, start: float) -> Callable[[], Line]:
    """Return what makes the search of one scale: half a unit of log T, or of log sigma, between its first points."""
    if scale is None:
        return lambda: Line([0.0], 0.0, 0.0)
    if scale == "softmax_temperature":
        grid = [-_TEMPERATURES, *(step / 2 for step in range(-5, 6)), _TEMPERATURES]
        return lambda: Line(grid, -_TEMPERATURES, _TEMPERATURES)
    centre = math.log(start)
    grid = [centre + step / 2 for step in range(-5, 4)]
    return lambda: Line(grid, centre - 40, centre + 40)


def _around(centre: float) -> Callable[[], Line]:
    """Return what makes the search of a posterior's log T: links cost more than softmax, so it begins with few points.

    A wide posterior needs a smaller T than the network. The objective is flat at its minimum: 0.01 in log T is near
    enough.
    """
    near = {min(max(centre + step, -_TEMPERATURES), _TEMPERATURES) for step in (-1.0, -0.5, 0.0, 0.5)}
    grid = sorted({*near, 0.0})  # at T = 1 all were scored
    return lambda: Line(grid, -_TEMPERATURES, _TEMPERATURES, tolerance=0.01)


def _scale(u: float) -> float:
    return math.exp(u)
