"""Turn a trained PyTorch network into a Bayesian one.

    la = Laplace(model, "classification").fit(train_loader)
    la.predict(x)

What `dir(laplace)` lists is public; other modules are inside. Parts as objects are in `laplace.likelihoods`,
`laplace.weights`, `laplace.structures` and `laplace.curvature`. laplace-torch's enums can be imported from here, too,
except its `Likelihood`, which is `laplace.compat.enums.Likelihood`.
"""

from laplace import compat as compat
from laplace import conformal as conformal
from laplace import curvature as curvature
from laplace import decisions as decisions
from laplace import distributed as distributed
from laplace import errors as errors
from laplace import evaluation as evaluation
from laplace import layers as layers
from laplace import likelihoods as likelihoods
from laplace import predictive as predictive
from laplace import priors as priors
from laplace import rivals as rivals
from laplace import structures as structures
from laplace import tuning as tuning
from laplace import utils as utils
from laplace import weights as weights
from laplace._version import __version__ as __version__
from laplace.comparison import compare
from laplace.compat.classes import BaseLaplace as BaseLaplace
from laplace.compat.classes import DiagLaplace as DiagLaplace
from laplace.compat.classes import DiagLLLaplace as DiagLLLaplace
from laplace.compat.classes import DiagSubnetLaplace as DiagSubnetLaplace
from laplace.compat.classes import FullLaplace as FullLaplace
from laplace.compat.classes import FullLLLaplace as FullLLLaplace
from laplace.compat.classes import FullSubnetLaplace as FullSubnetLaplace
from laplace.compat.classes import KronLaplace as KronLaplace
from laplace.compat.classes import KronLLLaplace as KronLLLaplace
from laplace.compat.classes import LLLaplace as LLLaplace
from laplace.compat.classes import LowRankLaplace as LowRankLaplace
from laplace.compat.classes import ParametricLaplace as ParametricLaplace
from laplace.compat.classes import SubnetLaplace as SubnetLaplace
from laplace.compat.enums import Curvature as Curvature
from laplace.compat.enums import FeatureReduction as FeatureReduction
from laplace.compat.enums import FunctionalApproximation as FunctionalApproximation
from laplace.compat.enums import HessianStructure as HessianStructure
from laplace.compat.enums import LinkApprox as LinkApprox
from laplace.compat.enums import PredType as PredType
from laplace.compat.enums import PriorStructure as PriorStructure
from laplace.compat.enums import SubsetOfWeights as SubsetOfWeights
from laplace.compat.enums import TuningMethod as TuningMethod
from laplace.compat.functional import ELLA as ELLA
from laplace.compat.functional import BaseFunctionalLaplace as BaseFunctionalLaplace
from laplace.compat.functional import FunctionalLaplace as FunctionalLaplace
from laplace.compat.functional import FunctionalLLLaplace as FunctionalLLLaplace
from laplace.compat.functional import VaLLA as VaLLA
from laplace.evaluation.report.call import report
from laplace.laplace import Laplace
from laplace.layers import register_rule
from laplace.likelihoods import (
    Categorical,
    Gaussian,
    HeteroscedasticGaussian,
    Likelihood,
    Ordinal,
    from_log_prob,
)
from laplace.marglik_training import marglik_training
from laplace.predictive import Prediction
from laplace.preview import plan

__all__ = [
    "Categorical",
    "Gaussian",
    "HeteroscedasticGaussian",
    "Laplace",
    "Likelihood",
    "Ordinal",
    "Prediction",
    "compare",
    "from_log_prob",
    "marglik_training",
    "plan",
    "register_rule",
    "report",
]
_ROOMS = (
    "compat",
    "conformal",
    "curvature",
    "decisions",
    "distributed",
    "errors",
    "evaluation",
    "layers",
    "likelihoods",
    "predictive",
    "priors",
    "rivals",
    "structures",
    "tuning",
    "utils",
    "weights",
)


def __dir__() -> list[str]:
    return sorted([*__all__, *_ROOMS, "__all__", "__doc__", "__file__", "__name__", "__path__", "__version__"])
