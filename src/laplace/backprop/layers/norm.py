"""Normalisation with an affine map: output = weight * x_hat + bias, with x_hat the normalised input.

Covers LayerNorm, RMSNorm, GroupNorm, InstanceNorm, and BatchNorm in eval mode.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from laplace.backprop.layers.base import Call, Rule
from laplace.backprop.uses import DenseUse, Use


class Norm(Rule):
    """Computes G_w = sum over positions of g * x_hat; G_b = sum of g."""

    name = "norm"

    def uses(self, call: Call, keys: list[str], gs: list[Tensor], reduce: bool, first: bool) -> dict[str, Use]:
        module, g = call.module, call.gradient(gs[0])  # (K, N, ...)
        framed = g.dim() > gs[0].dim()  # whether several rows of the module's batch belong to one example
        uses: dict[str, Use] = {}
        if "weight" in keys:
            x_hat = call.by_example(_normalised(module, call.read("input").to(g.dtype)))
            uses["weight"] = DenseUse(_onto_parameter(module, g * x_hat, framed))
        if "bias" in keys:
            uses["bias"] = DenseUse(_onto_parameter(module, g, framed))
        return uses


def _normalised(module: nn.Module, x: Tensor) -> Tensor:
    if isinstance(module, nn.LayerNorm):
        return F.layer_norm(x, module.normalized_shape, eps=module.eps)
    if isinstance(module, nn.RMSNorm):
        return F.rms_norm(x, module.normalized_shape, eps=module.eps)
    if isinstance(module, nn.modules.instancenorm._InstanceNorm) and module.running_mean is None:
        return F.instance_norm(x, eps=module.eps)
    if isinstance(module, nn.GroupNorm):
        return F.group_norm(x, module.num_groups, eps=module.eps)
    assert isinstance(module, nn.modules.batchnorm._NormBase)
    batch_statistics = module.running_mean is None  # examples interact, which the audit reports
    mean, var = (None if t is None else t.to(x.dtype) for t in (module.running_mean, module.running_var))
    return F.batch_norm(x, mean, var, training=batch_statistics, eps=module.eps)


def _onto_parameter(module: nn.Module, g: Tensor, framed: bool) -> Tensor:  # (K, N, ...) -> (K, N, p)
    """Sum over the positions that share a weight: all but the normalised dimensions, or all but the channels."""
    if isinstance(module, (nn.LayerNorm, nn.RMSNorm)):
        kept = len(module.normalized_shape)
        return g.flatten(2, -kept - 1).sum(2).flatten(2) if g.dim() > 2 + kept else g.flatten(2)
    g = g.sum(2) if framed and g.dim() == 4 else g.flatten(4).sum((2, 4)) if framed else g
    return g.flatten(3).sum(3) if g.dim() > 3 else g
