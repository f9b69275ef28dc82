"""From a Gaussian over weights to one over outputs, and through the link to p(y)."""

from laplace.predictive.outputs import OutputGaussian, OutputSamples, joined
from laplace.predictive.prediction import Prediction
from laplace.predictive.response import Latent, Response

__all__ = ["Latent", "OutputGaussian", "OutputSamples", "Prediction", "Response", "joined"]
