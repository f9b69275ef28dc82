"""Turn a trained PyTorch network into a Bayesian one."""

from laplace.enums import (
    Curvature,
    FeatureReduction,
    HessianStructure,
    LinkApprox,
    PredType,
    PriorStructure,
    SubsetOfWeights,
    TuningMethod,
)
from laplace.enums import Likelihood as Likelihood
from laplace.laplace import Laplace
from laplace.layers import register_rule
from laplace.likelihoods import Categorical, Gaussian, HeteroscedasticGaussian, Ordinal, from_log_prob
from laplace.online import marglik_training
from laplace.predictive import Prediction
from laplace.preview import plan

__version__ = "0.1.0"

__all__ = [
    "Categorical",
    "Curvature",
    "FeatureReduction",
    "Gaussian",
    "HessianStructure",
    "HeteroscedasticGaussian",
    "Laplace",
    "Likelihood",
    "LinkApprox",
    "Ordinal",
    "PredType",
    "Prediction",
    "PriorStructure",
    "SubsetOfWeights",
    "TuningMethod",
    "from_log_prob",
    "marglik_training",
    "plan",
    "register_rule",
]
