"""Read each loader once: run all methods on every batch, and keep what they answered.

The network itself, and its rescaled self, are read off the outputs of the posterior, whose mean is the network's.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from laplace.errors import InputError, within
from laplace.evaluation.report.answers import Answers, answers, network_alone
from laplace.evaluation.report.identity import Identity
from laplace.evaluation.report.shelves import Shelves
from laplace.inference.predict import predict
from laplace.inference.runner import Runner
from laplace.inference.source import Frame, Source
from laplace.inference.targets import checked, labelled_rows
from laplace.likelihoods import Likelihood
from laplace.network.arrays import as_tensors, is_array
from laplace.network.batches import Batch, device_of, prediction_batches
from laplace.network.loaders import BATCH_SIZE, ArrayBatches, held_out_batches, is_pair, training_data
from laplace.posterior.posterior import Posterior
from laplace.predictive.positions import Positions
from laplace.predictive.prediction import Prediction
from laplace.predictive.reshape import PredictionAtPositions

NETWORK: Final = "network"
SCALED: Final = "scaled network"
LAPLACE: Final = "Laplace"
_TIMED = 3  # batches on which the network alone is timed
_WIDEST = math.log(1000)  # of the search for a scale, on each side of the present one


class Reported(Source, Protocol):
    """Defines a fitted posterior with its network, as `Laplace` is."""

    @property
    def posterior(self) -> Posterior: ...

    @property
    def runner(self) -> Runner: ...

    @property
    def training_data(self) -> Iterable[Any] | None: ...


@dataclass(frozen=True)
class Scale:
    """Holds the scale of the network's outputs that was found on validation data.

    Attributes:
        name: 'softmax_temperature' or 'sigma_noise'.
        value: The best one.
        examples: How many validation examples there were.
        identity: Size and digest of the validation data.
    """

    name: str
    value: float
    examples: int
    identity: Identity


@dataclass
class Reading:
    """Holds the predictions of all methods on one data set.

    Attributes:
        answers: By method.
        examples: The number of the example of each row, (N,).
        shelves: The examples that are shown.
        identity: Size and digest of the data.
        seconds: CPU seconds of all predictions, by method; of the network alone, per example and on a few batches.
    """

    answers: dict[str, Answers]
    examples: NDArray[np.int64]
    shelves: Shelves
    identity: Identity
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def n(self) -> int:
        """Return the number of examples."""
        return int(self.examples.max()) + 1

    @property
    def kind(self) -> str:
        """Return what y is."""
        return self.answers[LAPLACE].kind


@dataclass
class Reader:
    """Runs all methods over a loader.

    Attributes:
        la: The posterior.
        others: Further sources by name.
        scale: What the network is rescaled by; None without validation data.
        seed: Of the draws that predictions of classes take.
        progress_bar: Whether one is shown.
    """

    la: Reported
    others: Mapping[str, Source]
    scale: Scale | None
    seed: int
    progress_bar: bool | None

    def read(self, loader: Any, what: str, shelves: Shelves, labelled: bool = True) -> Reading:
        """Return the answers of all methods. Raises InputError if there is no example.

        Args:
            loader: Batches (x, y); without labels, batches x as well.
            what: Names the data in messages.
            shelves: Keeps the examples that are shown.
            labelled: Whether the labels are read.
        """
        parts: dict[str, list[Answers]] = {}
        numbers: list[NDArray[np.int64]] = []
        identity, seconds, start = Identity(), dict[str, float](), 0
        timed = [0, 0.0]
        for batch in self._batches(loader, what, labelled):
            with within(f"{what} batch {batch.index}"):
                found, rows, n = self._answered(batch, labelled, seconds)
            for name, part in found.items():
                parts.setdefault(name, []).append(part)
            numbers.append(start + rows)
            identity.add(batch.inputs, batch.y if labelled else None, n)
            if len(rows) == n:  # examples at positions are not shown
                shelves.add(found[LAPLACE], batch.inputs, start)
            start += n
            if batch.index < _TIMED:
                before = time.process_time()
                self.la.runner.outputs(batch.inputs)
                timed = [timed[0] + n, timed[1] + time.process_time() - before]
        if not start or not sum(map(len, numbers)):
            raise InputError(f"{what} has no example: the loader is empty, or no label in it counts.")
        seconds[NETWORK] = timed[1] / max(1, timed[0])
        joined = {name: Answers.cat(each) for name, each in parts.items()}
        return Reading(joined, np.concatenate(numbers), shelves, identity, seconds)

    def _batches(self, loader: Any, what: str, labelled: bool) -> Iterator[Batch]:
        if labelled:
            yield from self.la.runner.batches(batches_of(loader), self.progress_bar, what)
            return
        keys, none, runner = self.la.frame.keys, torch.empty(0), self.la.runner
        loader = batches_of(loader)
        if isinstance(loader, Tensor) or is_array(loader):  # inputs without labels, all in one
            loader = [(part,) for part in torch.as_tensor(as_tensors(loader)).split(BATCH_SIZE)]
        for index, (_, inputs) in enumerate(prediction_batches(loader, keys, {}, self.progress_bar, what)):
            inputs = inputs.as_tensors(runner.model).to(device_of(runner.model))
            yield Batch(index, runner.told_apart(inputs), none)

    def _answered(
        self, batch: Batch, labelled: bool, seconds: dict[str, float]
    ) -> tuple[dict[str, Answers], NDArray[np.int64], int]:
        """Return the answers of all methods, the example of each row within the batch, and the number of examples."""
        found: dict[str, Answers] = {}
        examples, n = np.zeros(0, np.int64), 0
        for name, source in {LAPLACE: self.la, **self.others}.items():
            before = time.process_time()
            generator = torch.Generator(_device(source)).manual_seed(self.seed)
            with torch.no_grad():
                prediction, at = _rows(predict(source, batch.inputs.x, generator=generator), source.frame)
            seconds[name] = seconds.get(name, 0.0) + time.process_time() - before
            labels, kept = (None, None) if not labelled else _labels(prediction, at, batch, source.likelihood)
            if kept is not None:
                prediction = prediction[kept]
            rng = np.random.default_rng([self.seed, batch.index])
            found[name] = answers(prediction, source.likelihood, source.noise_level, labels, rng)
            if name == LAPLACE:
                n, each = at.n, np.repeat(np.arange(at.n), at.count)
                examples = each if kept is None else each[kept.cpu().numpy()]
                found |= self._network(prediction, labels, batch.index)
        return {name: found[name] for name in (NETWORK, SCALED, LAPLACE, *self.others) if name in found}, examples, n

    def _network(self, prediction: Prediction, labels: Tensor | None, index: int) -> dict[str, Answers]:
        """Return the answers of the network itself, from the mean of the posterior's outputs."""
        la, likelihood = self.la, self.la.likelihood
        f = prediction.outputs.mean.double() * la.softmax_temperature
        sigma = la.noise_level.double()
        ways = {NETWORK: (1.0, sigma)}
        if self.scale is not None:
            noise = self.scale.name == "sigma_noise"
            ways[SCALED] = (1.0, sigma.new_tensor(self.scale.value)) if noise else (self.scale.value, sigma)
        return {
            name: answers(
                network_alone(likelihood, f / t, s), likelihood, s, labels, np.random.default_rng([self.seed, index])
            )
            for name, (t, s) in ways.items()
        }


