"""What is kept of the curvature."""

from __future__ import annotations

from collections.abc import Callable
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


__all__ = ["STRUCTURES", "Curvature", "Gaussian", "Pass", "Structure", "Sums"]
