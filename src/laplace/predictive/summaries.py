"""Summarise any prediction: variances, entropies, labels, arrays, and the predictions of some inputs."""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.distributions import Bernoulli, Categorical, Dirichlet, Distribution, MultivariateNormal, Normal

from laplace.checks import shown
from laplace.errors import InputError, UnsupportedError

if TYPE_CHECKING:
    from typing_extensions import Self


class Summaries(ABC):
    """Summarises a prediction: the members that one with and one without positions have in common."""

    @property
    def total(self) -> Tensor:
        """Return the epistemic plus the aleatoric part: the variance or the entropy of the predictive distribution."""
        return self._own("epistemic") + self._own("aleatoric")

    @property
    @abstractmethod
    def kind(self) -> str:
        """Return what y is: 'classes', 'labels' (0 or 1 each), 'regression', or 'counts'."""

    @property
    def is_regression(self) -> bool:
        """Return whether y is continuous."""
        return self.kind == "regression"

    @property
    def variance(self) -> Tensor:
        """Return the variance of y, with its noise. For classes and labels: of 'y is this class', p (1 - p)."""
        p = self._own("mean")
        return p * (1 - p) if self.kind in ("classes", "labels") else self.total

    @property
    def std(self) -> Tensor:
        """Return the standard deviation of y, with its noise: the root of `variance`."""
        return self.variance.sqrt()

    @property
    def entropy(self) -> Tensor:
        """Return the entropy of y in nats: of each example; of each label where there are several.

        Raises:
            UnsupportedError: y is a count.
        """
        if self.kind in ("classes", "labels"):
            return self.total
        if self.kind == "counts":
            raise UnsupportedError("the entropy of counts has no closed form here. Take .variance, or .total.")
        return self._own("distribution").entropy()

    @property
    @abstractmethod
    def label(self) -> Tensor:
        """Return the most probable class of each example; for labels, whether each is more probable than not.

        Raises:
            UnsupportedError: y is a number.
        """

    def numpy(self) -> dict[str, Any]:
        """Return every summary as a numpy array, by its name.

        mean, std, variance, epistemic, aleatoric and total; the entropy, except of counts; the label, if there is one.
        """
        names = ["mean", "std", "variance", "epistemic", "aleatoric", "total"]
        names += [] if self.kind == "counts" else ["entropy"]
        names += ["label"] if self.kind in ("classes", "labels") else []
        return {name: array_of(getattr(self, name), None, None) for name in names}

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """Return the mean, so that `np.asarray(prediction)` works."""
        return array_of(self._own("mean"), dtype, copy)

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __getitem__(self, index: Any) -> Self: ...

    def __iter__(self) -> Iterator[Self]:
        """Yield the prediction of each input."""
        return (self[i] for i in range(len(self)))

    def _own(self, name: str) -> Any:
        """Return a member that is an attribute of one subclass and a property of the other."""
        return getattr(self, name)


def kind_of(distribution: Distribution) -> str:
    """Return what y is, from its distribution."""
    if isinstance(distribution, (Categorical, Dirichlet)):
        return "classes"
    if isinstance(distribution, Bernoulli):
        return "labels"
    return "regression" if isinstance(distribution, (Normal, MultivariateNormal)) else "counts"


def label_of(mean: Tensor, kind: str) -> Tensor:  # (N, C) -> (N,) or (N, C)
    """Return the most probable class, or whether each label is more probable than not."""
    if kind == "classes":
        return mean.argmax(-1)
    if kind == "labels":
        return (mean > 0.5).long()
    raise UnsupportedError(f"a prediction of {kind} has no label. Take .mean.")


def rows_at(index: Any, n: int, device: torch.device) -> Tensor:  # (k,)
    """Return the numbers of the inputs that an index means: an integer, a slice, a mask, or several integers."""
    every = torch.arange(n, device=device)
    if isinstance(index, slice):
        return every[index] if (index.step or 1) > 0 else every[list(range(n))[index]]
    try:
        one = operator.index(index)  # type: ignore[arg-type]
    except (TypeError, ValueError, RuntimeError):
        pass
    else:
        if isinstance(index, bool) or not -n <= one < n:
            raise IndexError(f"index {shown(index)} is not among {n} inputs.")
        return every[one % n : one % n + 1]
    try:
        chosen = torch.as_tensor(np.asarray(index) if isinstance(index, list) else index, device=device)
        if chosen.dim() == 1 and (chosen.dtype is torch.bool or not chosen.is_floating_point()):
            return every[chosen if chosen.dtype is torch.bool else chosen.long()]
        if chosen.dim() == 1 and not len(chosen):
            return every[:0]
    except (TypeError, ValueError, RuntimeError, IndexError):
        pass
    raise InputError(
        f"{shown(index)} does not index {n} inputs. Write an integer, a slice, {n} booleans, or integers from 0 to "
        f"{n - 1}."
    )


def array_of(values: Tensor, dtype: Any, copy: bool | None) -> np.ndarray:
    """Return a tensor as numpy asks for it. `copy` None allows a copy, False refuses one."""
    found = values.detach()
    if found.dtype is torch.bfloat16:  # numpy has no such dtype
        found = found.float()
    if copy is False and (found.device.type != "cpu" or found.dtype is not values.dtype):
        raise ValueError(
            f"a mean of {values.dtype} on {values.device} needs a copy to become an array; leave out copy=False."
        )
    return np.array(found.cpu().numpy(), dtype=dtype, copy=copy)
