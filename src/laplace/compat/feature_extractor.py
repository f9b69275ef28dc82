"""Provide laplace-torch's `FeatureExtractor`: a network that returns the inputs of its last layer, too."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from laplace.compat.enums import FeatureReduction
from laplace.errors import ModelError, OptionError

__all__ = ["FeatureExtractor", "FeatureReduction"]


class FeatureExtractor(nn.Module):
    """Wraps a network, whose last linear layer is found at the first call.

    Args:
        model: the network; it is not changed.
        last_layer_name: which module it is; found by running the network if left out.
        enable_backprop: whether gradients flow through the features.
        feature_reduction: where features have further dimensions: 'pick_first', 'pick_last', 'average'.

    Attributes:
        last_layer: the layer itself; None until it is known.
    """

    last_layer: nn.Module | None
    _last_layer_name: str | None

    def __init__(
        self,
        model: nn.Module,
        last_layer_name: str | None = None,
        enable_backprop: bool = False,
        feature_reduction: FeatureReduction | str | None = None,
    ) -> None:
        super().__init__()
        self.model = model
        self.enable_backprop = enable_backprop
        try:
            self.feature_reduction = None if feature_reduction is None else FeatureReduction(feature_reduction)
        except ValueError:
            names = ", ".join(repr(str(name)) for name in FeatureReduction)
            raise OptionError(f"feature_reduction={feature_reduction!r} is unknown. Valid: {names}.") from None
        self._set(None, None)
        if last_layer_name is not None:
            self.set_last_layer(last_layer_name)

    @property
    def last_layer_name(self) -> str | None:
        """Return the name of the last layer; None until it is known."""
        return self._last_layer_name

    def forward(self, x: Any) -> Any:
        """Run the network; finds the last layer if it is not known.

        Args:
            x: what the network takes.
        """
        if self.last_layer is None:
            self.find_last_layer(x)
        return self.model(x)

    def forward_with_features(self, x: Any) -> tuple[Any, Tensor]:
        """Run the network, and return its outputs and the inputs of its last layer, reduced as asked.

        Args:
            x: what the network takes.
        """
        if self.last_layer is None:
            self.find_last_layer(x)
        assert self.last_layer is not None
        seen: list[Tensor] = []
        hook = self.last_layer.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
        try:
            out = self.model(x)
        finally:
            hook.remove()
        features = seen[-1] if self.enable_backprop else seen[-1].detach()
        return out, self._reduced(features)

    def set_last_layer(self, last_layer_name: str) -> None:
        """Take the module of this name as last layer.

        Args:
            last_layer_name: its name.

        Raises:
            OptionError: there is no linear layer of this name.
        """
        module = dict(self.model.named_modules()).get(last_layer_name)
        if not isinstance(module, nn.Linear):
            came = "there is none" if module is None else f"it is a {type(module).__name__}"
            raise OptionError(f"last_layer_name={last_layer_name!r} must be a Linear layer of the network; {came}.")
        self._set(last_layer_name, module)

    def find_last_layer(self, x: Any) -> Any:
        """Find the last layer by running the network, and return the network's outputs.

        Args:
            x: what the network takes.

        Raises:
            ModelError: the output of the network is not the output of a linear layer of its own.
        """
        modules = {name: module for name, module in self.model.named_modules() if isinstance(module, nn.Linear)}
        seen: list[str] = []
        hooks = [
            module.register_forward_hook(lambda *_, name=name: seen.append(name)) for name, module in modules.items()
        ]
        try:
            with nullcontext() if self.enable_backprop else torch.no_grad():
                out = self.model(x)
        finally:
            for hook in hooks:
                hook.remove()
        if not seen:
            raise ModelError("the network runs no Linear layer. Name the last layer: last_layer_name='...'.")
        self.set_last_layer(seen[-1])
        return out

    def _set(self, name: str | None, module: nn.Module | None) -> None:
        """Keep the layer without registering it: its weights are those of `model` already."""
        object.__setattr__(self, "_last_layer_name", name)
        object.__setattr__(self, "last_layer", module)

    def _reduced(self, features: Tensor) -> Tensor:
        if self.feature_reduction is None or features.dim() <= 2:
            return features
        flat = features.flatten(1, -2)  # (N, T, H)
        if self.feature_reduction == FeatureReduction.PICK_FIRST:
            return flat[:, 0]
        return flat[:, -1] if self.feature_reduction == FeatureReduction.PICK_LAST else flat.mean(1)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any, **kwargs: Any) -> None:
        """Accept states that name the last layer twice, if both are the same."""
        for key in [key for key in state_dict if key.startswith(f"{prefix}last_layer.")]:
            end = key.removeprefix(f"{prefix}last_layer")
            twins = [other for other in state_dict if other.startswith(f"{prefix}model.") and other.endswith(end)]
            if any(_same(state_dict[key], state_dict[twin]) for twin in twins):
                del state_dict[key]
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)


def _same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and bool((a == b).all())
