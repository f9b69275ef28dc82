"""The posterior predictive as a plain module, for export, compilation and serving."""

from laplace.serving.module import PredictiveModule

__all__ = ["PredictiveModule"]
