"""The methods that need no training beyond the network's: posteriors of the last layer, and one temperature."""

from __future__ import annotations

import copy
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from laplace import Laplace
from laplace.predictive import Prediction
from laplace.rivals import Ensemble

BATCH = 1000
POSTERIORS = {  # structure, curvature, tuning, link
    "LA": ("kron", "ggn", "auto", None),  # the defaults of the library
    "LA calibrated": ("kron", "ggn", "calibrate", None),  # with validation data
    "LA paper": ("kron", "ggn", "evidence", "probit"),
    "LA* paper": ("full", "ef", "evidence", "probit"),
}


@dataclass(frozen=True)
class Method:
    """A source of predictions, and what it took beyond training.

    Attributes:
        name: What it is called.
        source: A `Laplace` or a rival.
        link: How its Gaussians become probabilities; the default of `predict` if None.
        seconds: CPU seconds of fitting and tuning.
        found: The hyperparameters that were tuned.
        training: CPU seconds of training the networks, where they were trained here.
    """

    name: str
    source: Any
    link: str | None = None
    seconds: float = 0.0
    found: dict[str, float] = field(default_factory=dict)
    training: float = 0.0

    def predict(self, x: Tensor) -> Prediction:
        """Return the prediction, the same in every call."""
        return self.source.predict(x, link_approx=self.link, generator=torch.Generator().manual_seed(0))

    def mean(self, x: Tensor) -> Tensor:  # (N, C)
        """Return the probabilities alone, which cost less than a whole prediction."""
        link = self.link or self.source.likelihood.default_link
        return self.source(x, link_approx=link, generator=torch.Generator().manual_seed(0))

    def named(self, name: str) -> Method:
        """Return the same under another name."""
        return replace(self, name=name)

    def after(self, seconds: float) -> Method:
        """Return the same with the CPU seconds that its networks were trained for."""
        return replace(self, training=seconds)


def single(network: nn.Module) -> Method:
    """Return the network as it is."""
    return Method("MAP", Ensemble([network], "classification"))


def rescaled(name: str, networks: list, validation: tuple[Tensor, Tensor]) -> Method:
    """Return networks with one temperature for all, by validation data."""
    start, ensemble = time.process_time(), Ensemble(networks, "classification")
    found = ensemble.calibrate(validation)
    seconds = time.process_time() - start
    return Method(name, ensemble, None, seconds, {"softmax_temperature": found.softmax_temperature})


def posteriors(network: nn.Module, train: tuple[Tensor, Tensor], validation: tuple[Tensor, Tensor]) -> Iterator[Method]:
    """Yield the posteriors of one network's last layer."""
    batches, fitted = list(zip(train[0].split(BATCH), train[1].split(BATCH), strict=True)), {}
    for name, (structure, curvature, tuning, link) in POSTERIORS.items():
        start, kind = time.process_time(), (structure, curvature)
        if kind not in fitted:
            la = Laplace(network, "classification", "last_layer", structure, curvature=curvature).fit(batches)
            fitted[kind] = la, time.process_time() - start
        la, seconds = copy.copy(fitted[kind][0]), fitted[kind][1]
        start = time.process_time()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the evidence warns that it may do harm: that is what is measured
            if tuning == "calibrate":
                la.calibrate(validation)
            else:
                la.tune("prior_precision", method=tuning, train_loader=batches)  # copies do not keep their data
        found = {"prior_precision": float(la.prior_precision.reshape(-1)[0])}
        found["softmax_temperature"] = la.softmax_temperature
        yield Method(name, la, link, seconds + time.process_time() - start, found)