def batches_of(data: Any) -> Any:
    """Return the batches of held-out data: of a loader, a DataModule, a trainer, a dataset, or whole arrays (x, y)."""
    return ArrayBatches(*data) if is_pair(data) else held_out_batches(data)


def training_batches_of(data: Any) -> Any:
    """Return the batches of training data, of the same."""
    return ArrayBatches(*data) if is_pair(data) else training_data(data, True, None, None)[0]


def first_of(loader: Iterable[Any], most: int, key: str) -> Iterator[Any]:
    """Yield batches as they are, until about `most` examples are read. `key` is that of the labels in mappings."""
    seen = 0
    for batch in loader:
        yield batch
        labels = batch[key] if isinstance(batch, Mapping) else batch[1]
        seen += len(labels) if hasattr(labels, "__len__") else 1
        if seen >= most:
            return


def found_scale(la: Reported, loader: Any, progress_bar: bool | None) -> Scale | str:
    """Return the scale that makes the network itself best on validation data, or why there is none.

    The softmax temperature of logits, or the noise of a regression: the one with the lowest mean negative
    log-likelihood. The network runs once.
    """
    likelihood, runner = la.likelihood, la.runner
    if not likelihood.has_logits and not likelihood.has_noise:
        return f"{likelihood.name} has neither logits nor a noise to rescale."
    outputs, labels, identity = list[Tensor](), list[Tensor](), Identity()
    for batch in runner.batches(batches_of(loader), progress_bar, "validation"):
        with within(f"validation batch {batch.index}"), torch.no_grad():
            whole = runner.outputs(batch.inputs)
            at = Positions.of(whole, runner.spec.class_dim)
            rows, kept = labelled_rows(at, batch, likelihood, whole.device)
            f = at.rows(whole) if kept is None else at.rows(whole)[kept]
            outputs.append(f.double())
            labels.append(checked(f, rows, likelihood).y)
        identity.add(batch.inputs, batch.y, at.n)
    if not sum(map(len, outputs)):
        return "the validation loader has no example."
    f, y = torch.cat(outputs), torch.cat(labels)
    noise = la.noise_level.double()

    def loss(log_scale: float) -> float:
        scale = math.exp(log_scale)
        t, sigma = (scale, noise) if likelihood.has_logits else (1.0, noise * scale)
        out = network_alone(likelihood, f / t, sigma)
        p = out.mean if likelihood.response.links else None
        return -float(likelihood.log_predictive(out.outputs, p, y, sigma).mean())

    best = math.exp(_lowest(loss))
    name = "softmax_temperature" if likelihood.has_logits else "sigma_noise"
    return Scale(name, best if likelihood.has_logits else best * float(noise), identity.n, identity)


