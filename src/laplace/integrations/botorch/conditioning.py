"""Joint Gaussians of the outputs at some inputs, given observations that came after the fit.

The outputs are Gaussian at any inputs, f ~ N(m, K) with K = J Sigma J^T. So observations y = f(X) + noise at new inputs
X condition them as in a Gaussian process: with the covariance C of f(x) and f(X), mean and covariance of f(x) are

    m(x) + C (K(X, X) + noise)^-1 (y - m(X)),    K(x, x) - C (K(X, X) + noise)^-1 C^T.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from linear_operator.utils.cholesky import psd_safe_cholesky
from torch import Size, Tensor

from laplace.errors import InputError
from laplace.inference.blocks import joint_blocks
from laplace.inference.source import Source


@dataclass(frozen=True)
class Observations:
    """Holds what a model is conditioned on, as the network takes and gives it, after the transforms.

    Batch dimensions are those of BoTorch: several sets of observations side by side.
    """

    x: Tensor  # (*batch, n, d)
    y: Tensor  # (*batch, n, m)
    noise: Tensor  # variances, (*batch, n, m)

    @property
    def batch_shape(self) -> Size:
        """Return how many sets of observations there are side by side."""
        return torch.broadcast_shapes(self.x.shape[:-2], self.y.shape[:-2])

    def and_then(self, other: Observations) -> Observations:
        """Return the observations of both."""
        pairs = (self.x, other.x), (self.y, other.y), (self.noise, other.noise)
        return Observations(*(_stacked(a, b) for a, b in pairs))

    def factor(self, covariance: Tensor) -> Tensor:
        """Return the Cholesky factor of K(X, X) + noise, given K(X, X), (*batch, n m, n m)."""
        return psd_safe_cholesky(covariance + self.noise.flatten(-2).diag_embed())


Joint = tuple[Tensor, Tensor]  # (*batch, q, m), (*batch, q m, q m)


def joint(view: Callable[..., Source], x: Tensor, seen: Observations | None) -> Joint:  # x: (*batch, q, d)
    """Return mean and covariance of the outputs at q points together, for every batch, given the observations.

    Args:
        view: Returns the posterior that is asked about some inputs.
        x: The points, as the network takes them.
        seen: The observations, if there are any.
    """
    batch, q = x.shape[:-2], x.shape[-2]
    if seen is None:
        blocks = joint_blocks(view(x), x.flatten(0, -3) if batch else x[None])
        mean, covariance = _unflattened(batch, blocks.mean, blocks.covariance)
        return mean, covariance
    if seen.x.dim() == 2:  # the same inputs for every batch: their own covariance is computed once
        blocks = joint_blocks(view(x, seen.x), x.flatten(0, -3) if batch else x[None], seen.x)
        assert blocks.cross is not None
        mean, covariance, cross = _unflattened(batch, blocks.mean, blocks.covariance, blocks.cross)
        own_mean, own = blocks.further_mean, blocks.further_covariance
        assert own_mean is not None
        assert own is not None
    else:
        both = _stacked(x, seen.x)
        batch = both.shape[:-2]
        blocks = joint_blocks(view(both), both.flatten(0, -3))
        mean, covariance = _unflattened(batch, blocks.mean, blocks.covariance)
        cut = q * mean.shape[-1]
        mean, own_mean = mean[..., :q, :], mean[..., q:, :]
        covariance, cross, own = covariance[..., :cut, :cut], covariance[..., :cut, cut:], covariance[..., cut:, cut:]
    factor = seen.factor(own)
    pulled = torch.linalg.solve_triangular(factor, cross.mT, upper=False)  # (*batch, n m, q m)
    residual = (seen.y - own_mean).flatten(-2).unsqueeze(-1)
    residual = torch.linalg.solve_triangular(factor, residual, upper=False)
    mean = mean + (pulled.mT @ residual).squeeze(-1).unflatten(-1, mean.shape[-2:])
    covariance = covariance - pulled.mT @ pulled
    return mean, covariance.expand(*mean.shape[:-2], *covariance.shape[-2:])


def drawn_given(
    source: Source, f: Callable[[Tensor], Tensor], rows: Tensor, seen: Observations, error: Tensor
) -> Tensor:  # (N, m)
    """Return a drawn function at some inputs, given one set of observations, by Matheron's rule.

    Args:
        source: The posterior that the function was drawn from.
        f: The drawn function, (N, d) to (N, m).
        rows: The inputs, (N, d).
        seen: The observations.
        error: Drawn noise of them, (n, m).
    """
    new, at_seen = f(torch.cat([rows, seen.x])).split([len(rows), len(seen.x)])
    blocks = joint_blocks(source, rows.unsqueeze(1), seen.x)
    assert blocks.cross is not None
    assert blocks.further_covariance is not None
    factor = seen.factor(blocks.further_covariance)
    pull = torch.cholesky_solve((seen.y - at_seen - error).reshape(-1, 1), factor)
    return new + (blocks.cross @ pull).squeeze(-1)


def require_data(X: Tensor, Y: Tensor, m: int, x_name: str, y_name: str) -> None:
    """Refuse observations whose shapes do not fit, and outcomes that are not finite."""
    if not isinstance(X, Tensor) or not isinstance(Y, Tensor) or X.dim() < 2 or Y.dim() < 2:
        came = " and ".join(str(tuple(t.shape)) if isinstance(t, Tensor) else type(t).__name__ for t in (X, Y))
        raise InputError(f"{x_name} and {y_name} are {came}; tensors (*batch, n, d) and (*batch, n, {m}) are needed.")
    if Y.shape[-2:] != (X.shape[-2], m):
        hint = f" Write {y_name}.unsqueeze(-1)." if m == 1 and Y.shape[-1] == X.shape[-2] else ""
        raise InputError(
            f"{y_name} is {tuple(Y.shape)} for {x_name} {tuple(X.shape)}; (*batch, {X.shape[-2]}, {m}) is needed.{hint}"
        )
    if not Y.isfinite().all():
        raise InputError(f"{y_name} holds NaN or infinite values.")


def _stacked(a: Tensor, b: Tensor) -> Tensor:  # (*batch, n, d), (*batch, n', d) -> (*batch, n + n', d)
    """Return the rows of both, for every batch."""
    batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    return torch.cat([t.expand(*batch, *t.shape[-2:]) for t in (a, b)], -2)


def _unflattened(batch: Size, *tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(t.reshape(*batch, *t.shape[1:]) for t in tensors)
