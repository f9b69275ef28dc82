"""Store the curvature in a compact form: one structure per file, and the registry of their names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from laplace.backprop.asked import Asked
from laplace.backprop.covariances import Basis, KroneckerCovariance, RowCovariance
from laplace.backprop.gradients import Jacobian as Jacobian
from laplace.backprop.gradients import JacobianOf as JacobianOf
from laplace.backprop.gradients import Moments as Moments
from laplace.backprop.gradients import MomentsOf as MomentsOf
from laplace.structures.base import Contribution as Contribution
from laplace.structures.base import Forms, Kept, Pass, Structure, Sums
from laplace.structures.block import Block, BlockGaussian
from laplace.structures.blockdiag import BlockCurvature, BlockDiagonal
from laplace.structures.blockdiag import BlockDiagonalGaussian as BlockDiagonalGaussian
from laplace.structures.blockdiag import Eigh as Eigh
from laplace.structures.dense import Dense, DenseBlock
from laplace.structures.diag import Diag, DiagBlock
from laplace.structures.diag import DiagGaussian as DiagGaussian
from laplace.structures.ekfac import Ekfac
from laplace.structures.full import CholeskyGaussian, Full
from laplace.structures.functional import GP, Nystrom, Variational
from laplace.structures.gaussian import Curvature, Gaussian
from laplace.structures.inf import Inf
from laplace.structures.kron import Kron
from laplace.structures.lowrank import LowRank
from laplace.structures.matrix_free import MatrixFree
from laplace.structures.solves import Solves
from laplace.weights.layout import Layout as Layout

STRUCTURES: Final[dict[str, type[Structure]]] = {
    "full": Full,
    "kron": Kron,
    "diag": Diag,
    "block": Dense,
    "ekfac": Ekfac,
    "inf": Inf,
    "lowrank": LowRank,
    "matrix_free": MatrixFree,
}


def _listed(which: Callable[[type[Structure]], bool]) -> str:
    """Return the names of the structures for which `which` is true, for an error message."""
    *names, last = (repr(name) for name, structure in STRUCTURES.items() if which(structure))
    return f"{', '.join(names)} or {last}"


def adding() -> str:
    """Return the names of the structures whose sums can be extended with more data, for an error message."""
    return _listed(lambda structure: structure.passes == 1)


def per_weight() -> str:
    """Return the names of the structures that accept a prior precision per weight, for an error message."""
    return _listed(lambda structure: "diag" in structure.prior_structures)


def taking(form: str) -> str:
    """Return the names of the structures that accept this form of a prior precision, for an error message."""
    able = [repr(name) for name, s in STRUCTURES.items() if form in (*s.prior_structures, *s.precision_forms)]
    return " or ".join([", ".join(able[:-1]), able[-1]] if len(able) > 1 else able)


__all__ = [
    "GP",
    "STRUCTURES",
    "Asked",
    "Basis",
    "Block",
    "BlockCurvature",
    "BlockDiagonal",
    "BlockGaussian",
    "CholeskyGaussian",
    "Curvature",
    "Dense",
    "DenseBlock",
    "Diag",
    "DiagBlock",
    "Ekfac",
    "Forms",
    "Full",
    "Gaussian",
    "Inf",
    "Kept",
    "Kron",
    "KroneckerCovariance",
    "LowRank",
    "MatrixFree",
    "Nystrom",
    "Pass",
    "RowCovariance",
    "Solves",
    "Structure",
    "Sums",
    "Variational",
]


def __dir__() -> list[str]:
    return __all__
