"""Define curvature estimators: they choose the vectors that are sent back from the outputs of each example."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from laplace.checks import whole_number
from laplace.keywords import NamedOptions
from laplace.likelihoods.base import Likelihood
from laplace.linalg.output_curvature import OutputCurvature


@dataclass(frozen=True)
class Estimator(NamedOptions, ABC):
    """Estimates Lambda, the curvature of -log p(y given f) in the outputs f.

    Attributes:
        name: its name in files and summaries. By default that of the class, so that nothing is mistaken for its parent.
        draws: whether it draws random numbers.
        exact_hessian: whether second derivatives of the network itself are needed, besides those of the loss.
        empirical: whether Lambda is made of scores at the labels, one vector for each example with all its positions. A
            noise sigma then scales it by sigma^-4 instead of sigma^-2.
    """

    name: ClassVar[str]
    draws: ClassVar[bool] = False
    exact_hessian: ClassVar[bool] = False
    empirical: ClassVar[bool] = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Name the subclass after its class, unless it has a name."""
        super().__init_subclass__(**kwargs)
        if "name" not in vars(cls):
            cls.name = cls.__name__

    @property
    def vectors(self) -> int:
        """Return how many vectors per example are drawn, or 1 if none are."""
        return 1

    @abstractmethod
    def __call__(
        self,
        likelihood: Likelihood,
        f: Tensor,  # (N, C)
        y: Tensor,
        generator: torch.Generator | None,
    ) -> OutputCurvature:
        """Return Lambda of each example, or an unbiased estimate of it."""


@dataclass(frozen=True)
class Drawn(Estimator):
    """Estimates the GGN without bias from a few random vectors.

    Attributes:
        samples: how many vectors per example.

    Raises:
        OptionError: `samples` is not a whole number of at least 1.
    """

    samples: int = 1
    draws: ClassVar[bool] = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "samples", whole_number(self.samples, "samples"))

    @property
    def vectors(self) -> int:
        return self.samples
