"""What is kept of the curvature."""

from __future__ import annotations

from typing import Final

from laplace.structures.base import Curvature, Gaussian, Pass, Structure, Sums
from laplace.structures.dense import Dense
from laplace.structures.diag import Diag
from laplace.structures.ekfac import Ekfac
from laplace.structures.full import Full
from laplace.structures.inf import Inf
from laplace.structures.kron import Kron
from laplace.structures.lowrank import LowRank

STRUCTURES: Final[dict[str, type[Structure]]] = {
    "full": Full,
    "kron": Kron,
    "diag": Diag,
    "block": Dense,
    "ekfac": Ekfac,
    "inf": Inf,
    "lowrank": LowRank,
}

__all__ = ["STRUCTURES", "Curvature", "Gaussian", "Pass", "Structure", "Sums"]
