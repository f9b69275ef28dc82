"""Treat the linearised network as a Gaussian process on M of the N training points. With M = N it is exact.

Let v be the vectors behind Lambda (sum of v v^T = Lambda, times N/M), G = J^T v the rows that they give, and delta_b
the prior precision of tensor b. The kernel is K = sum over b of G_b G_b^T / delta_b. The posterior covariance of
outputs and the determinants of the evidence are

    K** - K*x (1/s + K)^-1 Kx*,    log det(s H + D) - log det D = log det(1 + s K).

Both hold for a singular Lambda, too, and include covariances between outputs. With `independent_outputs` each output is
a Gaussian process by itself, from the diagonal of Lambda: C matrices M x M instead of one MC x MC.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from laplace.backprop.asked import ALL_EXAMPLES, EACH_EXAMPLE, EACH_OUTPUT, Asked, Times
from laplace.backprop.gradients import Jacobian
from laplace.checks import shown
from laplace.errors import OptionError
from laplace.linalg.contrasts import covariances_if_independent, variances_if_independent
from laplace.linalg.output_curvature import OutputCurvature
from laplace.linalg.symmetric import Clipped, cholesky, clip, spectrum
from laplace.structures.base import Forms, Sums
from laplace.structures.functional.kernel import kernels
from laplace.structures.functional.points import FunctionJacobian
from laplace.structures.functional.structure import Functional, FunctionCurvature, FunctionGaussian, Gradients
from laplace.structures.gaussian import Traces
from laplace.weights.layout import Layout

_MOST_CURVATURE = 1e7  # relative to the prior, in all directions together: more is left to the eigenvalues


class GP(Functional):
    """Keeps a subset of the data, and treats the linearised network as a Gaussian process on these points.

    Args:
        n_subset: how many points to keep. None keeps all, up to 256.
        seed: the seed for drawing the points.
        independent_outputs: whether each output is a Gaussian process by itself.

    Raises:
        OptionError: a value is outside its range.
    """

    name = "gp"
    options = ("n_subset", "seed", "independent_outputs")
    keeps_points = True
    forms = Forms(({"K": "crr"},), shared="rc")

    def __init__(self, n_subset: int | None = None, seed: int = 0, independent_outputs: bool = False) -> None:
        super().__init__(n_subset, seed)
        if not isinstance(independent_outputs, bool):
            raise OptionError(f"independent_outputs={shown(independent_outputs)} must be True or False.")
        self.independent_outputs = independent_outputs

    def form(self, own: Sums, whole: Sums) -> str:
        groups, rows, _ = own["K"].shape
        return f"kernel {rows} x {rows}" if groups == 1 else f"{groups} kernels {rows} x {rows}"

    def vectors(self, curvature: OutputCurvature, repeats: float) -> Tensor:
        alone = OutputCurvature(diagonal=curvature.squares()) if self.independent_outputs else curvature
        return alone.root() * repeats**0.5

    def bytes(self, points: int, vectors: int, layout: Layout, itemsize: int) -> int:
        numbers = vectors * points**2 if self.independent_outputs else (vectors * points) ** 2
        return 8 * numbers * (2 * len(layout.names) + 3)  # in float64: the blocks, their traces, a factorisation

    def from_points(self, gradients: Gradients, points: int, layout: Layout) -> Sums:
        blocks = kernels(gradients, points, self.independent_outputs)
        return {f"{name}/K": block for name, block in zip(layout.names, blocks, strict=True)}

    def curvature(self, sums: Sums, layout: Layout, dtype: torch.dtype) -> GPCurvature:
        return GPCurvature([sums[f"{name}/K"] for name in layout.names], layout, dtype, self.independent_outputs)


class SpectralCurvature(FunctionCurvature):
    """Holds eigenvalues that serve every prior precision."""

    def __init__(self, layout: Layout, dtype: torch.dtype, independent: bool) -> None:
        self.layout, self.dtype, self.independent = layout, dtype, independent

    @cached_property
    @abstractmethod
    def eigh(self) -> tuple[Tensor, Tensor, Clipped]:
        """Return the eigenvalues at unit precision, negative ones set to zero, (G, R), and their basis, (G, R, R)."""

    def factor(self, ratio: Tensor) -> Tensor | None:
        """Return None: eigenvectors are cheap here."""
        return None

    @property
    def clipped(self) -> Clipped:
        return self.eigh[2]


class GPCurvature(SpectralCurvature):
    """Holds the kernel of each tensor at unit precision, (1, R, R), or (C, M, M) for independent outputs."""

    def __init__(self, blocks: Sequence[Tensor], layout: Layout, dtype: torch.dtype, independent: bool) -> None:
        super().__init__(layout, dtype, independent)
        self.blocks = blocks
        self._first: tuple[float, Tensor | None] | None = None  # the first s / delta, and its factor if it is safe

    @cached_property
    def eigh(self) -> tuple[Tensor, Tensor, Clipped]:
        """Return the eigenvalues and eigenvectors of the whole kernel."""
        values, vectors = spectrum(self._whole())
        values, clipped = clip(values, self.dtype)
        return values, vectors, clipped

    def factor(self, ratio: Tensor) -> Tensor | None:  # () -> (G, R, R)
        """Return L with L L^T = 1 + s/delta K if that is cheaper than eigenvectors: for the first s/delta asked for.

        A factorisation takes a tenth of the time of the eigenvectors, and solving with it half of the time of products
        with them. But they serve every s/delta. Returns None where rounding would compete with the prior, too.
        """
        if ratio.requires_grad:
            return None
        if self._first is None and "eigh" not in self.__dict__:
            self._first = float(ratio), self._factored(ratio)
        return self._first[1] if self._first is not None and self._first[0] == float(ratio) else None

    def _factored(self, ratio: Tensor) -> Tensor | None:
        total = self._whole().mul_(ratio)
        total.diagonal(dim1=1, dim2=2).add_(1)
        if not total.diagonal(dim1=1, dim2=2).sum(1).max() < _MOST_CURVATURE:
            return None
        root, failed = torch.linalg.cholesky_ex(total)
        return None if failed.any() else root

    def _whole(self) -> Tensor:  # (G, R, R)
        total = self.blocks[0].clone()
        for block in self.blocks[1:]:
            total += block
        return total

    def gaussian(self, scale: Tensor, precision: Sequence[Tensor]) -> GPGaussian:
        scale = scale.double()
        if all(d is precision[0] for d in precision):
            solver = Spectral(self, scale, precision[0].double().reshape(()))
        else:
            solver = Cholesky(self, scale, [d.double().reshape(()) for d in precision])
        return (IndependentGaussian if self.independent else GPGaussian)(solver)


class Solver(ABC):
    """Holds a factorisation of 1 + s K."""

    def __init__(self, curvature: SpectralCurvature, scale: Tensor) -> None:
        self.curvature, self.scale, self.layout = curvature, scale, curvature.layout

    @abstractmethod
    def log_det_ratio(self) -> Tensor:
        """Return log det(1 + s K)."""

    @abstractmethod
    def log_det_prior(self) -> Tensor:
        """Return log det D."""

    @abstractmethod
    def prior(self, jacobian: FunctionJacobian, asked: Asked) -> Tensor:
        """Return the asked part of K**."""

    @abstractmethod
    def rows(self, jacobian: FunctionJacobian) -> Tensor:
        """Return X with X X^T = K*x (1/s + K)^-1 Kx*, (1, N C, R), or (C, N, M) for independent outputs."""

    @abstractmethod
    def traces(self, groups: str) -> Traces:
        """Return the traces of the weights' covariance, as in `Gaussian.traces`."""

    def _cross(self, jacobian: FunctionJacobian, weights: Sequence[Tensor]) -> Tensor:
        if self.curvature.independent:
            return jacobian.cross_each(weights)
        return jacobian.cross(weights).flatten(0, 1).unsqueeze(0)


