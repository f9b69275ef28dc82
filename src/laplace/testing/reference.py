"""Compute dense references directly from the formulas, and compare with them."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def jacobian(model: nn.Module, names: list[str], x: Tensor) -> Tensor:  # (N, C, P)
    """Return df/dtheta of the named parameters by autograd, one output of one example at a time."""
    parameters = dict(model.named_parameters())
    chosen = [parameters[name] for name in names]
    rows = []
    for example in x:
        f = model(example.unsqueeze(0)).squeeze(0)
        each = [torch.autograd.grad(value, chosen, retain_graph=True, materialize_grads=True) for value in f]
        rows.append(torch.stack([torch.cat([g.flatten() for g in grads]) for grads in each]))
    return torch.stack(rows)


def close(found: Tensor, expected: Tensor, tolerance: float = 1e-8, what: str = "") -> None:
    """Require equal shapes, and equal values up to `tolerance` of the largest, or of 1."""
    assert found.shape == expected.shape, f"{what}: shape {tuple(found.shape)}, expected {tuple(expected.shape)}"
    if expected.numel():
        difference = float((found.double() - expected.double()).abs().max())
        assert difference <= tolerance * max(1.0, float(expected.abs().max())), f"{what}: off by {difference:.3g}"
