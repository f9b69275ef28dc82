"""BoTorch: a Laplace posterior, or a mixture of them, as a model for its acquisition functions.

    model = LaplaceModel(la, input_transform=normalize, outcome_transform=standardize)
    candidate, value = optimize_acqf(qLogExpectedImprovement(model, best_f), bounds, q=1, ...)

Needs BoTorch: pip install 'laplace-redux[botorch]'.
"""

try:
    import botorch as _botorch  # noqa: F401
except ImportError as error:
    raise ImportError("laplace.integrations.botorch needs BoTorch: pip install 'laplace-redux[botorch]'") from error

from laplace.integrations.botorch.mixture import LaplaceMixtureModel
from laplace.integrations.botorch.model import LaplaceModel
from laplace.integrations.botorch.path import LaplacePath

__all__ = ["LaplaceMixtureModel", "LaplaceModel", "LaplacePath"]
