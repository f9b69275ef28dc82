"""Provide laplace-torch's names, and the only place in the library that knows them.

What was `laplace.baselaplace`, `laplace.utils.matrix` and so on there can be imported from the same paths here.
`laplace.compat.Laplace` makes objects with the shapes that they have there.
"""

from laplace.compat import (
    attributes,
    backends,
    batches,
    classes,
    enums,
    feature_extractor,
    functional,
    installation,
    masks,
    matrix,
    metrics,
    overrides,
    swag,
    tensors,
)
from laplace.compat.factory import Laplace

__all__ = [
    "Laplace",
    "attributes",
    "backends",
    "batches",
    "classes",
    "enums",
    "feature_extractor",
    "functional",
    "installation",
    "masks",
    "matrix",
    "metrics",
    "overrides",
    "swag",
    "tensors",
]

attributes.register()
backends.register()
enums.register()
installation.notice_other_files()
