"""Copy a network and add hidden units with zero outgoing weights, so that its outputs stay the same.

In a chain of linear layers and elementwise activations, every hidden layer gets new units, which read all units below,

    W -> [[W, 0], [new weights]]        last layer: W -> [W, 0]

In any other network the last layer's features get them: phi -> [phi, relu(new weights phi + new biases)].
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from laplace.weights.last_layer import FoundLastLayer
from laplace.weights.pointwise import Pointwise

ELEMENTWISE = (
    nn.CELU,
    nn.Dropout,
    nn.ELU,
    nn.GELU,
    nn.Hardswish,
    nn.Hardtanh,
    nn.Identity,
    nn.LeakyReLU,
    nn.Mish,
    nn.ReLU,
    nn.ReLU6,
    nn.SELU,
    nn.SiLU,
    nn.Sigmoid,
    nn.Softplus,
    nn.Tanh,
)


class Widening(ABC):
    """Holds the new units of a network; `free` are their weights and biases, to be trained."""

    free: list[Tensor]

    @abstractmethod
    def features(self, x: Tensor) -> Tensor:  # (..., H + new)
        """Return the inputs of the last layer with the current free weights, differentiable in them."""

    @abstractmethod
    def network(self) -> nn.Module:
        """Return the copy of the network with its new units."""


def widening(model: nn.Module, last: FoundLastLayer, units: int, generator: torch.Generator) -> Chain | HeadUnits:
    """Add units to every hidden layer of a chain, or beside the last layer's features of any other network."""
    layers = chain(model)
    return HeadUnits(model, last, units, generator) if layers is None else Chain(model, layers, units, generator)


def chain(model: nn.Module) -> list[str] | None:
    """Return the names of the modules of a chain of linear layers and activations, in order; else None."""
    names = _flat(model) if type(model) is nn.Sequential else None
    if not names:
        return None
    modules = [model.get_submodule(name) for name in names]
    linear = [i for i, module in enumerate(modules) if type(module) is nn.Linear]
    plain = all(type(module) in (nn.Linear, *ELEMENTWISE) for module in modules[linear[0] :]) if linear else False
    repeated = len({id(module) for module in modules}) < len(modules)
    return names if plain and not repeated and len(linear) > 1 and linear[-1] == len(modules) - 1 else None


class Chain(Widening):
    """Runs a chain x -> Linear -> activation -> ... -> Linear with `units` more units in each hidden layer."""

    def __init__(self, model: nn.Module, names: list[str], units: int, generator: torch.Generator) -> None:
        self.model, self.units = model, units
        self.names, self.modules = names, [copy.deepcopy(model.get_submodule(name)).eval() for name in names]
        self.linear = [module for module in self.modules if isinstance(module, nn.Linear)]
        self.free = []
        for i, layer in enumerate(self.linear[:-1]):
            self.free += _new_units(layer.in_features + (units if i else 0), units, layer.weight, generator)

    def features(self, x: Tensor) -> Tensor:
        hidden = iter(self._widened())
        for module in self.modules[:-1]:
            x = functional.linear(x, *next(hidden)) if isinstance(module, nn.Linear) else module(x)
        return x

    def network(self) -> nn.Module:
        new, widened = copy.deepcopy(self.model), self._widened()
        layers = [name for name, module in zip(self.names, self.modules, strict=True) if isinstance(module, nn.Linear)]
        for name, (weight, bias) in zip(layers[:-1], widened, strict=True):
            _replace(new, name, weight, bias)
        last = self.linear[-1]
        _replace(new, layers[-1], functional.pad(last.weight, (0, self.units)), last.bias)
        return new

    def _widened(self) -> list[tuple[Tensor, Tensor]]:
        """Return weight and bias of each hidden layer. A layer without bias gets one, zero for its old units."""
        pairs = []
        for i, layer in enumerate(self.linear[:-1]):
            weight, bias = self.free[2 * i : 2 * i + 2]
            own = layer.weight.detach()
            own = functional.pad(own, (0, self.units)) if i else own
            constant = torch.zeros_like(own[:, 0]) if layer.bias is None else layer.bias.detach()
            pairs.append((torch.cat([own, weight]), torch.cat([constant, bias])))
        return pairs


