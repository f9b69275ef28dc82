"""Which part of J S J^T is asked for: the covariance S of weights as outputs with the Jacobian J see it.

    EACH_OUTPUT     its diagonal, (N, C)
    EACH_EXAMPLE    a block for each example, (N, C, C)
    Times(v)        those blocks times a vector each, (N, C)
    ALL_EXAMPLES    all of it, (N, C, N, C)

One object serves every form that a covariance has: independent weights, Kronecker factors, a dense matrix, a low rank.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Final, Protocol

import torch
from torch import Tensor

from laplace.backprop.covariances import KroneckerCovariance
from laplace.backprop.gradients import Jacobian, JacobianOf


class Weights(Protocol):
    """Defines what is asked of a Gaussian over all weights there are."""

    def variance(self, jacobian: Jacobian) -> Tensor: ...

    def covariance(self, jacobian: Jacobian) -> Tensor: ...

    def product(self, jacobian: Jacobian, v: Tensor) -> Tensor: ...

    def joint(self, jacobian: Jacobian) -> Tensor: ...


class Asked(ABC):
    """Names a part of J S J^T.

    Attributes:
        examples_apart: whether the answer for some examples is a part of that for all.
    """

    examples_apart: bool = True

    @abstractmethod
    def of(self, jacobian: JacobianOf, spread: KroneckerCovariance) -> Tensor:
        """Return it for one tensor's weights with the covariance `spread`."""

    @abstractmethod
    def of_weights(self, gaussian: Weights, jacobian: Jacobian) -> Tensor:
        """Return it for a Gaussian over all weights."""

    @abstractmethod
    def of_rows(self, y: Tensor) -> Tensor:  # (k, N, C)
        """Return it for J S J^T = sum of y_k y_k^T, the outputs y_k = J v_k of a low rank S = sum of v_k v_k^T."""

    def left(self, prior: Tensor, y: Tensor) -> Tensor:  # y: (k, N, C)
        """Return J diag(1/d) J^T without what y = Y^T J^T explains of it; in float64: they nearly cancel."""
        return prior - self.of_rows(y)

    def double(self) -> Asked:
        """Return the same in float64."""
        return self

    def part(self, examples: slice) -> Asked:
        """Return the same for some examples."""
        return self


class _EachOutput(Asked):
    def of(self, jacobian: JacobianOf, spread: KroneckerCovariance) -> Tensor:
        return jacobian.variance(spread)

    def of_weights(self, gaussian: Weights, jacobian: Jacobian) -> Tensor:
        return gaussian.variance(jacobian)

    def of_rows(self, y: Tensor) -> Tensor:
        return y.square().sum(0)

    def left(self, prior: Tensor, y: Tensor) -> Tensor:
        return (prior - self.of_rows(y)).clamp(min=0)


class _EachExample(Asked):
    def of(self, jacobian: JacobianOf, spread: KroneckerCovariance) -> Tensor:
        return jacobian.covariance(spread)

    def of_weights(self, gaussian: Weights, jacobian: Jacobian) -> Tensor:
        return gaussian.covariance(jacobian)

    def of_rows(self, y: Tensor) -> Tensor:
        return torch.einsum("knc,knd->ncd", y, y)


class _AllExamples(Asked):
    examples_apart = False

    def of(self, jacobian: JacobianOf, spread: KroneckerCovariance) -> Tensor:
        return jacobian.joint(spread)

    def of_weights(self, gaussian: Weights, jacobian: Jacobian) -> Tensor:
        return gaussian.joint(jacobian)

    def of_rows(self, y: Tensor) -> Tensor:
        return torch.einsum("knc,kmd->ncmd", y, y)


@dataclass(frozen=True, eq=False)
class Times(Asked):
    """Multiplies the blocks of each example with a vector, without the C x C blocks where that is possible."""

    v: Tensor  # (N, C)

    def of(self, jacobian: JacobianOf, spread: KroneckerCovariance) -> Tensor:
        return jacobian.product(spread, self.v)

    def of_weights(self, gaussian: Weights, jacobian: Jacobian) -> Tensor:
        return gaussian.product(jacobian, self.v)

    def of_rows(self, y: Tensor) -> Tensor:
        return torch.einsum("knc,kn->nc", y, torch.einsum("knd,nd->kn", y, self.v.to(y)))

    def double(self) -> Times:
        return Times(self.v.double())

    def part(self, examples: slice) -> Times:
        return Times(self.v[examples])


EACH_OUTPUT: Final[Asked] = _EachOutput()
EACH_EXAMPLE: Final[Asked] = _EachExample()
ALL_EXAMPLES: Final[Asked] = _AllExamples()
