"""Which vectors are sent back from the outputs: one function per kind of curvature."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from laplace.curvature.ef import ef
from laplace.curvature.ggn import ggn
from laplace.curvature.mc import mc
from laplace.curvature.output import OutputCurvature
from laplace.curvature.sketch import sketch

CURVATURES: Final[dict[str, Callable[..., OutputCurvature]]] = {
    "ggn": ggn,
    "sketch": sketch,
    "mc": mc,
    "ef": ef,
    "hessian": ggn,  # of the outputs; of the weights it is another matter: hessian.py
}

__all__ = ["CURVATURES", "OutputCurvature"]
