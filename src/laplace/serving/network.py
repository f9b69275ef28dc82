"""A copy of a network that returns the features of its last layer in place of its outputs.

The last layer passes its input on. What the network does behind the layer (dropping a dimension, picking a position of
a sequence, putting the outputs into a mapping) is then done to the features. Nothing is recorded on the side, so the
copy can be exported, and used by several threads.
"""

from __future__ import annotations

from collections import OrderedDict

from torch import Tensor, nn
from torch.jit import ScriptModule

from laplace.errors import UnsupportedError
from laplace.network.replica import plain_name, replicate, unwrap
from laplace.weights.last_layer import FoundLastLayer

_HOOKS = ("_forward_hooks", "_backward_hooks", "_backward_pre_hooks")  # not those before it, which make its features


class PassedLinear(nn.Linear):
    """Keeps the weights of a linear layer and returns its input."""

    def forward(self, input: Tensor) -> Tensor:
        """Return the input."""
        return input


class PassedConv1d(nn.Conv1d):
    """Keeps the weights of a convolution and returns its input."""

    def forward(self, input: Tensor) -> Tensor:
        """Return the input."""
        return input


class PassedConv2d(nn.Conv2d):
    """Keeps the weights of a convolution and returns its input."""

    def forward(self, input: Tensor) -> Tensor:
        """Return the input."""
        return input


class PassedConv3d(nn.Conv3d):
    """Keeps the weights of a convolution and returns its input."""

    def forward(self, input: Tensor) -> Tensor:
        """Return the input."""
        return input


_PASSED = {
    nn.Linear: PassedLinear,
    nn.Conv1d: PassedConv1d,
    nn.Conv2d: PassedConv2d,
    nn.Conv3d: PassedConv3d,
}


def copied(model: nn.Module) -> nn.Module:
    """Return a copy of the network in eval mode with memory of its own, whose parameters need no gradient."""
    inner = unwrap(model)
    scripted = [name or "the network" for name, m in inner.named_modules() if isinstance(m, ScriptModule)]
    if scripted:
        raise UnsupportedError(
            f"{scripted[0]!r} is a scripted module, which cannot be copied. Give Laplace the network as it is before "
            "torch.jit.script; what la.module() returns can be traced and exported."
        )
    if isinstance(inner, nn.DataParallel):
        raise UnsupportedError("the network is an nn.DataParallel. Make the posterior of model.module instead.")
    tensors = [plain_name(name) for name, _ in (*inner.named_parameters(), *inner.named_buffers())]
    return replicate(inner, written=tensors)


def with_features(model: nn.Module, weights: FoundLastLayer) -> nn.Module:
    """Return a copy of the network whose last layer passes its input on."""
    replica = copied(model)
    layer = weights.layer(replica)
    layer.__dict__.pop("forward", None)
    layer.__dict__.update({name: OrderedDict() for name in _HOOKS if name in layer.__dict__})
    layer.__class__ = next(passed for kind, passed in _PASSED.items() if isinstance(layer, kind))
    return replica
