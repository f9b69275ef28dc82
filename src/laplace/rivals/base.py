"""Define what all rivals share: they are sources of outputs, predict as `Laplace` does, and can be rescaled."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from laplace.budget import Budget
from laplace.checks import one_positive, positive
from laplace.errors import OptionError, warn
from laplace.inference import drawing
from laplace.inference import predict as predicting
from laplace.inference.source import Answer, Frame, Part
from laplace.likelihoods import Likelihood, likelihood_named
from laplace.network.batches import device_of
from laplace.network.inputs import Inputs, Keys
from laplace.network.replica import require_values
from laplace.predictive.positions import class_dim_of
from laplace.predictive.queries import Query
from laplace.rivals.rescaling import Rescaled as Rescaled
from laplace.rivals.rescaling import rescale

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclass(frozen=True)
class Options:
    """Holds the likelihood and how inputs are read; the same for all rivals."""

    likelihood: Likelihood
    frame: Frame

    @classmethod
    def of(
        cls, likelihood: Likelihood | str, dict_key_x: str, dict_key_y: str, class_dim: int | None, budget: int | None
    ) -> Options:
        """Check the options."""
        found = likelihood_named(likelihood)
        keys = Keys(dict_key_x, dict_key_y, found.further, found.pairs)
        return cls(found, Frame(keys, class_dim_of(class_dim), Budget(budget)))


def network_of(model: Any) -> nn.Module:
    """Return a network that a rival can run. Refuse what is none, and one without values.

    Raises:
        OptionError: it is no `torch.nn.Module`.
        ModelError: its tensors have no values.
    """
    if not isinstance(model, nn.Module):
        instead = " Write model=la.model." if isinstance(getattr(model, "model", None), nn.Module) else ""
        raise OptionError(f"model is a {type(model).__name__}; a torch.nn.Module is needed.{instead}")
    require_values(model)
    return model


class Rival(ABC):
    """Predicts as `Laplace` does, from any source of outputs. Base of `Ensemble`, `Mixture`, `MCDropout` and `SWAG`.

    Args:
        options: what the outputs mean, and how inputs are read.
        sigma_noise: the standard deviation of the observation noise of a regression.
        softmax_temperature: T, by which all logits are divided.
    """

    def __init__(self, options: Options, sigma_noise: float | Tensor, softmax_temperature: float) -> None:
        self._frame, self._likelihood = options.frame, options.likelihood
        self._noise_level, self._warned = torch.ones(()), set[str]()
        self._softmax_temperature = 1.0
        self.sigma_noise = sigma_noise
        self.softmax_temperature = softmax_temperature

    @property
    @abstractmethod
    def model(self) -> nn.Module:
        """Return the network, or the first of them."""

    @property
    @abstractmethod
    def n_outputs(self) -> int | None:
        """Return the number of outputs, C. None before the first run."""

    @abstractmethod
    def outputs(self, inputs: Inputs, need: Query, answer: Answer | None = None) -> Iterator[Part]:
        """Yield the distribution of the outputs at consecutive parts of the inputs.

        Args:
            inputs: what the networks are called with.
            need: how much of the distribution is asked for.
            answer: counts what the caller keeps, which is refused before it would not fit into memory.
        """

    @property
    def likelihood(self) -> Likelihood:
        """Return the likelihood, as an object."""
        return self._likelihood

    @property
    def frame(self) -> Frame:
        """Return how inputs are read, for predictions."""
        return self._frame

    @property
    def noise_level(self) -> Tensor:  # ()
        """Return the level of the observation noise. It is 1 if there is none."""
        return self._noise_level.to(device_of(self.model))

    @property
    def sigma_noise(self) -> Tensor:
        """Return the standard deviation of the observation noise of a regression; may be set."""
        return self.likelihood.noise_at(self.noise_level)

    @sigma_noise.setter
    def sigma_noise(self, value: float | Tensor) -> None:
        sigma = positive(value, "sigma_noise").detach().double()
        self._likelihood, self._noise_level = self._likelihood.with_noise(sigma)

    @property
    def softmax_temperature(self) -> float:
        """Return T of p(y given f / T), by which predictions divide the logits; may be set."""
        return self._softmax_temperature

    @softmax_temperature.setter
    def softmax_temperature(self, value: float) -> None:
        value = one_positive(value, "softmax_temperature")
        self.likelihood.check_softmax_temperature(value)
        self._softmax_temperature = value

    def calibrate(self, val_loader: Any, link_approx: str | None = None) -> Rescaled:
        """Set the softmax temperature (in regression: the noise) that is best on held-out data.

        For one network this is temperature scaling (Guo et al. 2017). For several networks, all logits are divided by
        the same number before the probabilities are averaged.

        Args:
            val_loader: data that the networks were not trained on: batches, or a pair of arrays `(x, y)`.
            link_approx: for members with posteriors, one of `likelihood.links`. By default that of `predict`.

        Returns:
            What was set, and the negative log-likelihood before and after.

        Raises:
            UnsupportedError: the likelihood has neither logits nor noise.
            InputError: the loader holds no example, or labels that do not fit.
        """
        found = rescale(self, val_loader, link_approx)
        if found.sigma_noise is None:
            self.softmax_temperature = found.softmax_temperature
        else:
            self.sigma_noise = found.sigma_noise
        return found

    def warn_once(self, key: str, message: str) -> None:
        """Warn of something the first time that it happens.

        Args:
            key: what it is called; a second warning under the same key is left out.
            message: what is said.
        """
        if key not in self._warned:
            warn(message)
            self._warned.add(key)

    __call__ = predicting.call
    predict = predicting.predict
    functional_samples = drawing.functional_samples
    predictive_samples = drawing.predictive_samples
    preference = predicting.preference

    def __getstate__(self: Self) -> dict[str, Any]:
        return self.__dict__ | {"_warned": set()}
