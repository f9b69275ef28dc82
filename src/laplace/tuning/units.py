"""A copy of a network with further hidden units whose outgoing weights are zero, so that its outputs stay the same.

In a chain of linear layers and elementwise activations every hidden layer gets new units, which read all units below,

    W -> [[W, 0], [new weights]]        last layer: W -> [W, 0]

In any other network the last layer's features get them: phi -> [phi, relu(new weights phi + new biases)].
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn
from torch.nn import functional

from laplace.errors import UnsupportedError
from laplace.weights.last_layer import LastLayer

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
    """The new units of a network: `free` weights and biases, to be trained."""

    free: list[Tensor]

    @abstractmethod
    def features(self, x: Tensor) -> Tensor:  # (N, H + new)
        """What the last layer gets with the free weights as they are, differentiable in these."""

    @abstractmethod
    def network(self) -> nn.Module:
        """The copy of the network with its new units."""


def widening(model: nn.Module, last: LastLayer, units: int, generator: torch.Generator) -> Chain | HeadUnits:
    """New units in every hidden layer of a chain, or beside the features of any other network's last layer."""
    layers = chain(model)
    return HeadUnits(model, last, units, generator) if layers is None else Chain(model, layers, units, generator)


def chain(model: nn.Module) -> list[str] | None:
    """The names of the modules of a chain of linear layers and activations, in order; None for other networks."""
    names = _flat(model) if type(model) is nn.Sequential else None
    if not names:
        return None
    modules = [model.get_submodule(name) for name in names]
    linear = [i for i, module in enumerate(modules) if type(module) is nn.Linear]
    plain = all(type(module) in (nn.Linear, *ELEMENTWISE) for module in modules[linear[0] :]) if linear else False
    repeated = len({id(module) for module in modules}) < len(modules)
    return names if plain and not repeated and len(linear) > 1 and linear[-1] == len(modules) - 1 else None


class Chain(Widening):
    """A chain x -> Linear -> activation -> ... -> Linear with `units` more in each hidden layer."""

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
        """Weight and bias of each hidden layer; a layer without bias gets one, zero for its own units."""
        pairs = []
        for i, layer in enumerate(self.linear[:-1]):
            weight, bias = self.free[2 * i : 2 * i + 2]
            own = layer.weight.detach()
            own = functional.pad(own, (0, self.units)) if i else own
            constant = torch.zeros_like(own[:, 0]) if layer.bias is None else layer.bias.detach()
            pairs.append((torch.cat([own, weight]), torch.cat([constant, bias])))
        return pairs


class HeadUnits(Widening):
    """`units` rectified units that read the last layer's features, beside them."""

    def __init__(self, model: nn.Module, last: LastLayer, units: int, generator: torch.Generator) -> None:
        layer = last.layer(model)
        if not isinstance(layer, nn.Linear):
            raise UnsupportedError(f"units are put beside the inputs of an nn.Linear; {last.module!r} is none.")
        self.model, self.name, self.layer = model, last.module, layer
        self.free = _new_units(self.layer.in_features, units, self.layer.weight, generator)

    def features(self, x: Tensor) -> Tensor:
        return torch.cat([x, functional.linear(x, *self.free).relu()], -1)

    def network(self) -> nn.Module:
        new, units = copy.deepcopy(self.model), len(self.free[1])
        head = _linear(functional.pad(self.layer.weight, (0, units)), self.layer.bias, self.layer)
        wider = nn.Sequential(Beside(_linear(self.free[0], self.free[1], self.layer)), head)
        if not self.name:  # the network is this layer
            return wider.train(self.model.training)
        _put(new, self.name, wider)
        return new


class Beside(nn.Module):
    """phi -> [phi, relu(W phi + b)]."""

    def __init__(self, units: nn.Linear) -> None:
        super().__init__()
        self.units = units

    def forward(self, x: Tensor) -> Tensor:
        """The features with the new units beside them."""
        return torch.cat([x, self.units(x).relu()], -1)


def _new_units(inputs: int, units: int, like: Tensor, generator: torch.Generator) -> list[Tensor]:
    """Weights (units, inputs) and biases of new units, at the scale that linear layers start from."""
    drawn = torch.rand(units, inputs + 1, generator=generator, dtype=torch.float64)
    scaled = ((2 * drawn - 1) / inputs**0.5).to(like)
    return [scaled[:, :-1].clone().requires_grad_(), scaled[:, -1].clone().requires_grad_()]


def _flat(model: nn.Module, prefix: str = "") -> list[str]:
    names = []
    for name, child in model.named_children():
        names += _flat(child, f"{prefix}{name}.") if type(child) is nn.Sequential else [f"{prefix}{name}"]
    return names


def _replace(model: nn.Module, name: str, weight: Tensor, bias: Tensor | None) -> None:
    _put(model, name, _linear(weight, bias, model.get_submodule(name)))


def _linear(weight: Tensor, bias: Tensor | None, like: nn.Module) -> nn.Linear:
    """A linear layer with copies of these, that requires grad and trains as another layer does."""
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias is not None, device="meta")
    layer.weight = nn.Parameter(weight.detach().clone(), like.get_parameter("weight").requires_grad)
    if bias is not None:
        own = like.get_parameter("weight") if like.bias is None else like.get_parameter("bias")
        layer.bias = nn.Parameter(bias.detach().clone(), own.requires_grad)
    return layer.train(like.training)


def _put(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, module)