class Spectral(Solver):
    """Solves for one precision delta of all weights.

    One eigenbasis of the kernel serves every delta. It is made when a second one is asked for.
    """

    def __init__(self, curvature: SpectralCurvature, scale: Tensor, delta: Tensor) -> None:
        super().__init__(curvature, scale)
        self.delta = delta
        self._ones = [torch.ones_like(delta)] * len(self.layout.names)

    @cached_property
    def values(self) -> Tensor:  # (G, R)
        """Return the eigenvalues of s K."""
        return self.scale * self.curvature.eigh[0] / self.delta

    @cached_property
    def factor(self) -> Tensor | None:  # (G, R, R)
        """Return L with L L^T = 1 + s K, or None if eigenvectors are to be used."""
        return self.curvature.factor(self.scale / self.delta)

    def log_det_ratio(self) -> Tensor:
        if self.factor is not None:
            return 2 * self.factor.diagonal(dim1=1, dim2=2).log().sum()
        return self.values.log1p().sum()

    def log_det_prior(self) -> Tensor:
        return self.layout.n_params * self.delta.log()

    def prior(self, jacobian: FunctionJacobian, asked: Asked) -> Tensor:
        def unit() -> Tensor:
            return jacobian.prior(asked, self._ones, self.layout.shapes)

        return (unit() if isinstance(asked, Times) else jacobian.once(asked, unit)) / self.delta

    def rows(self, jacobian: FunctionJacobian) -> Tensor:
        cross = jacobian.once("cross", lambda: self._cross(jacobian, self._ones))
        root = self.factor
        if root is not None:
            solved = jacobian.once(
                ("solved", id(root)), lambda: torch.linalg.solve_triangular(root, cross.mT, upper=False)
            )
            return solved.mT * (self.scale.sqrt() / self.delta)
        rotated = jacobian.once("rotated", lambda: cross @ self.curvature.eigh[1])
        return rotated * ((self.scale / (1 + self.values)).sqrt() / self.delta).unsqueeze(1)

    def traces(self, groups: str) -> Traces:
        if groups != "scalar":
            assert isinstance(self.curvature, GPCurvature)
            return Cholesky(self.curvature, self.scale, [self.delta] * len(self.layout.names)).traces(groups)
        shrunk, p = self.values / (1 + self.values), self.layout.n_params
        t = (p - shrunk.sum()) / self.delta
        m = (p - 2 * shrunk.sum() + shrunk.square().sum()) / self.delta.square()
        return t.reshape(1), m.reshape(1)


