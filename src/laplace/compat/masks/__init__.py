"""Select subnetworks: `.select(train_loader)` returns the indices that `subnetwork_indices` takes."""

from laplace.compat.masks.base import ScoreBasedSubnetMask, SubnetMask
from laplace.compat.masks.magnitude import LargestMagnitudeSubnetMask
from laplace.compat.masks.names import LastLayerSubnetMask, ModuleNameSubnetMask, ParamNameSubnetMask
from laplace.compat.masks.random import RandomSubnetMask
from laplace.compat.masks.swag import LargestVarianceSWAGSubnetMask
from laplace.compat.masks.variance import LargestVarianceDiagLaplaceSubnetMask

__all__ = [
    "LargestMagnitudeSubnetMask",
    "LargestVarianceDiagLaplaceSubnetMask",
    "LargestVarianceSWAGSubnetMask",
    "LastLayerSubnetMask",
    "ModuleNameSubnetMask",
    "ParamNameSubnetMask",
    "RandomSubnetMask",
    "ScoreBasedSubnetMask",
    "SubnetMask",
]
