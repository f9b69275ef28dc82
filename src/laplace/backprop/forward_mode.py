"""Multiply vectors by the GGN of one batch, J^T Lambda J u, and send summed vectors back, J^T v.

There are two ways. The engine's moments send all vectors of a root of Lambda back once, and then multiply any number of
vectors by the gradients: dear for one vector, cheap for many. Forward mode runs the network's tangent and one backward
pass for each vector. Which is cheaper depends on the network, the number of outputs and the number of vectors.
"""

from __future__ import annotations

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor

from laplace.backprop.gradients import Forward
from laplace.backprop.network import NetworkForward
from laplace.linalg.output_curvature import OutputCurvature
from laplace.linalg.symmetric import total
from laplace.network.pieces import whole


def by_moments(forward: Forward, curvature: OutputCurvature, vectors: Tensor) -> Tensor:  # (S, P) -> (S, P)
    """Return H u from the engine's gradients of all vectors of a root of Lambda."""
    return total(moments.products(vectors) for moments in forward.moments(curvature))


def by_tangents(forward: NetworkForward, curvature: OutputCurvature, vectors: Tensor) -> Tensor:  # (S, P) -> (S, P)
    """Return H u from one run in forward mode and one backward pass for each u.

    Raises whatever torch raises where an operation has no forward derivative.
    """
    tensors = _tensors(forward)
    return torch.stack(
        [_back(forward, tensors, curvature.times(_moved(forward, tensors, u)[None])[0]) for u in vectors]
    )


def may_use_tangents(forward: Forward, curvature: OutputCurvature) -> bool:
    """Return whether `by_tangents` applies: a network of its own graph, not in half precision, one Lambda per row."""
    if not isinstance(forward, NetworkForward) or _is_half(forward):
        return False
    return not (curvature.together and forward.positions.several)


def _is_half(forward: NetworkForward) -> bool:
    return forward.f.dtype in (torch.float16, torch.bfloat16)


def summed_back(forward: Forward, v: Tensor) -> Tensor:  # (S, N * T, C) -> (S, P)
    """Return J^T v[s] for each s: the gradients of <v[s], f>, summed over the examples."""
    if isinstance(forward, NetworkForward) and not _is_half(forward):
        tensors = _tensors(forward)
        return torch.stack([_gradient(forward, tensors, forward.positions.shaped(one[None], lead=1)[0]) for one in v])
    rows = [forward.sent(one[None]) for one in v]
    return torch.stack([torch.cat([use.contracted(slice(None)).sum((0, 1)) for use in uses]) for uses in rows])


def _tensors(forward: NetworkForward) -> list[Tensor]:
    named = dict(forward.network.replica.named_parameters())
    return [named[name] for name in forward.network.weights.layout.names]


def _moved(forward: NetworkForward, tensors: list[Tensor], u: Tensor) -> Tensor:  # (P,) -> (M, C)
    """Return J u."""
    network = forward.network
    layout = network.weights.layout
    zeros = [torch.zeros_like(t) for t in tensors]
    steps = [moved[0] for moved in layout.moved(zeros, u.unsqueeze(0))]
    with torch.inference_mode(False), torch.no_grad(), forward_ad.dual_level():
        pairs = zip(layout.names, tensors, steps, strict=True)
        chosen = {name: forward_ad.make_dual(whole(t).detach(), step) for name, t, step in pairs}
        f = network.readable(forward.inputs, forward.plan).call_with(network.replica, chosen)
        tangent = forward_ad.unpack_dual(f).tangent
    return forward.counted(torch.zeros_like(forward.f) if tangent is None else tangent)


def _back(forward: NetworkForward, tensors: list[Tensor], v: Tensor) -> Tensor:  # (M, C) -> (P,)
    """Return J^T v."""
    return _gradient(forward, tensors, forward.spread(v))


def _gradient(forward: NetworkForward, tensors: list[Tensor], v: Tensor) -> Tensor:  # own shape -> (P,)
    """Return the gradient of <v, f>, from the graph of the run."""
    found = torch.autograd.grad(forward.f, tensors, v.to(forward.f.dtype), retain_graph=True, allow_unused=True)
    pairs = zip(found, tensors, strict=True)
    return forward.network.weights.layout.join([torch.zeros_like(t) if g is None else g for g, t in pairs])
