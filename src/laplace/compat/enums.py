"""laplace-torch's names of the options, as string enums: `HessianStructure.KRON == 'kron'`."""

from __future__ import annotations

from enum import Enum


class _Name(str, Enum):
    def __str__(self) -> str:
        return str(self.value)


class SubsetOfWeights(_Name):
    """Which weights are uncertain, by name."""

    LAST_LAYER = "last_layer"
    ALL = "all"
    SUBNETWORK = "subnetwork"


class HessianStructure(_Name):
    """What is kept of the curvature."""

    FULL = "full"
    KRON = "kron"
    DIAG = "diag"
    BLOCK = "block"
    EKFAC = "ekfac"
    INF = "inf"
    LOWRANK = "lowrank"
    GP = "gp"


class Curvature(_Name):
    """Which curvature."""

    GGN = "ggn"
    SKETCH = "sketch"
    MC = "mc"
    EF = "ef"
    HESSIAN = "hessian"


class Likelihood(_Name):
    """The likelihoods that have a name; as objects they are in `laplace.likelihoods`."""

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
    """Whether predictions are those of the linearised network, of the network itself, or of a 'gp'."""

    GLM = "glm"
    NN = "nn"
    GP = "gp"


class LinkApprox(_Name):
    """How the mean of the inverse link is approximated; which of them there are depends on the likelihood."""

    PROBIT = "probit"
    MC = "mc"
    BRIDGE = "bridge"
    BRIDGE_NORM = "bridge_norm"
    DELTA = "delta"
    QUADRATURE = "quadrature"
    EXACT = "exact"


class TuningMethod(_Name):
    """How `Laplace.optimize_prior_precision` finds the prior precision."""

    MARGLIK = "marglik"
    GRIDSEARCH = "gridsearch"


class PriorStructure(_Name):
    """How many prior precisions there are."""

    SCALAR = "scalar"
    LAYERWISE = "layerwise"
    DIAG = "diag"


class FeatureReduction(_Name):
    """What a network makes of a sequence behind its last layer."""

    PICK_FIRST = "pick_first"
    PICK_LAST = "pick_last"
    AVERAGE = "average"
