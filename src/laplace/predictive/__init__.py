"""From the distribution of the outputs f, through a link, to p(y)."""

from laplace.predictive.links import Link
from laplace.predictive.mixtures import OutputMixture, joined
from laplace.predictive.outputs import OutputGaussian, OutputSamples
from laplace.predictive.prediction import Prediction
from laplace.predictive.response import Latent, Response

__all__ = ["Latent", "Link", "OutputGaussian", "OutputMixture", "OutputSamples", "Prediction", "Response", "joined"]


def __dir__() -> list[str]:
    return __all__