class Cholesky(Solver):
    """Solves for one precision per tensor, by 1 + s K = L L^T."""

    def __init__(self, curvature: GPCurvature, scale: Tensor, deltas: Sequence[Tensor]) -> None:
        super().__init__(curvature, scale)
        self.blocks, self.deltas, self.inverse = curvature.blocks, deltas, [1 / d for d in deltas]
        total = torch.eye(curvature.blocks[0].shape[-1], dtype=torch.float64, device=scale.device)
        for weight, block in zip(self.inverse, curvature.blocks, strict=True):
            total = total + (scale * weight) * block
        self.root = cholesky(total)

    def log_det_ratio(self) -> Tensor:
        return 2 * self.root.diagonal(dim1=1, dim2=2).log().sum()

    def log_det_prior(self) -> Tensor:
        return torch.stack([n * d.log() for n, d in zip(self.layout.sizes, self.deltas, strict=True)]).sum()

    def prior(self, jacobian: FunctionJacobian, asked: Asked) -> Tensor:
        return jacobian.prior(asked, self.inverse, self.layout.shapes)

    def rows(self, jacobian: FunctionJacobian) -> Tensor:
        cross = self._cross(jacobian, self.inverse)
        return torch.linalg.solve_triangular(self.root.mT, cross, upper=True, left=False) * self.scale.sqrt()

    def traces(self, groups: str) -> Traces:
        """Compute the traces from W_b = (1 + s K)^-1 s K_b / delta_b.

        Sigma_bh = ([b = h] - G_b^T (1/s + K)^-1 G_h / delta_h) / delta_b.
        """
        pairs = zip(self.blocks, self.inverse, strict=True)
        shrunk = [torch.cholesky_solve(block * (self.scale * weight), self.root) for block, weight in pairs]
        tau = torch.stack([w.diagonal(dim1=1, dim2=2).sum() for w in shrunk])
        omega = torch.stack([torch.stack([(w * u.mT).sum() for u in shrunk]) for w in shrunk])
        sizes = torch.tensor(self.layout.sizes, dtype=tau.dtype, device=tau.device)
        weight = torch.stack(self.inverse)
        t = (sizes - tau) * weight
        m = ((sizes - 2 * tau).diag() + omega) * weight * weight.unsqueeze(1)
        return (t.sum().reshape(1), m.sum().reshape(1, 1)) if groups == "scalar" else (t, m)


