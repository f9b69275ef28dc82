"""Define posteriors over functions: the linearised network as a Gaussian process, and two approximations of it."""

from __future__ import annotations

from typing import Final

from laplace.structures.functional.gp import GP
from laplace.structures.functional.nystrom import Nystrom
from laplace.structures.functional.structure import Functional
from laplace.structures.functional.variational import Variational

FUNCTIONAL: Final[dict[str, type[Functional]]] = {"sod": GP, "nystrom": Nystrom, "variational": Variational}

__all__ = ["FUNCTIONAL", "GP", "Functional", "Nystrom", "Variational"]
