"""Provide what laplace-torch has in this module. It is defined in `laplace.compat`."""

from laplace.compat.metrics import (
    get_nll,
    validate,
)
from laplace.compat.tensors import (
    SoDSampler,
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
from laplace.compat.tensors import _is_batchnorm as _is_batchnorm
from laplace.compat.tensors import _is_valid_scalar as _is_valid_scalar

__all__ = [
    "SoDSampler",
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
