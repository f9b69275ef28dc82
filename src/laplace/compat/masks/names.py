"""Select whole parameters: by name, by module, or those of the last layer."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor, nn

from laplace.compat.masks.base import SubnetMask
from laplace.errors import InputError, OptionError
from laplace.network.batches import training_batches
from laplace.network.inputs import Keys
from laplace.network.replica import plain_name, unwrap
from laplace.network.sharing import Sharing
from laplace.weights.last_layer import find_last_layer
from laplace.weights.named import nearest_of, trainable_named


class _NamesMask(SubnetMask):
    """Selects all weights under the given names, which are all of parameters or all of modules."""

    _kind: str

    def __init__(self, model: nn.Module, names: Sequence[str]) -> None:
        super().__init__(model)
        if isinstance(names, str) or not names:
            raise OptionError(f"{self._kind} names={names!r} came; a list with at least one name is needed.")
        unknown = [name for name in names if name not in self._there]
        if unknown:
            near = nearest_of(sorted(self._there), str(unknown[0]))
            raise OptionError(f"{unknown[0]!r} is not a {self._kind} of the network. {near}")
        self.names = list(names)

    @property
    @abstractmethod
    def _there(self) -> set[str]:
        """Return the names that exist in the network."""

    def chosen(self, train_loader: Iterable[Any] | None) -> Tensor:
        return self.weights_of(set().union(*(trainable_named(self.model, name) for name in self.names)))


class ParamNameSubnetMask(_NamesMask):
    """Selects all weights of the named parameters.

    Args:
        model: The trained network.
        parameter_names: Names as in `model.named_parameters()`.
    """

    _kind = "parameter"

    def __init__(self, model: nn.Module, parameter_names: Sequence[str]) -> None:
        super().__init__(model, parameter_names)

    @property
    def _there(self) -> set[str]:
        return {plain_name(name) for name, _ in unwrap(self.model).named_parameters(remove_duplicate=False)}


class ModuleNameSubnetMask(_NamesMask):
    """Selects all trainable weights of the named modules.

    Args:
        model: The trained network.
        module_names: Names as in `model.named_modules()`.
    """

    _kind = "module"

    def __init__(self, model: nn.Module, module_names: Sequence[str]) -> None:
        super().__init__(model, module_names)

    @property
    def _there(self) -> set[str]:
        return {plain_name(name) for name, _ in unwrap(self.model).named_modules() if name}


class LastLayerSubnetMask(SubnetMask):
    """Selects all trainable weights of the last linear layer, found by running one training example.

    Args:
        model: The trained network.
        last_layer_name: The name of the last layer. Found automatically if left out.
    """

    def __init__(self, model: nn.Module, last_layer_name: str | None = None) -> None:
        super().__init__(model)
        self.last_layer_name = last_layer_name

    def chosen(self, train_loader: Iterable[Any] | None) -> Tensor:
        if train_loader is None:
            raise InputError("the last layer is found by running the network: write select(train_loader).")
        batch = next(iter(training_batches(train_loader, self.model, Keys(), False, "select")), None)
        if batch is None:
            raise InputError("the training loader gave no example; give at least one.")
        found = find_last_layer(
            self.model, Sharing().told_apart(batch.inputs, self.model).part(0, 1), self.last_layer_name, None
        )
        return self.weights_of(found.layout.names)
