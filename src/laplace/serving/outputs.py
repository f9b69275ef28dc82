"""The Gaussian of the outputs without checks of its values, and draws from it with fixed noise.

So every link and likelihood computes with it as with `OutputGaussian`, and what it does can be recorded.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from laplace.errors import UnsupportedError
from laplace.linalg.sampling import Draws
from laplace.linalg.tracing import is_traced
from laplace.predictive.links import Link
from laplace.predictive.outputs import OutputGaussian

WRITTEN_OUT = 32  # a recorded Cholesky factorisation of so many rows or fewer is written out: ONNX has none


@dataclass(frozen=True)
class FixedDraws(Draws):
    """Draws with the same noise for every input, so that a prediction depends neither on a batch nor on a call.

    Attributes:
        noise: Standard normal numbers, (S, C).
    """

    noise: Tensor | None = None

    def seeded(self, device: torch.device) -> Draws:
        """Return the draws themselves, which are the same in every call."""
        return self


def fixed_noise(n: int, c: int, like: Tensor, seed: int) -> Tensor:  # (S, C)
    """Return the noise that `la.predict` uses with a generator of this seed."""
    return Draws(n, torch.Generator().manual_seed(seed)).shared_normals(c, like).mT


@dataclass(frozen=True)
class FixedOutputs(OutputGaussian):
    """Holds N(f, S) for each input, from a posterior that was checked when it was fixed."""

    def __post_init__(self) -> None:
        """Check nothing: NaN and infinite inputs give NaN."""

    def draws(self, how: Draws) -> list[Tensor]:  # type: ignore[override]
        """Return all draws at once, (S, N, C)."""
        if not isinstance(how, FixedDraws) or how.noise is None:
            raise UnsupportedError(
                "this likelihood makes draws of its own, which cannot be fixed. Leave 'epistemic' and 'aleatoric' out "
                "of outputs=, or use la.predict(x)."
            )
        if self.contrasts is not None:
            shifted = self.contrasts._with_some_shift()
            return [shifted.draws(how)[0]]  # type: ignore[index]
        noise = how.noise.to(self.mean.dtype)
        if self.covariance is None:
            return [self.mean + self.variance.sqrt() * noise.unsqueeze(1)]
        return [self.mean + torch.einsum("ncd,sd->snc", _root(self.covariance), noise)]


def linked(link: Link, outputs: FixedOutputs, draws: FixedDraws) -> Tensor:  # (N, K)
    """Return the mean of the inverse link, put back on the simplex for the inputs where it left it."""
    p = link.apply(outputs, draws)
    if not link.may_leave_simplex:
        return p
    inside = p.clamp(min=0)
    outside = ((p < 0) | (p > 1)).any(-1, keepdim=True)
    return torch.where(outside, inside / inside.sum(-1, keepdim=True), p)


def _root(covariance: Tensor) -> Tensor:  # (N, C, C)
    """Return the Cholesky factor; NaN where there is none. A singular covariance is raised by its rounding error."""
    covariance = (covariance + covariance.mT) / 2
    c = covariance.shape[-1]
    finfo = torch.finfo(covariance.dtype)
    rounding = 4 * c * finfo.eps  # of a factorisation, relative to the diagonal
    least = (rounding * covariance.diagonal(dim1=1, dim2=2).mean(-1)).clamp(min=finfo.tiny / finfo.eps)
    covariance = covariance + least[:, None, None] * torch.eye(c, dtype=covariance.dtype, device=covariance.device)
    if is_traced() and c <= WRITTEN_OUT:
        return _written_out(covariance, c)
    factor, failed = torch.linalg.cholesky_ex(covariance)
    return torch.where((failed > 0)[:, None, None], torch.nan, factor)


def _written_out(covariance: Tensor, c: int) -> Tensor:
    """Return the Cholesky factor column by column: L_j = (S_j - sum_(k < j) L_k L_jk) / L_jj."""
    columns: list[Tensor] = []
    rest = covariance
    below = torch.ones(c, c, dtype=covariance.dtype, device=covariance.device).tril()
    for j in range(c):
        column = rest[..., j] * below[:, j] * rest[..., j, j].rsqrt().unsqueeze(-1)
        columns.append(column)
        rest = rest - column.unsqueeze(-1) * column.unsqueeze(-2)
    return torch.stack(columns, -1)