class GPGaussian(FunctionGaussian):
    """Treats all outputs together, with covariances between them."""

    def __init__(self, solver: Solver) -> None:
        self.solver, self.dtype = solver, solver.curvature.dtype

    def logdet(self) -> Tensor:
        return self.solver.log_det_ratio() + self.solver.log_det_prior()

    def traces(self, groups: str) -> Traces:
        return self.solver.traces(groups)

    def variance(self, jacobian: Jacobian) -> Tensor:
        j, x = self._rows(jacobian)
        return (self.solver.prior(j, EACH_OUTPUT) - x.square().sum(-1)).clamp(min=0).to(self.dtype)

    def covariance(self, jacobian: Jacobian) -> Tensor:
        j, x = self._rows(jacobian)
        return (self.solver.prior(j, EACH_EXAMPLE) - x @ x.mT).to(self.dtype)

    def product(self, jacobian: Jacobian, v: Tensor) -> Tensor:
        j, x = self._rows(jacobian)
        explained = x @ (x.mT @ v.double().unsqueeze(-1))
        return (self.solver.prior(j, Times(v.double())) - explained.squeeze(-1)).to(self.dtype)

    def joint(self, jacobian: Jacobian) -> Tensor:
        j, x = self._rows(jacobian)
        n, c, _ = x.shape
        x = x.flatten(0, 1)
        return (self.solver.prior(j, ALL_EXAMPLES) - (x @ x.T).reshape(n, c, n, c)).to(self.dtype)

    def _rows(self, jacobian: Jacobian) -> tuple[FunctionJacobian, Tensor]:  # (N, C, R)
        assert isinstance(jacobian, FunctionJacobian)
        n = len(jacobian.forward.outputs)
        return jacobian, self.solver.rows(jacobian).squeeze(0).unflatten(0, (n, -1))


class IndependentGaussian(GPGaussian):
    """Treats each output as a Gaussian process by itself, without covariances between outputs."""

    def variance(self, jacobian: Jacobian) -> Tensor:
        own = super().variance(jacobian)
        return variances_if_independent(own) if _of_contrasts(jacobian) else own

    def covariance(self, jacobian: Jacobian) -> Tensor:
        own = super().variance(jacobian)
        return covariances_if_independent(own) if _of_contrasts(jacobian) else own.diag_embed()

    def product(self, jacobian: Jacobian, v: Tensor) -> Tensor:
        return (self.covariance(jacobian) @ v.unsqueeze(-1)).squeeze(-1)

    def joint(self, jacobian: Jacobian) -> Tensor:
        j, x = self._rows(jacobian)  # (N, C, M)
        x = x.transpose(0, 1)
        prior = self.solver.prior(j, ALL_EXAMPLES).diagonal(dim1=1, dim2=3)  # (N, N, C)
        return (prior - (x @ x.mT).permute(1, 2, 0)).diag_embed().transpose(1, 2).to(self.dtype)

    def _rows(self, jacobian: Jacobian) -> tuple[FunctionJacobian, Tensor]:  # (N, C, M)
        assert isinstance(jacobian, FunctionJacobian)
        rows = self.solver.rows(jacobian.plain).transpose(0, 1)
        return jacobian.plain, rows if jacobian.chosen is None else rows[:, jacobian.chosen]


def _of_contrasts(jacobian: Jacobian) -> bool:
    return isinstance(jacobian, FunctionJacobian) and jacobian.centred
