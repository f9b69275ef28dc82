"""Describe how the variance of a last layer's outputs depends on its features phi: a few matrices of the posterior.

    Factored       S = L diag(w) L^T,   w = V^T (Q^T phi)^2                   kron, ekfac, diag: two small products
    Rooted         S_cc = |R_c^T phi|^2                                       full, block, and structures from outside
    LessLowRank    S = diag(A^T phi^2) - sum_k y_k y_k^T,   y_k = Y_k phi  inf, lowrank, in float64: they nearly cancel

A bias adds a constant. The matrices are buffers. What a prediction does not need is not kept.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


class Kept(nn.Module):
    """Keeps its buffers from being rounded: `.half()` moves them, and leaves their dtype."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        def without_rounding(t: Tensor) -> Tensor:
            moved = fn(t)
            return moved if moved.dtype.itemsize >= t.dtype.itemsize else t.to(moved.device)

        return super()._apply(without_rounding, recurse)

    def keep(self, name: str, value: Tensor | None) -> None:
        """Register a buffer with memory of its own, or None."""
        self.register_buffer(name, None if value is None else value.detach().clone().contiguous())


class Spread(Kept):
    """Computes variances and covariances of C outputs that are linear in features phi, (M, H)."""

    bias_variance: Tensor | None  # (C,)
    bias_covariance: Tensor | None  # (C, C)

    def __init__(self, bias_variance: Tensor | None, bias_covariance: Tensor | None) -> None:
        super().__init__()
        self.keep("bias_variance", bias_variance)
        self.keep("bias_covariance", bias_covariance)

    @abstractmethod
    def variance(self, phi: Tensor) -> Tensor:  # (M, H) -> (M, C)
        """Return the variance of each output."""

    @abstractmethod
    def covariance(self, phi: Tensor) -> Tensor:  # (M, H) -> (M, C, C)
        """Return the covariance of each example's outputs."""

    def product(self, phi: Tensor, v: Tensor) -> Tensor:  # (M, H), (M, C) -> (M, C)
        """Return S v."""
        return (self.covariance(phi) @ v.unsqueeze(-1)).squeeze(-1)


class Constant(Spread):
    """Gives the same S for all inputs: only a bias is uncertain."""

    def variance(self, phi: Tensor) -> Tensor:
        assert self.bias_variance is not None
        return self.bias_variance.expand(phi.shape[0], -1)

    def covariance(self, phi: Tensor) -> Tensor:
        assert self.bias_covariance is not None
        return self.bias_covariance.expand(phi.shape[0], -1, -1)


class Factored(Spread):
    """Computes S = L diag(w) L^T with w = V^T (Q^T phi)^2. Q and L may be left out: the unit vectors.

    Args:
        right: Q, (H, R).
        by_output: M, (R, C), which maps (Q^T phi)^2 to the variances.
        variances: V, (R, O); only for covariances.
        left: L, (C, O); only for covariances.
        bias_variance: what a bias adds to the variances, (C,).
        bias_covariance: what a bias adds to the covariances, (C, C).
    """

    right: Tensor | None
    by_output: Tensor
    variances: Tensor | None
    left: Tensor | None

    def __init__(
        self,
        right: Tensor | None,
        by_output: Tensor,
        variances: Tensor | None,
        left: Tensor | None,
        bias_variance: Tensor | None,
        bias_covariance: Tensor | None,
    ) -> None:
        super().__init__(bias_variance, bias_covariance)
        for name, value in {"right": right, "by_output": by_output, "variances": variances, "left": left}.items():
            self.keep(name, value)

    def variance(self, phi: Tensor) -> Tensor:
        return self.variance_of(self.squares(phi))

    def squares(self, phi: Tensor) -> Tensor:  # (M, H) -> (M, R)
        """Return (Q^T phi)^2, of which all else is a linear function."""
        kept = self._buffers  # as attributes, each takes half as long as a small operation
        right, by_output = kept["right"], kept["by_output"]
        assert by_output is not None
        phi = phi if phi.dtype == by_output.dtype else phi.to(by_output.dtype)
        turned = phi if right is None else phi @ right
        return turned * turned

    def variance_of(self, squares: Tensor) -> Tensor:  # (M, R) -> (M, C)
        """Return the variance of each output, given the squares."""
        kept = self._buffers
        by_output, bias = kept["by_output"], kept["bias_variance"]
        assert by_output is not None
        return squares @ by_output if bias is None else torch.addmm(bias, squares, by_output)

    def same_squares(self, other: Spread | None) -> bool:
        """Return whether another spread has the same squares."""
        if not isinstance(other, Factored) or (self.right is None) != (other.right is None):
            return False
        return self.right is None or torch.equal(self.right, other.right)  # type: ignore[arg-type]

    def covariance(self, phi: Tensor) -> Tensor:
        w, left = self._weights(phi), self.left
        own = w.diag_embed() if left is None else (left * w.unsqueeze(1)) @ left.T
        return own if self.bias_covariance is None else own + self.bias_covariance

    def product(self, phi: Tensor, v: Tensor) -> Tensor:
        w, left = self._weights(phi), self.left
        own = w * v if left is None else ((v @ left) * w) @ left.T
        return own if self.bias_covariance is None else own + v @ self.bias_covariance

    def _weights(self, phi: Tensor) -> Tensor:  # (M, O)
        assert self.variances is not None
        return self.squares(phi) @ self.variances


