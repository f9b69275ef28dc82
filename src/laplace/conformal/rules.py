"""Define the scores that compare a new example with the calibration examples: one class per method.

A score says how badly y fits the prediction. Any score gives the guarantee; a good one gives small sets, and sets that
are larger where the model is less sure.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar, Final

import torch
from torch import Tensor

from laplace.checks import flag, shown, whole_number
from laplace.errors import OptionError
from laplace.linalg.sampling import Keyed, uniforms


class IntervalRule(ABC):
    """Scores numbers. Its sets are intervals around the mean."""

    name: ClassVar[str]

    @abstractmethod
    def kept(self, residual: Tensor, std: Tensor) -> Tensor:  # (n, G), (n, G) -> (n, G, K)
        """Return what is kept of the calibration examples, enough for every level."""

    @abstractmethod
    def scores(self, kept: Tensor, level: float) -> Tensor:  # (n, G, K) -> (n, G)
        """Return the scores of the calibration examples at a level."""

    @abstractmethod
    def half_width(self, std: Tensor, q: Tensor, level: float) -> Tensor:  # (N, G), (G,) -> (N, G)
        """Return the half-width of the interval that holds all y whose score does not exceed q."""


@dataclass(frozen=True)
class Absolute(IntervalRule):
    """Scores by abs(y - mean): intervals of one width for all inputs."""

    name: ClassVar[str] = "absolute"

    def kept(self, residual: Tensor, std: Tensor) -> Tensor:
        return residual.unsqueeze(-1)

    def scores(self, kept: Tensor, level: float) -> Tensor:
        return kept[..., 0]

    def half_width(self, std: Tensor, q: Tensor, level: float) -> Tensor:
        return q.expand_as(std)


@dataclass(frozen=True)
class Scaled(IntervalRule):
    """Scores by abs(y - mean) / std: intervals in proportion to the predictive's deviation (Lei et al., 2018)."""

    name: ClassVar[str] = "scaled"

    def kept(self, residual: Tensor, std: Tensor) -> Tensor:
        return (residual / std).unsqueeze(-1)

    def scores(self, kept: Tensor, level: float) -> Tensor:
        return kept[..., 0]

    def half_width(self, std: Tensor, q: Tensor, level: float) -> Tensor:
        return q * std


@dataclass(frozen=True)
class Quantiles(IntervalRule):
    """Scores by max(low - y, y - high): the predictive's quantiles, moved by one amount (Romano et al., 2019).

    With mean and standard deviation, low and high are mean -+ z(level) std, and the score is abs(y - mean) - z std.
    """

    name: ClassVar[str] = "cqr"

    def kept(self, residual: Tensor, std: Tensor) -> Tensor:
        return torch.stack([residual, std], -1)

    def scores(self, kept: Tensor, level: float) -> Tensor:
        return kept[..., 0] - _z(level) * kept[..., 1]

    def half_width(self, std: Tensor, q: Tensor, level: float) -> Tensor:
        return (_z(level) * std + q).clamp_min(0)  # a large correction inwards would turn the interval inside out


class SetRule(ABC):
    """Scores classes. Its sets are the classes with a score up to the threshold."""

    name: ClassVar[str]
    randomized: bool  # whether the score takes a random number for each example

    @abstractmethod
    def scores(self, p: Tensor, u: Tensor | None) -> Tensor:  # (N, G, K), (N, G) -> (N, G, K)
        """Return the score that each class would have if it were the true one. u is uniform, or None."""

    def random(self, p: Tensor, generator: torch.Generator | None) -> Tensor | None:  # (N, G)
        """Return a random number for each row of p, or None for a rule that draws none."""
        if not self.randomized:
            return None
        if isinstance(generator, Keyed):
            return uniforms(len(p), 1, p.shape[1], p, generator)[0].to(p)
        device = p.device if generator is None else generator.device
        return torch.rand(p.shape[:2], generator=generator, dtype=p.dtype, device=device).to(p.device)


@dataclass(frozen=True)
class Threshold(SetRule):
    """Scores by 1 - p(class): all classes above one probability, the smallest sets on average (Sadinle et al. 2019)."""

    name: ClassVar[str] = "lac"

    @property
    def randomized(self) -> bool:  # type: ignore[override]
        return False

    def scores(self, p: Tensor, u: Tensor | None) -> Tensor:
        return 1 - p


