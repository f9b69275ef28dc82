"""Read the options of a Laplace approximation under their own names, from the parts that were made of them."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor, nn

from laplace.checks import flag
from laplace.curvature import CURVATURES, Estimator
from laplace.inference.runner import Runner
from laplace.inference.source import Frame
from laplace.inference.values import Holder
from laplace.likelihoods import Likelihood
from laplace.structures import Structure
from laplace.weights import Subnetwork


class Runs(Protocol):
    """Has a network, and the options of its Laplace approximation."""

    @property
    def runner(self) -> Runner: ...


def model(la: Runs) -> nn.Module:
    """Return the network, as given."""
    return la.runner.model


def likelihood(la: Runs) -> Likelihood:
    """Return the likelihood, as an object."""
    return la.runner.spec.likelihood


def structure(la: Runs) -> Structure:
    """Return the structure, as an object."""
    return la.runner.spec.structure


def curvature(la: Holder) -> Estimator | str | None:
    """Return the curvature, by name; an estimator of your own as it is. None until `fit` chooses, if you did not."""
    asked, fit = la.runner.spec.curvature, la.values.fit
    if asked is not None and CURVATURES.get(asked.name) is not type(asked):
        return asked
    return fit.kind if fit is not None else None if asked is None else asked.name


def curvature_samples(la: Runs) -> int:
    """Return how many vectors per example an estimated curvature draws."""
    return la.runner.spec.estimator.vectors


def subnetwork_indices(la: Runs) -> Tensor | None:
    """Return the indices of 'subnetwork' into all trainable weights, ascending. None for other subsets."""
    subset = la.runner.spec.weights
    return subset.indices.clone() if isinstance(subset, Subnetwork) else None


def class_dim(la: Runs) -> int | None:
    """Return which dimension of the outputs has the classes."""
    return la.runner.spec.class_dim


def dict_key_x(la: Runs) -> str:
    """Return the key of the main input in batches that are mappings."""
    return la.runner.spec.keys.x


def dict_key_y(la: Runs) -> str:
    """Return the key of the labels in batches that are mappings."""
    return la.runner.spec.keys.y


def enable_backprop(la: Runs) -> bool:
    """Return whether gradients flow from predictions to the inputs; may be set."""
    return la.runner.enable_backprop


def set_enable_backprop(la: Runs, value: bool) -> None:
    """Say whether gradients flow from predictions to the inputs."""
    la.runner.enable_backprop = flag(value, "enable_backprop")


def frame(la: Runs) -> Frame:
    """Return how inputs are read, for predictions."""
    spec, values = la.runner.spec, getattr(la, "values", None)
    fit = None if values is None else values.fit
    spread = fit is not None and fit.owners is not None
    doubt = None
    if values is not None and fit is not None and type(fit.likelihood) is type(spec.likelihood):
        doubt = spec.likelihood.doubt_of_noise(fit.data, values.sigma)  # compat lets scripts set another one
    functional = spec.structure.functional
    return Frame(spec.keys, spec.class_dim, spec.budget, la.runner.enable_backprop, functional, spread, doubt)


def warn_once(la: Runs, key: str, message: str) -> None:
    """Warn of something the first time that it happens.

    Args:
        key: what it is called; a second warning under the same key is left out.
        message: what is said.
    """
    la.runner.warn_once(key, message)
