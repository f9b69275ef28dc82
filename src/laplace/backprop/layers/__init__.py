"""Explain each kind of layer: gradients from its input and from the gradient at its output, one rule per file.

A rule is looked up by the exact type of the module (a subclass may have another forward), or by the type's name if that
avoids importing its library. Every other parameter goes through the generic rule.
"""

from __future__ import annotations

from typing import Final

from torch import nn

from laplace.backprop.layers.attention import Attention
from laplace.backprop.layers.base import Call, Rule
from laplace.backprop.layers.bilinear import Bilinear
from laplace.backprop.layers.conv import Conv
from laplace.backprop.layers.conv1d_hf import Conv1D
from laplace.backprop.layers.conv_transpose import ConvTranspose
from laplace.backprop.layers.embedding import Embedding, EmbeddingBag
from laplace.backprop.layers.generic import Generic
from laplace.backprop.layers.linear import Linear
from laplace.backprop.layers.norm import Norm
from laplace.backprop.layers.recurrent import Recurrent

RULES: Final[dict[type[nn.Module], Rule]] = {
    nn.Linear: Linear(),
    nn.Conv1d: Conv(),
    nn.Conv2d: Conv(),
    nn.Conv3d: Conv(),
    nn.ConvTranspose1d: ConvTranspose(),
    nn.ConvTranspose2d: ConvTranspose(),
    nn.ConvTranspose3d: ConvTranspose(),
    nn.BatchNorm1d: Norm(),
    nn.BatchNorm2d: Norm(),
    nn.BatchNorm3d: Norm(),
    nn.SyncBatchNorm: Norm(),
    nn.InstanceNorm1d: Norm(),
    nn.InstanceNorm2d: Norm(),
    nn.InstanceNorm3d: Norm(),
    nn.LayerNorm: Norm(),
    nn.RMSNorm: Norm(),
    nn.GroupNorm: Norm(),
    nn.Bilinear: Bilinear(),
    nn.Embedding: Embedding(),
    nn.EmbeddingBag: EmbeddingBag(),
    nn.MultiheadAttention: Attention(),
    nn.RNN: Recurrent(),
    nn.LSTM: Recurrent(),
    nn.GRU: Recurrent(),
}

NAMED: Final[dict[str, Rule]] = {"transformers.pytorch_utils.Conv1D": Conv1D()}


def rule_for(kind: type[nn.Module]) -> Rule | None:
    """Return the rule for modules of this type, or None if only the generic one applies."""
    return RULES.get(kind) or NAMED.get(f"{kind.__module__}.{kind.__qualname__}")


__all__ = ["RULES", "Call", "Generic", "Rule", "rule_for"]