@dataclass(frozen=True)
class Adaptive(SetRule):
    """Scores by the probability of all classes at least as probable, minus u p(class) (Romano et al., 2020).

    Its sets are larger for harder inputs. Without u, each class counts whole, and sets are somewhat larger.
    """

    name: ClassVar[str] = "aps"
    randomized: bool = True

    def scores(self, p: Tensor, u: Tensor | None) -> Tensor:
        return _cumulated(p, u)[0]


@dataclass(frozen=True)
class Regularised(SetRule):
    """Scores as `Adaptive`, plus penalty max(rank - k_reg, 0): fewer very large sets (Angelopoulos et al., 2021)."""

    name: ClassVar[str] = "raps"
    randomized: bool = True
    penalty: float = 0.01
    k_reg: int = 5

    def __post_init__(self) -> None:
        """Refuse a penalty below zero, and a k_reg that is not a number of classes."""
        whole_number(self.k_reg, "k_reg", least=0)
        penalty = self.penalty
        if isinstance(penalty, bool) or not isinstance(penalty, (int, float)) or not 0 <= penalty < float("inf"):
            raise OptionError(f"penalty={shown(penalty)} must be a number from 0 up, as in penalty=0.01.")

    def scores(self, p: Tensor, u: Tensor | None) -> Tensor:
        score, rank = _cumulated(p, u)
        return score + self.penalty * (rank - self.k_reg).clamp_min(0)


INTERVALS: dict[str, type[IntervalRule]] = {rule.name: rule for rule in (Scaled, Absolute, Quantiles)}
SETS: dict[str, type[SetRule]] = {rule.name: rule for rule in (Threshold, Adaptive, Regularised)}
RANDOMISED: Final = (Adaptive.name, Regularised.name)


def rule_of(method: str | None, kind: str, given: dict[str, Any]) -> IntervalRule | SetRule:
    """Return the rule of this name for predictions of this kind; without a name, the default.

    Args:
        method: One of `INTERVALS` for numbers, one of `SETS` for classes.
        kind: What is predicted: 'classes', 'labels', 'regression' or 'counts'.
        given: The options that the user gave; those that are None were left out.
    """
    rules: dict[str, Any] = INTERVALS if kind in ("regression", "counts") else SETS
    rules = {"lac": Threshold} if kind == "labels" else {"scaled": Scaled} if kind == "counts" else rules
    if method is None:
        method = next(iter(rules))
    if method not in rules:
        raise OptionError(f"method={shown(method)} does not exist for {kind}; write one of {list(rules)}.")
    cls = rules[method]
    options = {name: value for name, value in given.items() if value is not None}
    known = _fields(cls)
    if further := sorted(options.keys() - known):
        takes = [name for name, rule in SETS.items() if further[0] in _fields(rule)]
        raise OptionError(f"{further[0]}= goes with method={' or '.join(map(repr, takes))}, not with {method!r}.")
    if "randomized" in options:
        options["randomized"] = flag(options["randomized"], "randomized")
    return cls(**options)


def options_of_rule(rule: IntervalRule | SetRule) -> dict[str, Any]:
    """Return the options that make the same rule again."""
    return asdict(rule)  # type: ignore[call-overload]


def _fields(rule: Any) -> set[str]:
    return {field.name for field in fields(rule)}


def _cumulated(p: Tensor, u: Tensor | None) -> tuple[Tensor, Tensor]:  # (N, G, K) each
    """Return the probability of the classes up to each one, the most probable first, and its rank from 1."""
    order = torch.sort(p, stable=True, dim=-1, descending=True).indices
    rank = order.argsort(-1)
    total = p.gather(-1, order).cumsum(-1).gather(-1, rank)
    return total if u is None else total - u.unsqueeze(-1) * p, rank + 1


def _z(level: float) -> float:
    """Return the half-width in standard deviations of a Gaussian's central interval at a level."""
    return torch.special.ndtri(torch.tensor((1 + level) / 2, dtype=torch.float64)).item()
