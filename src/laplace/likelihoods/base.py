"""What a likelihood p(y given f) has to say. It sees outputs and labels, never parameters."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from laplace.errors import InputError

if TYPE_CHECKING:
    from laplace.curvature.output import OutputCurvature
    from laplace.predictive.links import Link

Sums = dict[str, Tensor]


class Likelihood(ABC):
    """p(y given f) for outputs f of shape (N, C), everything at unit noise unless a sigma is passed."""

    name: ClassVar[str]
    has_noise: ClassVar[bool] = False
    links: Mapping[str, Link] = {}

    @abstractmethod
    def check_targets(self, f: Tensor, y: Tensor) -> Tensor:
        """The labels in the dtype that the formulas need, or an InputError."""

    @abstractmethod
    def log_prob(self, f: Tensor, y: Tensor, sigma: Tensor | float = 1.0) -> Tensor:  # (N,)
        """log p(y_n given f_n)."""

    @abstractmethod
    def score(self, f: Tensor, y: Tensor) -> Tensor:  # (N, C)
        """d log p(y given f) / df."""

    @abstractmethod
    def fisher(self, f: Tensor) -> OutputCurvature:
        """Lambda: E over y of score score^T."""

    @abstractmethod
    def root_times(self, f: Tensor, eps: Tensor) -> Tensor:  # (K, N, C), eps: (K, N, C)
        """L eps with L L^T = Lambda."""

    @abstractmethod
    def sample(self, f: Tensor, n_samples: int, generator: torch.Generator | None) -> Tensor:
        """Labels drawn from p(y given f), (n_samples, N, ...); example n's do not depend on the batch it is in."""

    @abstractmethod
    def inverse_link(self, f: Tensor) -> Tensor:
        """E[y given f] (regression) or the class probabilities."""

    @abstractmethod
    def sums(self, f: Tensor, y: Tensor) -> Sums:
        """What the evidence needs of the data, additive over examples; always with `loss`, -log p up to constants."""

    @abstractmethod
    def log_likelihood(self, sums: Sums, sigma: Tensor) -> Tensor:
        """log p(D given f) from the sums."""

    def curvature_scale(self, curvature: str, sigma: Tensor) -> Tensor:
        """c(sigma): by what the curvature at unit noise is multiplied."""
        return torch.ones_like(sigma)

    def check_outputs(self, f: Tensor) -> None:
        """Refuse outputs that this likelihood has no meaning for."""
        if f.dim() != 2:
            raise InputError(
                f"the network's output has shape {tuple(f.shape)}; {self.name} needs (N, C). "
                + (
                    "For a scalar output keep the last dimension: return (N, 1)."
                    if f.dim() < 2
                    else "Outputs at several positions are not built yet: pool them in the network."
                )
            )

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"
