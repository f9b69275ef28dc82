"""Choose the curvature, that is, the vectors that are sent back from the outputs. One estimator per file."""

from __future__ import annotations

from typing import Final

from laplace.curvature.base import Drawn, Estimator
from laplace.curvature.ef import EF
from laplace.curvature.ggn import GGN, Hessian
from laplace.curvature.mc import MC
from laplace.curvature.sketch import Sketch
from laplace.linalg.output_curvature import OutputCurvature

CURVATURES: Final[dict[str, type[Estimator]]] = {made.name: made for made in (GGN, Sketch, MC, EF, Hessian)}

__all__ = ["CURVATURES", "EF", "GGN", "MC", "Drawn", "Estimator", "Hessian", "OutputCurvature", "Sketch"]


def __dir__() -> list[str]:
    return __all__
