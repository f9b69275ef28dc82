"""Whether a float32 eigendecomposition with a step of refinement is cheaper than one in float64.

The step is that of Ogita and Aishima (2018): with R = I - X^T X, S = X^T A X and l_i = S_ii / (1 - R_ii), the new
vectors are X (I + E), E_ij = (S_ij + l_j R_ij) / (l_j - l_i), or R_ij / 2 where l_i and l_j are close. Its four
products are float64. The matrices are Kronecker factors as they occur: spectra that fall over six decades, with equal
eigenvalues at the end.

    python benchmarks/refined_eigh.py
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor

import machine
from measure import use_one_thread


def main() -> None:
    """Measure three widths, and print a row for each way."""
    use_one_thread()
    torch.manual_seed(0)
    print(machine.describe(), flush=True)
    for n in (512, 1024, 2048):
        a = factor(n)
        truth, _ = torch.linalg.eigh(a)
        for name, way in {"float64": torch.linalg.eigh, "float32": in_float32, "refined": refined}.items():
            seconds, (values, vectors) = timed(lambda way=way, a=a: way(a))  # type: ignore[misc]
            off = (vectors * values) @ vectors.T - a
            errors = (float((values - truth).abs().max()), float(torch.linalg.matrix_norm(off, 2)))
            print(f"{n:6}  {name:8}{seconds:8.2f} s   eigenvalues {errors[0]:.0e}, matrix {errors[1]:.0e}", flush=True)


def factor(n: int) -> Tensor:
    """Return a matrix of norm 1, a tenth of whose eigenvalues are equal."""
    basis, _ = torch.linalg.qr(torch.randn(n, n, dtype=torch.float64))
    values = torch.logspace(0, -6, n, dtype=torch.float64)
    values[-n // 10 :] = values[-1]
    return (basis * values) @ basis.T


def in_float32(a: Tensor) -> tuple[Tensor, Tensor]:
    """Return eigenvalues and eigenvectors from float32."""
    values, vectors = torch.linalg.eigh(a.float())
    return values.double(), vectors.double()


def refined(a: Tensor) -> tuple[Tensor, Tensor]:
    """Return eigenvalues and eigenvectors from float32, refined once."""
    _, x = in_float32(a)
    r, s = torch.eye(len(a), dtype=a.dtype) - x.T @ x, x.T @ (a @ x)
    values = s.diagonal() / (1 - r.diagonal())
    close = 2 * (
        torch.linalg.matrix_norm(s - values.diag()) + torch.linalg.matrix_norm(a) * torch.linalg.matrix_norm(r)
    )
    gap = values[None, :] - values[:, None]
    e = torch.where(gap.abs() > close, (s + values[None, :] * r) / gap.where(gap != 0, torch.ones_like(gap)), r / 2)
    return values, x + x @ e


def timed(work: Callable[[], tuple[Tensor, Tensor]]) -> tuple[float, tuple[Tensor, Tensor]]:
    """Return the fewest CPU seconds of three runs, and the result."""
    seconds, found = [], work()
    for _ in range(3):
        start = time.process_time()
        found = work()
        seconds.append(time.process_time() - start)
    return min(seconds), found


if __name__ == "__main__":
    main()
