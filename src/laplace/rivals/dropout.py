"""MC dropout (Gal and Ghahramani 2016): dropout stays on in predictions, and these are averaged over masks.

One mask is used for all inputs, as one draw of the weights would be. At each input by itself, the distribution is that
of masks drawn anew; but each draw is a function of x, it does not depend on batches, and the same calls agree.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from laplace.checks import how_many, whole_number
from laplace.errors import ModelError
from laplace.keywords import checked_before
from laplace.likelihoods import Likelihood
from laplace.network.inputs import Inputs
from laplace.network.replica import replicate
from laplace.rivals.base import Options, network_of
from laplace.rivals.ensemble import weights_of
from laplace.rivals.members import Members

_ALPHA = -1.7580993408473766  # what alpha dropout sets units to: minus the product of SELU's scale and alpha


class MCDropout(Members):
    """Averages one network that was trained with dropout over dropout masks.

    Everything but the dropout layers (`nn.Dropout`, `nn.Dropout2d`, `nn.AlphaDropout`, ...) runs in eval mode. Dropout
    that is no layer of its own stays off: that of attention weights, and that between the layers of an `nn.LSTM`. The
    first dimension of what a dropout layer sees must be that of the examples.

    Args:
        model: a network trained with dropout layers; it is never changed.
        likelihood: what the outputs mean, as in `Laplace`.
        n_samples: how many masks, S. A prediction runs the network S times.
        seed: the seed of the masks.
        sigma_noise: the standard deviation of the observation noise of a regression.
        softmax_temperature: T, by which all logits are divided. `calibrate` finds it.
        dict_key_x: for batches that are mappings, the key of the main input.
        dict_key_y: for batches that are mappings, the key of the labels.
        class_dim: which dimension of the outputs has the classes, as in `Laplace`.
        memory_budget: the number of bytes that may be used. By default the free memory.

    Attributes:
        n_samples: how many masks.
        seed: the seed of the masks.

    Raises:
        ModelError: the network has no dropout layer with p > 0, or none that its `forward` calls.
        OptionError: an option is out of range.
    """

    def __init__(
        self,
        model: nn.Module,
        likelihood: Likelihood | str,
        n_samples: int = 30,
        *,
        seed: int = 0,
        sigma_noise: float | Tensor = 1.0,
        softmax_temperature: float = 1.0,
        dict_key_x: str = "input_ids",
        dict_key_y: str = "labels",
        class_dim: int | None = -1,
        memory_budget: int | None = None,
    ) -> None:
        self._model = network_of(model)
        if not _dropout_layers(self._model):
            raise ModelError(
                "the network has no dropout layer with p > 0. Dropout as a function is not found: write nn.Dropout "
                "modules, and train with them."
            )
        self.seed = whole_number(seed, "seed", 0)
        self.n_samples = whole_number(n_samples, "n_samples", 2)
        options = Options.of(likelihood, dict_key_x, dict_key_y, class_dim, memory_budget)
        super().__init__(options, weights_of(None, self.n_samples), sigma_noise, softmax_temperature)

    if not TYPE_CHECKING:
        __new__ = checked_before(__init__)

    @property
    def model(self) -> nn.Module:
        """Return the network."""
        return self._model

    def _call(self, member: int, inputs: Inputs) -> Tensor:
        replica, masks = replicate(self._model), list[Mask]()
        for number, (_, layer) in enumerate(_dropout_layers(replica)):
            masks.append(Mask(layer, (self.seed, member, number)))
            layer.forward = partial(masks[-1])  # of the replica, which nobody else has
        _without_fused_kernels(replica)
        with torch.inference_mode(False), torch.no_grad():
            f = inputs.map(torch.clone).call(replica)
        if not any(mask.calls for mask in masks):
            raise ModelError(
                "no dropout layer of the network was called, so all masks give the same prediction. Call the layers in "
                "forward(), or take another rival: Ensemble, SWAG."
            )
        return f

    def __repr__(self) -> str:
        return f"MCDropout with {how_many(self.n_samples, 'mask')}, {self.likelihood.described}"


def _without_fused_kernels(replica: nn.Module) -> None:
    """Let torch's encoder layers call their dropout layers, which their fused kernels leave out in eval mode.

    The layers stay in eval mode: what a subclass does in training mode is not asked for.
    """
    for module in replica.modules():
        if isinstance(module, nn.TransformerEncoderLayer):
            module.activation_relu_or_gelu = 0  # stands for other activations, which have no kernel; it is not applied
        elif isinstance(module, nn.TransformerEncoder):
            module.use_nested_tensor = False  # which the kernels alone take


class Mask:
    """Drops the same units of all examples. A layer that is called again has another mask."""

    def __init__(self, layer: _DropoutNd, seed: tuple[int, int, int]) -> None:
        self.p, self.seed, self.calls = layer.p, seed, 0
        self.alpha = isinstance(layer, (nn.AlphaDropout, nn.FeatureAlphaDropout))
        whole = (nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.FeatureAlphaDropout)
        self.channels = isinstance(layer, whole)

    def __call__(self, input: Tensor) -> Tensor:
        """Return the input with some units, or whole channels, dropped, and the others rescaled."""
        shape = (1, *input.shape[1:])
        if self.channels:
            shape = (1, input.shape[1], *[1] * (input.dim() - 2))
        a, b, c = self.seed
        generator = torch.Generator().manual_seed(((a * 1_000_003 + b) * 1_009 + c) * 1_013 + self.calls)
        self.calls += 1
        kept = (torch.rand(shape, generator=generator) >= self.p).to(input)
        q = 1 - self.p
        if not self.alpha:
            return input * kept / q if q else torch.zeros_like(input)
        scale = (q + _ALPHA**2 * q * self.p) ** -0.5
        return scale * (input * kept + _ALPHA * (1 - kept)) - scale * _ALPHA * self.p


def _dropout_layers(model: nn.Module) -> list[tuple[str, _DropoutNd]]:
    return [(name, m) for name, m in model.named_modules() if isinstance(m, _DropoutNd) and m.p > 0]