class HeadUnits(Widening):
    """Adds `units` rectified units beside the last layer's features, which they read."""

    def __init__(self, model: nn.Module, last: FoundLastLayer, units: int, generator: torch.Generator) -> None:
        self.model, self.name, self.layer = model, last.module, last.layer(model)
        self.free = _new_units(self.layer.weight.shape[1], units, self.layer.weight, generator)

    def features(self, x: Tensor) -> Tensor:
        return torch.cat([x, functional.linear(x, *self.free).relu()], -1)

    def network(self) -> nn.Module:
        new, units = copy.deepcopy(self.model), len(self.free[1])
        head = _layer(functional.pad(self.layer.weight.flatten(1), (0, units)), self.layer.bias, self.layer)
        wider = Widened(Beside(_layer(self.free[0], self.free[1], self.layer)), head)
        if not self.name:  # the network is this layer
            return wider.train(self.model.training)
        _put(new, self.name, wider.train(self.layer.training))
        return new


class Beside(nn.Module):
    """Maps phi -> [phi, relu(W phi + b)]."""

    def __init__(self, units: Pointwise) -> None:
        super().__init__()
        self.units = units

    def forward(self, x: Tensor) -> Tensor:
        """Return the features with the new units beside them."""
        return torch.cat([x, self.units(x).relu()], -1 if isinstance(self.units, nn.Linear) else 1)


class Widened(nn.Sequential):
    """Puts new units beside the features, then the last layer. It can be read like the layer that it replaces.

    Networks read `head.weight.dtype` or `head.in_features`; they get those of the old features.
    """

    @property
    def weight(self) -> Tensor:
        """Return the last layer's weights of the old features."""
        return self.last.weight[:, : self._width]

    @property
    def bias(self) -> Tensor | None:
        """Return the last layer's bias."""
        return self.last.bias

    @property
    def in_features(self) -> int:
        """Return how many features come in."""
        return self._width

    in_channels = in_features

    @property
    def _width(self) -> int:
        return self[0].get_parameter("units.weight").shape[1]

    @property
    def last(self) -> Pointwise:
        """Return the last layer, which reads the new units too."""
        layer = self[1]
        assert isinstance(layer, (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d))
        return layer

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if "_modules" not in self.__dict__ or len(self) < 2:
                raise
            return getattr(self[1], name)


def _new_units(inputs: int, units: int, like: Tensor, generator: torch.Generator) -> list[Tensor]:
    """Draw weights (units, inputs) and biases of new units, at the scale at which linear layers start."""
    drawn = torch.rand(units, inputs + 1, generator=generator, dtype=torch.float64)
    scaled = ((2 * drawn - 1) / inputs**0.5).to(like)
    return [scaled[:, :-1].clone().requires_grad_(), scaled[:, -1].clone().requires_grad_()]


def _flat(model: nn.Module, prefix: str = "") -> list[str]:
    names = []
    for name, child in model.named_children():
        names += _flat(child, f"{prefix}{name}.") if type(child) is nn.Sequential else [f"{prefix}{name}"]
    return names


def _replace(model: nn.Module, name: str, weight: Tensor, bias: Tensor | None) -> None:
    _put(model, name, _layer(weight, bias, model.get_submodule(name)))


def _layer(weight: Tensor, bias: Tensor | None, like: nn.Module) -> Pointwise:  # (outputs, inputs), (outputs,)
    """Return a layer of the same kind as `like` with copies of these weights; requires_grad and mode are `like`'s."""
    options: dict[str, Any] = {"bias": bias is not None, "device": "meta"}
    kind = next((kind for kind in (nn.Conv1d, nn.Conv2d, nn.Conv3d) if isinstance(like, kind)), None)
    sizes = weight.shape[1], weight.shape[0]
    layer = nn.Linear(*sizes, **options) if kind is None else kind(*sizes, 1, **options)
    own = weight.detach().clone().reshape(layer.weight.shape)
    layer.weight = nn.Parameter(own, like.get_parameter("weight").requires_grad)
    if bias is not None:
        own = like.get_parameter("weight") if like.bias is None else like.get_parameter("bias")
        layer.bias = nn.Parameter(bias.detach().clone(), own.requires_grad)
    return layer.train(like.training)


def _put(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, module)
