"""Provide what laplace-torch has in this module. It is defined in `laplace.compat`."""

from laplace.compat.batches import (
    batch_size,
    classification_targets,
    concatenate_rows,
    draw_gaussian,
    preserve_model_gradients,
    regression_targets,
    same_configuration,
    select_rows,
    split_batch,
    subset_loader,
    to_device,
    training_indices,
)
from laplace.compat.enums import (
    FunctionalApproximation,
    HessianStructure,
    Likelihood,
    LinkApprox,
    PredType,
    PriorStructure,
    SubsetOfWeights,
    TuningMethod,
)
from laplace.compat.feature_extractor import (
    FeatureExtractor,
)
from laplace.compat.masks import (
    LargestMagnitudeSubnetMask,
    LargestVarianceDiagLaplaceSubnetMask,
    LargestVarianceSWAGSubnetMask,
    LastLayerSubnetMask,
    ModuleNameSubnetMask,
    ParamNameSubnetMask,
    RandomSubnetMask,
    SubnetMask,
)
from laplace.compat.matrix import (
    Kron,
    KronDecomposed,
)
from laplace.compat.metrics import (
    RunningNLLMetric,
    get_nll,
    validate,
)
from laplace.compat.swag import (
    fit_diagonal_swag_var,
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
    "FeatureExtractor",
    "FunctionalApproximation",
    "HessianStructure",
    "Kron",
    "KronDecomposed",
    "LargestMagnitudeSubnetMask",
    "LargestVarianceDiagLaplaceSubnetMask",
    "LargestVarianceSWAGSubnetMask",
    "LastLayerSubnetMask",
    "Likelihood",
    "LinkApprox",
    "ModuleNameSubnetMask",
    "ParamNameSubnetMask",
    "PredType",
    "PriorStructure",
    "RandomSubnetMask",
    "RunningNLLMetric",
    "SoDSampler",
    "SubnetMask",
    "SubsetOfWeights",
    "TuningMethod",
    "batch_size",
    "block_diag",
    "classification_targets",
    "concatenate_rows",
    "diagonal_add_scalar",
    "draw_gaussian",
    "expand_prior_precision",
    "fit_diagonal_swag_var",
    "fix_prior_prec_structure",
    "get_nll",
    "invsqrt_precision",
    "kron",
    "normal_samples",
    "parameters_per_layer",
    "preserve_model_gradients",
    "regression_targets",
    "same_configuration",
    "select_rows",
    "split_batch",
    "subset_loader",
    "symeig",
    "to_device",
    "training_indices",
    "validate",
]
