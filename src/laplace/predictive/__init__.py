"""From a Gaussian over weights to one over outputs, and through the link to p(y)."""

from laplace.predictive.outputs import OutputGaussian, OutputSamples, joined
from laplace.predictive.prediction import Prediction

__all__ = ["OutputGaussian", "OutputSamples", "Prediction", "joined"]
