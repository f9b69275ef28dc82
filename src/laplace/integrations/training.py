"""Make and train a network for arrays: the plain loop of the scikit-learn estimators."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from laplace.checks import shown, whole_number
from laplace.errors import OptionError


def network_of(module: Any, n_features: int, n_outputs: int, hidden_sizes: Sequence[int]) -> nn.Module:
    """Return a network that may be trained: a copy of a module, a new one from a class or factory, or a default MLP.

    A class or factory is called with (n_features, n_outputs), or with those that it takes by name.
    """
    if module is None:
        return perceptron(n_features, n_outputs, hidden_sizes)
    if isinstance(module, nn.Module):
        return copy.deepcopy(module)
    if not callable(module):
        raise OptionError(
            f"module={shown(module)} must be a torch.nn.Module, a class or function that makes one from (n_features, "
            "n_outputs), a skorch net, or None for a multilayer perceptron."
        )
    made = _called(module, n_features, n_outputs)
    if not isinstance(made, nn.Module):
        raise OptionError(f"module={shown(module)} made {shown(made)}; a torch.nn.Module is needed.")
    return made


def perceptron(n_features: int, n_outputs: int, hidden_sizes: Sequence[int]) -> nn.Module:
    """Return a multilayer perceptron with tanh units in float64, as numpy computes."""
    if isinstance(hidden_sizes, (str, int)) or not all(whole_number(size, "hidden_sizes") for size in hidden_sizes):
        raise OptionError(f"hidden_sizes={shown(hidden_sizes)} must be a sequence of whole numbers, as in (50, 50).")
    sizes, layers = [n_features, *hidden_sizes], []
    for before, after in pairwise(sizes):
        layers += [nn.Linear(before, after), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(sizes[-1], n_outputs)).double()


def train(
    model: nn.Module,
    x: Tensor,  # (N, ...)
    y: Tensor,  # (N,) or (N, C)
    loss: Callable[[Tensor, Tensor], Tensor],
    optimizer: torch.optim.Optimizer,
    max_epochs: int,
    batch_size: int,
    generator: torch.Generator,
) -> None:
    """Train a network in place: `max_epochs` times over shuffled batches. The caller's training mode is kept."""
    before = model.training
    model.train()
    for _ in range(max_epochs):
        for index in torch.randperm(len(y), generator=generator).split(batch_size):
            if len(index) == 1 < min(batch_size, len(y)):
                continue  # BatchNorm cannot train on one example; another epoch has it elsewhere
            optimizer.zero_grad()
            loss(model(x[index]), y[index]).backward()
            optimizer.step()
    model.train(before)


def _called(factory: Callable[..., Any], n_features: int, n_outputs: int) -> Any:
    sizes = {"n_features": n_features, "n_outputs": n_outputs}
    try:
        names = inspect.signature(factory).parameters
    except (TypeError, ValueError):
        names = {}
    if not names:
        return factory()
    if set(sizes) & set(names):
        return factory(**{name: size for name, size in sizes.items() if name in names})
    required = [p for p in names.values() if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
    if len(required) > 2:
        raise OptionError(
            f"module={shown(factory)} needs {', '.join(p.name for p in required)}; it is called with (n_features, "
            "n_outputs). Write module=lambda n_features, n_outputs: ..., or functools.partial."
        )
    return factory(n_features, n_outputs) if len(required) == 2 else factory(n_features) if required else factory()
