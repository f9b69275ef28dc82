"""laplace-torch's names: enums of options in `laplace.compat.enums`, selectors of weights in `laplace.compat.masks`."""

from laplace.compat import enums as enums
from laplace.compat import masks as masks

__all__ = ["enums", "masks"]