class Rooted(Spread):
    """Computes S_cd = <R_c^T phi, R_d^T phi> for any covariance of the weights. R_c has a row for a dependent bias.

    Args:
        roots: R, (C, H, K). For variances alone, K = H + 1 columns are enough.
        offsets: the row of the bias, (C, K), if it has one.
        bias_variance: what an independent bias adds to the variances, (C,).
        bias_covariance: what an independent bias adds to the covariances, (C, C).
    """

    roots: Tensor  # (H, C * K)
    offsets: Tensor | None  # (C * K,)

    def __init__(
        self, roots: Tensor, offsets: Tensor | None, bias_variance: Tensor | None, bias_covariance: Tensor | None
    ) -> None:
        super().__init__(bias_variance, bias_covariance)
        self.c = len(roots)
        self.keep("roots", roots.transpose(0, 1).flatten(1))
        self.keep("offsets", None if offsets is None else offsets.flatten())

    def variance(self, phi: Tensor) -> Tensor:
        own = self._along(phi).square().sum(-1)
        return own if self.bias_variance is None else own + self.bias_variance

    def covariance(self, phi: Tensor) -> Tensor:
        along = self._along(phi)
        own = along @ along.mT
        return own if self.bias_covariance is None else own + self.bias_covariance

    def _along(self, phi: Tensor) -> Tensor:  # (M, C, K)
        phi = phi.to(self.roots.dtype)
        along = phi @ self.roots if self.offsets is None else torch.addmm(self.offsets, phi, self.roots)
        return along.unflatten(1, (self.c, -1))


class LessLowRank(Spread):
    """Computes S = T diag(A^T phi^2 + a) T^T - sum_k y_k y_k^T, y_k = phi Y_k + b_k.

    What the prior allows, less what the data explains.

    Args:
        by_output: T^2 applied to A, (H, C), which maps phi^2 to variances.
        variances: A, (H, O); only for covariances.
        left: T, (C, O); only for covariances, None for the unit vectors.
        prior_bias: a, (O,), what the prior allows the bias; None without one.
        explained: Y, (K, C, H).
        explained_bias: b, (K, C).
        bias_variance: what an independent bias adds to the variances, (C,); in by_output's terms for a dependent one.
        bias_covariance: what an independent bias adds to the covariances, (C, C).
    """

    by_output: Tensor
    variances: Tensor | None
    left: Tensor | None
    prior_bias: Tensor | None
    explained: Tensor  # (H, C * K)
    explained_bias: Tensor | None  # (C * K,)

    def __init__(
        self,
        by_output: Tensor,
        variances: Tensor | None,
        left: Tensor | None,
        prior_bias: Tensor | None,
        explained: Tensor,
        explained_bias: Tensor | None,
        bias_variance: Tensor | None,
        bias_covariance: Tensor | None,
    ) -> None:
        super().__init__(bias_variance, bias_covariance)
        self.c = explained.shape[1]
        for name, value in {
            "by_output": by_output,
            "variances": variances,
            "left": left,
            "prior_bias": prior_bias,
            "explained": explained.permute(2, 1, 0).flatten(1),
            "explained_bias": None if explained_bias is None else explained_bias.T.flatten(),
        }.items():
            self.keep(name, value)

    def variance(self, phi: Tensor) -> Tensor:
        dtype, phi = phi.dtype, phi.to(self.by_output.dtype)
        prior = phi.square() @ self.by_output
        prior = prior if self.bias_variance is None else prior + self.bias_variance
        return (prior - self._explained(phi).square().sum(-1)).clamp(min=0).to(dtype)

    def covariance(self, phi: Tensor) -> Tensor:
        assert self.variances is not None
        dtype, phi = phi.dtype, phi.to(self.by_output.dtype)
        w, along = phi.square() @ self.variances, self._explained(phi)
        w = w if self.prior_bias is None else w + self.prior_bias
        prior = w.diag_embed() if self.left is None else (self.left * w.unsqueeze(1)) @ self.left.T
        prior = prior if self.bias_covariance is None else prior + self.bias_covariance
        return (prior - along @ along.mT).to(dtype)

    def _explained(self, phi: Tensor) -> Tensor:  # (M, C, K)
        bias = self.explained_bias
        along = phi @ self.explained if bias is None else torch.addmm(bias, phi, self.explained)
        return along.unflatten(1, (self.c, -1))
