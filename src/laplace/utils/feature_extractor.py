"""Provide what laplace-torch has in this module. It is defined in `laplace.compat`."""

from laplace.compat.feature_extractor import (
    FeatureExtractor,
    FeatureReduction,
)

__all__ = [
    "FeatureExtractor",
    "FeatureReduction",
]
