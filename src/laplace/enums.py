"""The names of the options, as string enums: `HessianStructure.KRON == 'kron'`."""

from __future__ import annotations

from enum import Enum


class _Name(str, Enum):
    def __str__(self) -> str:
        return str(self.value)


class SubsetOfWeights(_Name):
    LAST_LAYER = "last_layer"
    ALL = "all"
    SUBNETWORK = "subnetwork"


class HessianStructure(_Name):
    FULL = "full"
    KRON = "kron"
    DIAG = "diag"
    BLOCK = "block"
    EKFAC = "ekfac"
    INF = "inf"
    LOWRANK = "lowrank"
    GP = "gp"


class Curvature(_Name):
    GGN = "ggn"
    SKETCH = "sketch"
    MC = "mc"
    EF = "ef"
    HESSIAN = "hessian"


class Likelihood(_Name):
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
    GLM = "glm"
    NN = "nn"
    GP = "gp"


class LinkApprox(_Name):
    PROBIT = "probit"
    MC = "mc"
    BRIDGE = "bridge"
    BRIDGE_NORM = "bridge_norm"
    DELTA = "delta"
    QUADRATURE = "quadrature"
    EXACT = "exact"


class TuningMethod(_Name):
    MARGLIK = "marglik"
    GRIDSEARCH = "gridsearch"


class PriorStructure(_Name):
    SCALAR = "scalar"
    LAYERWISE = "layerwise"
    DIAG = "diag"


class FeatureReduction(_Name):
    PICK_FIRST = "pick_first"
    PICK_LAST = "pick_last"
    AVERAGE = "average"
