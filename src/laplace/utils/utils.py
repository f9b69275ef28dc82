"""Provide what laplace-torch has in this module. It is defined in `laplace.compat`."""

from laplace.compat.metrics import (
    get_nll,
    validate,
)
from laplace.compat.tensors import (
    SoDSampler,
    _is_batchnorm,
    _is_valid_scalar,
    block_diag,
    diagonal_add_scalar,
    expand_prior_precision,
    fix_prior_prec_structure,
    invsqrt_precision,
    kron,
    normal_samples,
    parameters_per_layer,
    symeig,
)

__all__ = [
    "SoDSampler",
    "_is_batchnorm",
    "_is_valid_scalar",
    "block_diag",
    "diagonal_add_scalar",
    "expand_prior_precision",
    "fix_prior_prec_structure",
    "get_nll",
    "invsqrt_precision",
    "kron",
    "normal_samples",
    "parameters_per_layer",
    "symeig",
    "validate",
]
