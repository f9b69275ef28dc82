"""The paths and names at which laplace-torch 0.3 has its classes and functions. Facts, in its own order of modules."""

from __future__ import annotations

NAMES: dict[str, list[str]] = {
    "laplace": """
        BaseFunctionalLaplace BaseLaplace DiagLLLaplace DiagLaplace DiagSubnetLaplace ELLA FullLLLaplace
        FullLaplace FullSubnetLaplace FunctionalApproximation FunctionalLLLaplace FunctionalLaplace
        HessianStructure KronLLLaplace KronLaplace LLLaplace Laplace Likelihood LinkApprox LowRankLaplace
        ParametricLaplace PredType PriorStructure SubnetLaplace SubsetOfWeights TuningMethod VaLLA
        marglik_training
    """.split(),
    "laplace.baselaplace": """
        BaseFunctionalLaplace BaseLaplace DiagLaplace ELLA FullLaplace FunctionalLaplace KronLaplace
        LowRankLaplace ParametricLaplace VaLLA
    """.split(),
    "laplace.curvature": """
        AsdlEF AsdlGGN AsdlHessian AsdlInterface BackPackEF BackPackGGN BackPackInterface CurvatureInterface
        CurvlinopsEF CurvlinopsGGN CurvlinopsHessian CurvlinopsInterface EFInterface GGNInterface
    """.split(),
    "laplace.curvature.asdfghjkl": """
        AsdfghjklEF AsdfghjklGGN AsdfghjklHessian AsdfghjklInterface
    """.split(),
    "laplace.curvature.asdl": """
        AsdlEF AsdlGGN AsdlHessian AsdlInterface
    """.split(),
    "laplace.curvature.backpack": """
        BackPackEF BackPackGGN BackPackInterface
    """.split(),
    "laplace.curvature.curvature": """
        CurvatureInterface EFInterface GGNInterface
    """.split(),
    "laplace.curvature.curvlinops": """
        CurvlinopsEF CurvlinopsGGN CurvlinopsHessian CurvlinopsInterface
    """.split(),
    "laplace.laplace": """
        Laplace
    """.split(),
    "laplace.lllaplace": """
        DiagLLLaplace FullLLLaplace FunctionalLLLaplace KronLLLaplace LLLaplace
    """.split(),
    "laplace.marglik_training": """
        marglik_training
    """.split(),
    "laplace.subnetlaplace": """
        DiagSubnetLaplace FullSubnetLaplace SubnetLaplace
    """.split(),
    "laplace.utils": """
        FeatureExtractor FunctionalApproximation HessianStructure Kron KronDecomposed
        LargestMagnitudeSubnetMask LargestVarianceDiagLaplaceSubnetMask LargestVarianceSWAGSubnetMask
        LastLayerSubnetMask Likelihood LinkApprox ModuleNameSubnetMask ParamNameSubnetMask PredType
        PriorStructure RandomSubnetMask RunningNLLMetric SoDSampler SubnetMask SubsetOfWeights TuningMethod
        _is_batchnorm _is_valid_scalar batch_size block_diag classification_targets concatenate_rows
        diagonal_add_scalar draw_gaussian expand_prior_precision fit_diagonal_swag_var fix_prior_prec_structure
        get_nll invsqrt_precision kron normal_samples parameters_per_layer preserve_model_gradients
        regression_targets same_configuration select_rows split_batch subset_loader symeig to_device
        training_indices validate
    """.split(),
    "laplace.utils.enums": """
        FunctionalApproximation HessianStructure Likelihood LinkApprox PredType PriorStructure SubsetOfWeights
        TuningMethod
    """.split(),
    "laplace.utils.feature_extractor": """
        FeatureExtractor FeatureReduction
    """.split(),
    "laplace.utils.functional_utils": """
        batch_size classification_targets concatenate_rows draw_gaussian preserve_model_gradients
        regression_targets same_configuration select_rows split_batch subset_loader to_device training_indices
    """.split(),
    "laplace.utils.matrix": """
        Kron KronDecomposed
    """.split(),
    "laplace.utils.metrics": """
        RunningNLLMetric
    """.split(),
    "laplace.utils.subnetmask": """
        LargestMagnitudeSubnetMask LargestVarianceDiagLaplaceSubnetMask LargestVarianceSWAGSubnetMask
        LastLayerSubnetMask ModuleNameSubnetMask ParamNameSubnetMask RandomSubnetMask SubnetMask
    """.split(),
    "laplace.utils.swag": """
        fit_diagonal_swag_var
    """.split(),
    "laplace.utils.utils": """
        SoDSampler block_diag diagonal_add_scalar expand_prior_precision get_nll invsqrt_precision kron
        parameters_per_layer symeig validate
    """.split(),
}
