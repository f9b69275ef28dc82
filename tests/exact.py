"""The assertion that the tests of the engine share: all weights of a network, every number that of the oracle."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import oracle
from laplace import Laplace
from networks import cut


def labels(task: str, n: int, outputs: int) -> Tensor:
    """Some labels for a task."""
    if task == "classification":
        return torch.arange(n) % outputs
    return torch.linspace(-1, 1, n * outputs, dtype=torch.float64).reshape(n, outputs).sin()


def assert_exact(
    model: nn.Module,
    x: Tensor,  # (N, ...)
    task: str = "regression",
    *,
    sizes: Sequence[int] = (6, 1, 4),
    kinds: Sequence[str] = ("ggn", "ef"),
    reference: nn.Module | None = None,
    pack: Callable[[Tensor], Any] = lambda x: x,
    rules: Mapping[str, str] | None = None,
    **options: Any,
) -> Laplace:
    """Fit 'full' and 'diag' on batches of these sizes and compare curvature and predictions with the oracle.

    `reference` is the same network as a function of one tensor, with the same names, where the oracle cannot run
    `model` itself; `pack` makes the network's input of a tensor; `rules` are those that must have explained some
    layers' parameters (a wrong rule is not seen in the numbers: the audit hands its parameters to the generic one).
    """
    reference = copy.deepcopy(model if reference is None else reference).eval()
    names = [k for k, p in reference.named_parameters() if p.requires_grad]
    y = labels(task, len(x), reference(x[:1]).shape[1])
    batches = [(pack(a), b) for a, b in cut(x, y, list(sizes))]
    fits = []
    for kind in kinds:
        _, h = oracle.curvature_all(reference, names, x, y, task, kind)
        full = Laplace(model, task, "all", "full", curvature=kind, **options).fit(batches)
        assert list(full.posterior.fit.layout.names) == names
        close_in_blocks(full.H, h, full.posterior.fit.layout.sizes)
        diag = Laplace(model, task, "all", "diag", curvature=kind, **options).fit(batches)
        assert_close(diag.H, h.diagonal())
        fits.append(full)
    assert_predicts_exactly(fits[0], reference, x, pack)
    for row in fits[0].coverage().rows:
        assert row.rule == (rules or {}).get(row.name.rpartition(".")[0], row.rule)
    return fits[0]


def assert_predicts_exactly(
    la: Laplace, reference: nn.Module, x: Tensor, pack: Callable[[Tensor], Any] = lambda x: x
) -> None:
    """Variances of the outputs are J Sigma J^T, for several numbers of inputs at a time."""
    names = list(la.posterior.fit.layout.names)
    for n in (len(x), 2, 1):
        jac = oracle.jacobian_loop(reference, names, x[:n])
        covariance = jac @ la.posterior_covariance @ jac.mT
        outputs = la.predict(pack(x[:n])).outputs
        assert_close(outputs.mean, reference(x[:n]).detach())
        assert_close(outputs.covariance, covariance)


def close_in_blocks(got: Tensor, expected: Tensor, sizes: Sequence[int], tolerance: float = 1e-7) -> None:
    """Equal as a whole, and each tensor's own block relative to its own size."""
    assert_close(got, expected, tolerance)
    start = 0
    for size in sizes:
        part = slice(start, start + size)
        if float(expected[part, part].abs().max()) > 1e-14 * float(expected.abs().max()):
            assert_close(got[part, part], expected[part, part], tolerance)
        start += size


def assert_close(got: Tensor, expected: Tensor, tolerance: float = 1e-7) -> None:
    """Equal relative to the largest number."""
    assert got.shape == expected.shape
    error, scale = float((got - expected).detach().abs().max()), float(expected.detach().abs().max())
    assert error <= tolerance * max(scale, 1e-20), f"off by {error:.2g}, the largest number is {scale:.2g}"
