"""Find the best scale for each factor of the prior precision, on validation data, and choose one factor by a rule.

The objective is the mean negative log-likelihood, with outside inputs minus `ood_weight` times their mean entropy. A
hyperprior adds its negative logarithm, divided by the number of examples:

    [ log(1 + (log T / 0.3)^2) + min(d^2, 3^2) / 2 ] / N,    d = log10(prior precision / that of the evidence)

so it matters with 200 examples, and has no effect with 20,000. Its tails are heavy: a network that is far too sure, and
needs T = 3, is hardly affected. If the noise is below the training residuals r, the first term is replaced by
(log(r / sigma) / 0.1)^2 / 2: noise is rarely smaller on new data, but a few examples can suggest it if a wide posterior
happens to explain their errors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
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
_HOPELESS = 0.1  # nats per output above the best, where the search of a scale ends
_NO_MORE = 1e-4  # nats between the narrowest posterior of the grid and the network, or between its last two steps
_SAME = 1e-5  # nats between a posterior and the network, where its best scale is the network's
_MOST_ADDED = 24  # half decades added to the grid on one side


@dataclass(frozen=True)
class Candidate:
    """Holds a setting with its scores.

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
    """Searches the scale of each factor, and extends the grid of factors if the best one is at its end."""

    def __init__(self, held_out: HeldOut, ood_weight: float, start: float, centre: float | None) -> None:
        self.held_out, self.ood_weight, self.start, self.centre = held_out, ood_weight, start, centre
        self.lines: dict[float, Line] = {}
        self._line = _lines(held_out.scale, start)
        self._objectives: dict[Setting, float] = {}
        self._hopeless = _HOPELESS * (held_out.posterior.fit.n_outputs if held_out.scale == "sigma_noise" else 1)

    def search(self) -> None:
        """Find the best scale of each factor. Factors that are hopeless at every scale are left out."""
        self._explore(half_decades(-HALF_DECADES, HALF_DECADES))
        top = max(self.factors)
        if (away := self._from_network(top)) > _NO_MORE:
            steps = min(_MOST_ADDED, math.ceil(2 * math.log10(away / _NO_MORE)))
            self._explore([top * step for step in half_decades(1, steps)])
        for _ in range(_MOST_ADDED // 4):
            widest, next_widest = sorted(self.factors)[:2]
            lowest = min(self.factors, key=lambda factor: self.lines[factor].value)
            gain = self.lines[next_widest].value - self.lines[widest].value
            wider = [widest * step for step in half_decades(-4, -1)]
            if lowest != widest or gain < _NO_MORE or not self._explore(wider):
                break

    def _explore(self, factors: Sequence[float]) -> bool:
        """Search the scales of further factors. Return whether the dtype can represent any of their posteriors."""
        usable = [factor for factor in factors if self._has_posterior(factor)]
        if self.held_out.scale == "softmax_temperature" and usable:
            usable = self._looked_for(usable)
        else:
            self.lines |= {factor: self._line() for factor in ([] if NETWORK in self.lines else [NETWORK]) + usable}
        self._descend()
        return bool(usable)

    def _looked_for(self, factors: Sequence[float]) -> list[float]:
        """Estimate each log T from a few examples, and begin there. Return the factors that have a chance.

        Links cost more than softmax, and most where the posterior is so wide that it is hopeless.
        """
        self.held_out.keep([NETWORK, *factors])
        if NETWORK not in self.lines:
            self.lines[NETWORK] = self._line()
            self._descend()
        own = self.lines[NETWORK].best
        few = {factor: _around(own) for factor in factors} | {NETWORK: _around(own)}
        descend(few, self._few_totals, self._hopeless)
        lowest = min(line.value for line in few.values())
        narrowest = max([*self.factors, *factors])
        going = [f for f in factors if few[f].value <= lowest + self._hopeless or f == narrowest]
        self._score([(factor, _scale(own)) for factor in going])
        for factor in going:
            same = self._from_network(factor) <= _SAME
            self.lines[factor] = _near([own] if same else [few[factor].best + step for step in (-0.15, 0.0, 0.15)])
        return going

    def _from_network(self, factor: float) -> float:
        """Return how far a factor's objective is from the network's, at the best scale of both that was scored."""
        scales = {scale for each, scale in self._objectives if each == factor}
        both = [scale for scale in scales if (NETWORK, scale) in self._objectives]
        scale = min(both, key=lambda scale: self._objectives[NETWORK, scale])
        return abs(self._objectives[factor, scale] - self._objectives[NETWORK, scale])

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
        value = paired(scored.losses, scored.weights)[0]
        return value - (0.0 if scored.entropies is None else self.ood_weight * float(scored.entropies.mean()))

    def _has_posterior(self, factor: float) -> bool:
        try:
            posterior = self.held_out.at(factor)
            return posterior.gaussian is not None
        except (NumericalError, OptionError):
            return False

    def _descend(self) -> None:
        """Search all scales that are not found yet."""
        descend(self.lines, self._totals, self._hopeless)

    def _totals(self, settings: Sequence[Setting]) -> list[float]:
        self._score([setting for setting in settings if setting not in self._objectives])
        return [self._objectives[setting] + self.penalty(setting) for setting in settings]

    def _few_totals(self, settings: Sequence[Setting]) -> list[float]:
        found = [self._objective(scored) for scored in self.held_out.scores(settings, few=True)]
        self._require_finite(settings, found)
        return [value + self.penalty(setting) for value, setting in zip(found, settings, strict=True)]

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


def descend(lines: Mapping[float, Line], totals: Callable[[Sequence[Setting]], list[float]], hopeless: float) -> None:
    """Search the scales of all factors in rounds, each of which scores a few scales of every factor.

    Factors that are worse than the best by more than `hopeless` are left as they are.
    """
    while True:
        lowest = min((line.value for line in lines.values() if line.seen), default=math.inf)
        going = [f for f, line in lines.items() if not line.seen or line.value <= lowest + hopeless]
        asked = {factor: points for factor in going if (points := lines[factor].ask())}
        if not asked:
            return
        found = iter(totals([(factor, _scale(u)) for factor, points in asked.items() for u in points]))
        for factor, points in asked.items():
            lines[factor].take(points, [next(found) for _ in points])


def best_of(candidates: Sequence[Candidate], references: Sequence[Candidate]) -> Candidate:
    """Return the best candidate that is, without the hyperprior, no worse than each reference."""
    limit = min(each.objective for each in references)
    return min((c for c in [*candidates, *references] if c.objective <= limit), key=lambda each: each.total)


def widest_of(
    candidates: Sequence[Candidate],
    best: Candidate,
    references: Sequence[Candidate],
    difference: Callable[[Candidate, Candidate], tuple[float, float]],
) -> Candidate:
    """Return the widest posterior within one standard error of the best whose loss is surely small.

    It may cost up to its standard error against the references, and with two standard errors added no more than `CAP`:
    the fewer the examples, the narrower it is. A gain counts only if it is larger than two standard errors. Otherwise a
    posterior that does the work of a temperature would pass, and be as much worse on new data as it was better here.
    """
    limit = min(references, key=lambda each: each.objective)

    def eligible(each: Candidate) -> bool:
        extra, error = difference(each, limit)
        near = each.total - best.total <= max(difference(each, best)[1], NEGLIGIBLE)
        sure = extra + 2 * error <= 0 or max(extra, 0.0) + 2 * error <= CAP
        return near and extra <= max(error, NEGLIGIBLE) and sure and each.setting[0] < NETWORK

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


def _around(centre: float) -> Line:
    """Return the first search of a posterior's log T: a wide posterior needs a smaller T than the network."""
    grid = _within([centre + step for step in (-1.0, -0.5, 0.0, 0.5)])
    return Line(grid, -_TEMPERATURES, _TEMPERATURES, tolerance=0.05, smooth=True)


def _near(points: Sequence[float]) -> Line:
    """Return the last search of a posterior's log T. The objective is flat at its minimum: 0.01 is near enough."""
    return Line(_within(points), -_TEMPERATURES, _TEMPERATURES, tolerance=0.01, smooth=True)


def _within(points: Sequence[float]) -> list[float]:
    return sorted({min(max(x, -_TEMPERATURES), _TEMPERATURES) for x in points})


def _scale(u: float) -> float:
    return math.exp(u)
