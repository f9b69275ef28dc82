"""Subsets of weights that the tests share."""

from __future__ import annotations

import oracle


def close(a, b, tol=1e-9):
    assert a.shape == b.shape
    assert float((a - b).abs().max()) <= tol * max(float(b.abs().max()), 1e-12)


def scattered(model, every=3):
    """Every third weight: all tensors in part, but for those of one or two weights."""
    return oracle.indices_of(model, lambda name, j: j % every == 0)


def options(subset, model):
    """What `Laplace` is told, and the indices that it must come to."""
    if subset == "globs":
        return {"subset_of_weights": ["block", "*n.weight", "out.bias"]}, oracle.indices_of(
            model,
            lambda name, j: name in ("block.weight", "block.bias", "bn.weight", "gn.weight", "ln.weight", "out.bias"),
        )
    if subset == "predicate":
        return {"subset_of_weights": lambda name, p: p.dim() == 2}, oracle.indices_of(
            model, lambda name, j: name in ("twice.weight", "out.weight")
        )
    index = scattered(model)
    return {"subset_of_weights": "subnetwork", "subnetwork_indices": index}, index
