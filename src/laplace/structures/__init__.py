"""What is kept of the curvature."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from laplace.backprop.asked import Asked
from laplace.backprop.gradients import Jacobian as Jacobian
from laplace.backprop.gradients import JacobianOf as JacobianOf
from laplace.backprop.gradients import KroneckerCovariance
from laplace.backprop.gradients import Moments as Moments
from laplace.backprop.gradients import MomentsOf as MomentsOf
from laplace.structures.base import Contribution as Contribution
from laplace.structures.base import Curvature, Forms, Gaussian, Kept, Pass, Structure, Sums
from laplace.structures.block import Block, BlockGaussian
from laplace.structures.blockdiag import BlockCurvature, BlockDiagonal
from laplace.structures.blockdiag import BlockDiagonalGaussian as BlockDiagonalGaussian
from laplace.structures.blockdiag import Eigh as Eigh
from laplace.structures.dense import Dense, DenseBlock
from laplace.structures.diag import Diag, DiagBlock
from laplace.structures.diag import DiagGaussian as DiagGaussian
from laplace.structures.ekfac import Ekfac
from laplace.structures.full import CholeskyGaussian as CholeskyGaussian
from laplace.structures.full import Full
from laplace.structures.functional import GP, Nystrom
from laplace.structures.inf import Inf
from laplace.structures.kron import Kron
from laplace.structures.lowrank import LowRank
from laplace.weights.layout import Layout as Layout

STRUCTURES: Final[dict[str, type[Structure]]] = {
    "full": Full,
    "kron": Kron,
    "diag": Diag,
    "block": Dense,
    "ekfac": Ekfac,
    "inf": Inf,
    "lowrank": LowRank,
}


def _listed(which: Callable[[type[Structure]], bool]) -> str:
    """The names of some structures, for an error message."""
    *names, last = (repr(name) for name, structure in STRUCTURES.items() if which(structure))
    return f"{', '.join(names)} or {last}"


def adding() -> str:
    """The names of those whose sums add."""
    return _listed(lambda structure: structure.passes == 1)


def per_weight() -> str:
    """The names of those that can take a precision per weight."""
    return _listed(lambda structure: "diag" in structure.prior_structures)


def taking(form: str) -> str:
    """Return the names of those that can take this form of a prior precision."""
    able = [repr(name) for name, s in STRUCTURES.items() if form in (*s.prior_structures, *s.precision_forms)]
    return " or ".join([", ".join(able[:-1]), able[-1]] if len(able) > 1 else able)


__all__ = [
    "GP",
    "STRUCTURES",
    "Asked",
    "Block",
    "BlockCurvature",
    "BlockDiagonal",
    "BlockGaussian",
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
    "Nystrom",
    "Pass",
    "Structure",
    "Sums",
]
