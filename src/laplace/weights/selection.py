"""Define the uncertain weights of any layers, and the ways of choosing them."""

from __future__ import annotations

import functools
import inspect
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from laplace.checks import did_you_mean, options_of, shown, written
from laplace.errors import ModelError, OptionError, UnknownNameError
from laplace.keywords import NamedOptions
from laplace.network.inputs import Inputs
from laplace.network.pieces import detached, whole
from laplace.network.replica import plain_name, unwrap
from laplace.weights.last_layer import FoundLastLayer
from laplace.weights.layout import Layout


@dataclass(frozen=True)
class Selection:
    """Holds the layout of the uncertain weights of any layers.

    Attributes:
        layout: their names and shapes, in the order of the flat vector of weights.
        module: always None; a last layer has a module here.
        reduction: always None; a last layer has one here.
    """

    layout: Layout
    module: None = None
    reduction: None = None

    @property
    def described(self) -> str:
        """Return a description for messages."""
        return "the network"

    def tensors(self, model: nn.Module) -> list[Tensor]:
        """Return the whole tensors that hold them, with their current values. Some may have to be gathered yet."""
        parameters = {name: detached(p) for name, p in parameters_of(model)}
        gone = [name for name in self.layout.names if name not in parameters]
        if gone:
            raise ModelError(
                f"the network no longer has {', '.join(gone)}: since the fit, layers were replaced, parametrized or "
                "pruned. Call la.fit again."
            )
        return [parameters[name] for name in self.layout.names]


def mean_of(weights: FoundLastLayer | Selection, model: nn.Module) -> Tensor:  # (P,)
    """Return the values of the uncertain weights as one new vector, in float32 or finer.

    Tensors of which each rank has a piece are gathered one at a time.
    """
    layout, tensors = weights.layout, weights.tensors(model)
    dtype = functools.reduce(torch.promote_types, [t.dtype for t in tensors], torch.float32)
    mean = torch.empty(layout.n_params, dtype=dtype, device=tensors[0].device)
    for own, t, part in zip(layout.split(mean), tensors, layout.parts, strict=True):
        flat = whole(t).detach().reshape(-1)
        own.copy_(flat if part is None else part.gather(flat))
    return mean


class Subset(NamedOptions, ABC):
    """Chooses the uncertain weights. An object of this class is a valid `subset_of_weights`.

    Attributes:
        label: a short name for summaries and files. By default the name of the class.
        options: the names of the constructor's arguments. Each is an attribute of that name.
    """

    label: str
    options: tuple[str, ...] = ()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Label the subclass with its name, unless it or a parent has another label, or each object its own."""
        super().__init_subclass__(**kwargs)
        if "label" in inspect.get_annotations(cls):  # a field of a dataclass would get the name as its default
            return
        if getattr(cls, "label", None) in (None, cls.__mro__[1].__name__):
            cls.label = cls.__name__

    def __repr__(self) -> str:
        """Return the call that makes this object: `LastLayer(name='head')`."""
        return written(self)

    def __eq__(self, other: object) -> bool:
        """Compare class and arguments."""
        if not isinstance(other, Subset):
            return NotImplemented
        return type(self) is type(other) and options_of(self) == options_of(other)

    def __hash__(self) -> int:
        return hash((type(self), self.label))

    @abstractmethod
    def find(self, model: nn.Module, inputs: Inputs) -> FoundLastLayer | Selection:
        """Return the weights of a network, given a batch of its inputs.

        Args:
            model: the network.
            inputs: a batch of its inputs.
        """


class Choice(Subset):
    """Chooses weights without running the network, so that wrong choices are refused at once."""

    label: str

    @abstractmethod
    def select(self, model: nn.Module) -> Selection:
        """Return the weights of a network.

        Args:
            model: the network.
        """

    def find(self, model: nn.Module, inputs: Inputs) -> Selection:
        return self.selected(model)

    def selected(self, model: nn.Module) -> Selection:
        """Return the weights of a network. Refuse a selection that does not fit it."""
        found, kind = self.select(unwrap(model)), type(self).__name__
        if not isinstance(found, Selection):
            raise OptionError(
                f"{kind}.select returned {shown(found)}; a Selection is needed: Selection(Layout.of(pairs)), with "
                "pairs of model.named_parameters()."
            )
        names, shapes = found.layout.names, {name: tuple(p.shape) for name, p in parameters_of(model)}
        if not names:
            raise OptionError(f"{kind}.select chose no weights; at least one tensor is needed.")
        for i, (name, shape) in enumerate(zip(names, found.layout.tensor_shapes, strict=True)):
            if name not in shapes:
                hint = did_you_mean(name, list(shapes)) or f" It has: {', '.join(list(shapes)[:8])}, ..."
                raise UnknownNameError(f"{kind}.select chose {name!r}, which is no parameter of the network.{hint}")
            if name in names[:i]:
                raise OptionError(f"{kind}.select chose {name!r} twice; write each parameter once.")
            if shape != shapes[name]:
                raise OptionError(f"{kind}.select has {name!r} as {shape}; the parameter has shape {shapes[name]}.")
        return found


def parameters_of(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield all parameters of a network with their plain names, each tied tensor once."""
    for name, p in unwrap(model).named_parameters():
        yield plain_name(name), p


def trainable_of(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return the parameters with requires_grad=True, in the order of the flat vector of weights."""
    found = [(name, p) for name, p in parameters_of(model) if p.requires_grad]
    if not found:
        raise ModelError(
            "no parameter of the network requires grad, so that none is uncertain. Write model.requires_grad_(), or "
            "requires_grad_() on the layers that should be uncertain."
        )
    return found
