"""Provide laplace-torch's names: enums of options in `enums`, selectors of weights in `masks`."""

from laplace.compat import enums as enums
from laplace.compat import masks as masks

__all__ = ["enums", "masks"]