def _lowest(loss: Any) -> float:
    """Return where a loss is lowest: a grid, then golden sections around its best point."""
    grid = np.linspace(-_WIDEST, _WIDEST, 41)
    at = int(np.argmin([loss(float(x)) for x in grid]))
    low, high = float(grid[max(at - 1, 0)]), float(grid[min(at + 1, len(grid) - 1)])
    ratio = (math.sqrt(5) - 1) / 2
    for _ in range(24):
        a, b = high - ratio * (high - low), low + ratio * (high - low)
        low, high = (low, b) if loss(a) < loss(b) else (a, high)
    return (low + high) / 2


def _rows(found: Prediction | PredictionAtPositions, frame: Frame) -> tuple[Prediction, Positions]:
    if isinstance(found, PredictionAtPositions):
        return found.rows, found.positions
    return found, Positions(len(found), (), found.mean.shape[1], -1 if frame.class_dim is None else frame.class_dim)


def _labels(
    prediction: Prediction, at: Positions, batch: Batch, likelihood: Likelihood
) -> tuple[Tensor, Tensor | None]:
    """Return the checked labels of the rows that count, and which rows these are; None means all."""
    f = prediction.outputs.mean
    rows, kept = labelled_rows(at, batch, likelihood, f.device)
    if len(rows.y) != (len(f) if kept is None else len(kept)):
        raise InputError(f"{len(rows.y)} labels for {len(f)} inputs.")
    targets = checked(f if kept is None else f[kept], rows, likelihood)
    if targets.weights is None or bool((targets.weights > 0).all()):
        return targets.y, kept
    counts = (targets.weights > 0).nonzero().flatten()
    return targets.y[counts], counts if kept is None else kept[counts]


def _device(source: Source) -> torch.device:
    return source.noise_level.device
