"""Provide laplace-torch's names of options as string enums: `HessianStructure.KRON == 'kron'`."""

from __future__ import annotations

from enum import Enum

from laplace.likelihoods import Likelihood as LikelihoodClass


class _Name(str, Enum):
    def __str__(self) -> str:
        return str(self.value)


class SubsetOfWeights(_Name):
    """Names the choices of uncertain weights."""

    LAST_LAYER = "last_layer"
    ALL = "all"
    SUBNETWORK = "subnetwork"


class HessianStructure(_Name):
    """Names the structures of the curvature."""

    FULL = "full"
    KRON = "kron"
    DIAG = "diag"
    BLOCK = "block"
    EKFAC = "ekfac"
    INF = "inf"
    LOWRANK = "lowrank"
    MATRIX_FREE = "matrix_free"
    GP = "gp"


class FunctionalApproximation(_Name):
    """Names the approximations of a posterior over functions."""

    SOD = "sod"
    NYSTROM = "nystrom"
    VARIATIONAL = "variational"


class Curvature(_Name):
    """Names the curvature estimators."""

    GGN = "ggn"
    SKETCH = "sketch"
    MC = "mc"
    EF = "ef"
    HESSIAN = "hessian"


class Likelihood(_Name):
    """Names the likelihoods. Their classes are in `laplace.likelihoods`."""

    REGRESSION = "regression"
    CLASSIFICATION = "classification"
    REWARD_MODELING = "reward_modeling"
    BINARY = "binary"
    MULTILABEL = "multilabel"
    POISSON = "poisson"
    HETEROSCEDASTIC = "heteroscedastic"
    GIVEN_NOISE = "given_noise"
    ORDINAL = "ordinal"


class PredType(_Name):
    """Names what predicts: the linearised network, the network itself, or a 'gp'."""

    GLM = "glm"
    NN = "nn"
    GP = "gp"


class LinkApprox(_Name):
    """Names the approximations of the mean of the inverse link. Each likelihood has some of them."""

    PROBIT = "probit"
    ONE_VS_REST = "one_vs_rest"
    MC = "mc"
    BRIDGE = "bridge"
    BRIDGE_NORM = "bridge_norm"
    DELTA = "delta"
    QUADRATURE = "quadrature"
    EXACT = "exact"


class TuningMethod(_Name):
    """Names the methods of `Laplace.optimize_prior_precision`."""

    MARGLIK = "marglik"
    GRIDSEARCH = "gridsearch"


class PriorStructure(_Name):
    """Names the groups of weights that share a prior precision."""

    SCALAR = "scalar"
    LAYERWISE = "layerwise"
    DIAG = "diag"


class FeatureReduction(_Name):
    """Names the ways in which a network reduces a sequence after its last layer."""

    PICK_FIRST = "pick_first"
    PICK_LAST = "pick_last"
    AVERAGE = "average"


def register() -> None:
    """Let `laplace.Likelihood.REGRESSION` be a name, although `laplace.Likelihood` is a class of ours."""
    for member in Likelihood:
        setattr(LikelihoodClass, member.name, member)
