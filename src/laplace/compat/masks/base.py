"""Define selectors: they turn a network, and possibly data, into the indices of a subnetwork."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from laplace.checks import LARGEST, whole_number
from laplace.errors import NotFittedError, OptionError
from laplace.linalg.autocast import plainly
from laplace.weights.selection import trainable_of


class SubnetMask:
    """Selects weights of a network, which is never changed. To write your own, implement `chosen`.

    A selector that was written for laplace-torch has `get_subnet_mask` instead, which returns a mask (P,), or inherits
    from `ScoreBasedSubnetMask` and has `compute_param_scores`.

    Args:
        model: The trained network.

    Raises:
        OptionError: `model` is not a `torch.nn.Module`.
    """

    def __init__(self, model: nn.Module) -> None:
        if not isinstance(model, nn.Module):
            raise OptionError(f"model is a {type(model).__name__}; a torch.nn.Module is needed.")
        self.model = model
        self._indices: Tensor | None = None

    def chosen(self, train_loader: Iterable[Any] | None) -> Tensor:
        """Return the indices of the selected weights, in any order.

        Args:
            train_loader: Batches of training data, for a selector that needs them.
        """
        if type(self).get_subnet_mask is SubnetMask.get_subnet_mask:
            raise OptionError(f"{type(self).__name__} selects nothing: write its method chosen(train_loader).")
        return self.convert_subnet_mask_to_indices(self.get_subnet_mask(train_loader))

    def get_subnet_mask(self, train_loader: Iterable[Any] | None) -> Tensor:  # (all trainable weights,)
        """Return the selection as a mask.

        Args:
            train_loader: Batches of training data, for a selector that needs them.
        """
        mask = torch.zeros_like(self.parameter_vector, dtype=torch.bool)
        mask[self.chosen(train_loader).to(mask.device)] = True
        return mask

    def convert_subnet_mask_to_indices(self, subnet_mask: Tensor) -> Tensor:
        """Return where a mask has ones.

        Args:
            subnet_mask: Zeros and ones, or booleans, one per trainable weight.

        Raises:
            OptionError: it has another shape, or other values.
        """
        vector = self.parameter_vector
        if not isinstance(subnet_mask, Tensor) or subnet_mask.shape != vector.shape:
            came = tuple(subnet_mask.shape) if isinstance(subnet_mask, Tensor) else type(subnet_mask).__name__
            raise OptionError(f"the mask is {came}; a tensor of shape ({len(vector)},) is needed, one per weight.")
        if subnet_mask.is_floating_point() or not ((subnet_mask == 0) | (subnet_mask == 1)).all():
            raise OptionError("the mask must hold booleans, or the integers 0 and 1.")
        return subnet_mask.nonzero().flatten()

    @property
    def parameter_vector(self) -> Tensor:
        """Return all trainable weights as one vector."""
        return torch.cat([p.detach().flatten() for _, p in trainable_of(self.model)])

    @plainly
    def select(self, train_loader: Iterable[Any] | None = None) -> Tensor:  # (n,)
        """Select the weights, once, and store the result in `indices`.

        Args:
            train_loader: Batches of training data, for a selector that needs them.

        Returns:
            Ascending indices into the flat vector of all trainable weights, as `subnetwork_indices` takes them.

        Raises:
            OptionError: all selected weights have requires_grad=False, or it has selected before.
            InputError: the selector needs data and got none.
        """
        if self._indices is not None:
            kind = type(self).__name__
            raise OptionError(f"this {kind} has selected already; see its indices. Make another {kind} to select anew.")
        found = self.chosen(train_loader).cpu()
        if not len(found):
            raise OptionError(
                f"{type(self).__name__} selected only weights with requires_grad=False, which stay certain. "
                "Choose others, or call requires_grad_(True) on these."
            )
        self._indices = found.sort().values
        return self._indices.clone()

    @property
    def indices(self) -> Tensor:
        """Return the indices of the selection.

        Raises:
            NotFittedError: nothing was selected yet.
        """
        if self._indices is None:
            raise NotFittedError(f"this {type(self).__name__} has selected nothing yet. Call select(train_loader).")
        return self._indices.clone()

    @property
    def n_params_subnet(self) -> int:
        """Return how many weights were selected."""
        return len(self.indices)

    def weights_of(self, names: Collection[str]) -> Tensor:
        """Return the indices of all weights of these parameters.

        Args:
            names: Names of the parameters.
        """
        trainable = trainable_of(self.model)
        marks = [torch.full((p.numel(),), name in names) for name, p in trainable]
        return torch.cat(marks).nonzero().flatten()


class ScoreBasedSubnetMask(SubnetMask):
    """Selects the weights with the largest scores. To write your own, implement `compute_param_scores`.

    Args:
        model: The trained network.
        n_params_subnet: How many weights to select.

    Raises:
        OptionError: there are not as many weights.
    """

    def __init__(self, model: nn.Module, n_params_subnet: int) -> None:
        super().__init__(model)
        self.n = whole_number(n_params_subnet, "n_params_subnet", 1, LARGEST)
        total = sum(p.numel() for _, p in trainable_of(model))
        if self.n > total:
            raise OptionError(
                f"n_params_subnet={self.n:,} is more than the {total:,} trainable weights of the network."
            )

    @abstractmethod
    def compute_param_scores(self, train_loader: Iterable[Any] | None) -> Tensor:  # (all trainable weights,)
        """Return one number for each trainable weight.

        Args:
            train_loader: Batches of training data, for a selector that needs them.
        """
        raise NotImplementedError

    def chosen(self, train_loader: Iterable[Any] | None) -> Tensor:
        scores, vector = self.compute_param_scores(train_loader), self.parameter_vector
        if scores.shape != vector.shape:
            raise OptionError(f"the scores have shape {tuple(scores.shape)}; ({len(vector)},) is needed.")
        return scores.topk(self.n).indices
