"""What a selector is: from a network, and maybe data, to the indices of a subnetwork."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from laplace.checks import whole_number
from laplace.errors import NotFittedError, OptionError
from laplace.precision import plainly
from laplace.weights.selection import trainable_of


class SubnetMask(ABC):
    """Chooses weights of a network, which it never changes; one of your own says which in `chosen`.

    Args:
        model: the trained network.

    Raises:
        OptionError: what is no network.
    """

    def __init__(self, model: nn.Module) -> None:
        if not isinstance(model, nn.Module):
            raise OptionError(f"model is a {type(model).__name__}; a torch.nn.Module is needed.")
        self.model = model
        self._indices: Tensor | None = None

    @abstractmethod
    def chosen(self, train_loader: Iterable[Any] | None) -> Tensor:
        """The indices, in any order.

        Args:
            train_loader: batches, for a selector that needs them.
        """

    @plainly
    def select(self, train_loader: Iterable[Any] | None = None) -> Tensor:  # (n,)
        """Choose, and remember what was chosen.

        Args:
            train_loader: batches, for a selector that needs them.

        Returns:
            Ascending indices into the flat vector of all trainable weights: what `subnetwork_indices` takes.

        Raises:
            OptionError: weights that all have requires_grad=False.
            InputError: a selector that needs data, without.
        """
        found = self.chosen(train_loader).cpu()
        if not len(found):
            raise OptionError(
                f"{type(self).__name__} found weights that all have requires_grad=False, which stay certain. "
                "Choose others, or call requires_grad_(True) on these."
            )
        self._indices = found.sort().values
        return self._indices.clone()

    @property
    def indices(self) -> Tensor:
        """What was selected last.

        Raises:
            NotFittedError: nothing was selected yet.
        """
        if self._indices is None:
            raise NotFittedError(f"this {type(self).__name__} has selected nothing yet. Call select(train_loader).")
        return self._indices.clone()

    @property
    def n_params_subnet(self) -> int:
        """How many weights were selected last."""
        return len(self.indices)

    def weights_of(self, names: Collection[str]) -> Tensor:
        """The indices of all weights of some parameters.

        Args:
            names: of the parameters.
        """
        trainable = trainable_of(self.model)
        marks = [torch.full((p.numel(),), name in names) for name, p in trainable]
        return torch.cat(marks).nonzero().flatten()


class ScoreMask(SubnetMask):
    """The weights with the largest scores."""

    def __init__(self, model: nn.Module, n_params_subnet: int) -> None:
        super().__init__(model)
        self.n = whole_number(n_params_subnet, "n_params_subnet")
        total = sum(p.numel() for _, p in trainable_of(model))
        if self.n > total:
            raise OptionError(
                f"n_params_subnet={self.n:,} is more than the {total:,} trainable weights of the network."
            )

    @abstractmethod
    def scores(self, train_loader: Iterable[Any] | None) -> Tensor:  # (all trainable weights,)
        """One number for each trainable weight."""

    def chosen(self, train_loader: Iterable[Any] | None) -> Tensor:
        return self.scores(train_loader).topk(self.n).indices
