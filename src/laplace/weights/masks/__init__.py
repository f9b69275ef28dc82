"""Selectors of subnetworks: `.select(train_loader)` gives the indices that `subnetwork_indices` takes."""

from laplace.weights.masks.base import ScoreMask, SubnetMask
from laplace.weights.masks.magnitude import LargestMagnitudeSubnetMask
from laplace.weights.masks.names import LastLayerSubnetMask, ModuleNameSubnetMask, ParamNameSubnetMask
from laplace.weights.masks.random import RandomSubnetMask
from laplace.weights.masks.swag import LargestVarianceSWAGSubnetMask
from laplace.weights.masks.variance import LargestVarianceDiagLaplaceSubnetMask

__all__ = [
    "LargestMagnitudeSubnetMask",
    "LargestVarianceDiagLaplaceSubnetMask",
    "LargestVarianceSWAGSubnetMask",
    "LastLayerSubnetMask",
    "ModuleNameSubnetMask",
    "ParamNameSubnetMask",
    "RandomSubnetMask",
    "ScoreMask",
    "SubnetMask",
]
