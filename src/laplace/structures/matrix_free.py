"""Answer from the exact posterior over all weights without ever forming its matrix.

The fit keeps only a preconditioner: the leading eigenpairs of H, or the factors of `kron`, `ekfac` or `diag`. Every
later answer reads the training data again, and multiplies blocks of vectors by the curvature H. The algebra is in
`matrix_free_gaussian.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import torch

from laplace.backprop.gradients import Moments, MomentsOf
from laplace.checks import LARGEST, choice, shown, whole_number
from laplace.errors import OptionError
from laplace.structures.base import Contribution, Forms, Pass, Structure, Sums
from laplace.structures.blockdiag import BlockDiagonal, Eigh
from laplace.structures.diag import Diag, DiagBlock
from laplace.structures.ekfac import Ekfac
from laplace.structures.gaussian import Curvature
from laplace.structures.kron import Kron
from laplace.structures.leading import Leading
from laplace.structures.matrix_free_gaussian import MatrixFreeCurvature
from laplace.structures.solves import Solver, TrainingData
from laplace.weights.layout import Layout

_VECTORS: Final = 8  # of all weights each, for every right-hand side of a solve


class MatrixFree(Structure):
    """Keeps no curvature. Solves with it by conjugate gradients, reading the training data again for every answer.

    Args:
        residual: how small the residuals of a solve have to be, relative to the right-hand side. The relative error of
            a variance is about its square.
        most_iterations: how many blocks of products a solve may take. A residual that is not reached is warned of.
        preconditioner: what to keep of the fit, so that solves take fewer iterations: 'lowrank' (the leading eigenpairs
            of all weights together), 'kron', 'ekfac', 'diag', or 'none' (the prior alone).
        probes: how many random vectors estimate the log-determinant and the traces of the evidence. With as many as
            there are weights, all unit vectors are taken, and the evidence is exact.
        rank: of 'lowrank', how many vectors the fit multiplies by the curvature, and the most pairs that it keeps. None
            means 100.
        seed: the seed for the probes, and for the draws of curvature 'sketch' and 'mc'.

    Raises:
        OptionError: a value is outside its range.
    """

    name = "matrix_free"
    options = ("residual", "most_iterations", "preconditioner", "rank", "probes", "seed")
    passes = 2
    exact_hessian = False
    rereads = True
    prior_structures = ("scalar", "layerwise")

    def __init__(
        self,
        residual: float = 1e-3,
        most_iterations: int = 200,
        preconditioner: str = "lowrank",
        rank: int | None = None,
        probes: int = 16,
        seed: int = 0,
    ) -> None:
        if isinstance(residual, bool) or not isinstance(residual, (int, float)) or not 0 < residual < 1:
            raise OptionError(f"residual={shown(residual)} must lie between 0 and 1, as in residual=1e-3.")
        self.residual = float(residual)
        self.most_iterations = whole_number(most_iterations, "most_iterations", 2)
        self.preconditioner = choice(preconditioner, PRECONDITIONERS, "preconditioner")
        if rank is not None and preconditioner != "lowrank":
            raise OptionError(
                f"rank={shown(rank)} belongs to preconditioner='lowrank'; {preconditioner!r} has no rank."
            )
        self.rank = None if rank is None else whole_number(rank, "rank")
        self.probes = whole_number(probes, "probes", 2)
        self.seed = whole_number(seed, "seed", 0, LARGEST)
        self._stored: Structure | None = None
        self.forms = self.stored.forms
        self.scattered = self.stored.scattered

    @property
    def stored(self) -> Structure:
        if self._stored is not None and self._stored.budget is self.budget:
            return self._stored
        structure = Leading() if self.rank is None else Leading(self.rank)
        if self.preconditioner != "lowrank":
            structure = PRECONDITIONERS[self.preconditioner]()
        structure.budget = self.budget
        self._stored = structure
        return structure

    @property
    def adds(self) -> bool:
        return False

    def sums(self, moments: Moments, layout: Layout) -> Contribution:
        return self.stored.sums(moments, layout)

    def finish(self, before: Sums, found: Sums) -> Sums:
        return self.stored.finish(before, found)

    def further(self, sums: Sums, layout: Layout, dtype: torch.dtype) -> Pass | None:
        return self.stored.further(sums, layout, dtype)

    def form(self, own: Sums, whole: Sums) -> str:
        kept = own or whole
        return f"no matrix; {self.stored.form(own, whole)}" if kept else "no matrix"

    def notes(self, sums: Sums) -> Iterator[str]:
        return self.stored.notes(sums)

    def memory(self, moments: Moments, layout: Layout, itemsize: int) -> int:
        return self.stored.memory(moments, layout, itemsize) + _VECTORS * layout.n_params * itemsize

    def runs(self, layout: Layout, n_data: int) -> tuple[float, float]:
        return self.stored.runs(layout, n_data)

    def work(self, moments: Moments, layout: Layout, vectors: int) -> tuple[float, float]:
        return self.stored.work(moments, layout, vectors)

    def curvature(self, sums: Sums, layout: Layout, dtype: torch.dtype) -> Curvature:
        inner = self.stored.curvature(sums, layout, dtype)
        solver = Solver(self.residual, self.most_iterations, self.probes, self.seed)
        return MatrixFreeCurvature(inner, layout, dtype, solver, self.budget)

    def attach_data(self, curvature: Curvature, data: TrainingData | None) -> Curvature:
        assert isinstance(curvature, MatrixFreeCurvature)
        return curvature.reading(data)


class PriorAlone(BlockDiagonal):
    """Keeps nothing: the precision is that of the prior."""

    name = "none"
    scattered = True
    forms = Forms()

    def block_sums(self, moments: MomentsOf) -> Contribution:
        return {}

    def block(self, sums: Sums, shape: tuple[int, ...], eigh: Eigh) -> DiagBlock:
        return DiagBlock(torch.zeros(shape, dtype=eigh.dtype).flatten(), shape)


PRECONDITIONERS: Final[dict[str, type[Structure]]] = {
    "lowrank": Leading,
    "kron": Kron,
    "ekfac": Ekfac,
    "diag": Diag,
    "none": PriorAlone,
}
