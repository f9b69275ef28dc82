"""From the distribution of the outputs f, through a link, to p(y)."""

from laplace.predictive.links import Link
from laplace.predictive.mixtures import OutputMixture
from laplace.predictive.outputs import OutputGaussian, OutputSamples
from laplace.predictive.prediction import Prediction
from laplace.predictive.response import Response

__all__ = ["Link", "OutputGaussian", "OutputMixture", "OutputSamples", "Prediction", "Response"]


def __dir__() -> list[str]:
    return __all__
