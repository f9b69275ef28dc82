"""The methods that run a whole network for each prediction: a posterior of all weights, and SWAG from the trained ones.

They are too slow on one core for four networks and all images: the ResNet-20 on the first images of each set. The
methods of its last layer are scored on the same images beside them.
"""

from __future__ import annotations

import copy
import time
import warnings
from collections.abc import Container, Iterator
from dataclasses import dataclass

import torch
from benchmarks.harm.data import Folder
from benchmarks.harm.networks import ResNet, trained_resnet
from experiments.uq.cache import Cache
from experiments.uq.methods import POSTERIORS, Method, posteriors, rescaled, single
from experiments.uq.shuffled import Shuffled
from experiments.uq_cifar10.data import CORRUPTED, UNKNOWN, Images, chosen, read
from experiments.uq_cifar10.features import images, labels
from torch import Tensor

from laplace import Laplace
from laplace.rivals import SWAG

LAYERS = 20
BATCH = 100
WALKED = ("SWAG", "SWAG temperature")
TUNED = {"LA all weights evidence": "evidence", "LA all weights": "auto", "LA all weights calibrated": "calibrate"}
Labelled = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Sizes:
    """How many images are scored and trained on."""

    test: int = 800
    corrupted: int = 200  # of each severity
    outside: int = 300
    fitted: int = 10_000  # training images that posteriors of all weights are fitted to
    validation: int = 500  # for posteriors of all weights and for SWAG
    iterates: int = 20  # of SWAG
    between: int = 1250  # images between two of them
    renewed: int = 1000  # images for the statistics of BatchNorm
    draws: int = 20

    @property
    def part(self) -> tuple[int, int, int]:
        """Return how many images of each kind are scored."""
        return self.test, self.corrupted, self.outside


QUICK = Sizes(test=20, corrupted=10, outside=10, fitted=100, validation=20, iterates=3, between=40, renewed=40, draws=2)


@dataclass(frozen=True)
class Pixels:
    """The same images as `Images` has features of."""

    network: ResNet
    train: Labelled
    validation: Labelled
    labelled: dict[str, Labelled]
    outside: dict[str, Tensor]


def methods(
    folder: Folder, cache: Cache, sizes: Sizes, n: int | None, done: Container[str]
) -> Iterator[tuple[Method, Images | Pixels]]:
    """Yield the methods of the last layer, then those of all weights that are not done, with what they read."""
    if not all(name in done for name in ("MAP", "temperature", *POSTERIORS)):
        seen = read(folder, cache, n, (LAYERS,), sizes.part)
        yield single(seen.networks[0]), seen
        yield rescaled("temperature", seen.networks, seen.validation), seen
        for method in posteriors(seen.networks[0], seen.train, seen.validation):
            yield method, seen
    pixels = _pixels(folder, sizes, n)
    for method in (*_all_weights(pixels, sizes, done), *_swag(pixels, sizes, done)):
        yield method, pixels


def _swag(pixels: Pixels, sizes: Sizes, done: Container[str]) -> Iterator[Method]:
    """Yield SWAG from the trained weights, and the same with one temperature by validation images."""
    if all(name in done for name in WALKED):
        return
    start, swag = time.process_time(), SWAG(pixels.network, "classification", sizes.iterates, sizes.draws)
    swag.run(Shuffled(pixels.train, sizes.between, 0, BATCH), n_iterates=sizes.iterates, lr=0.01)
    swag.draw(list(Shuffled(pixels.train, sizes.renewed, 0, BATCH)))
    walked = time.process_time() - start
    yield Method("SWAG", swag, None, walked)
    start, scaled = time.process_time(), copy.copy(swag)
    found = scaled.calibrate(tuple(t[: sizes.validation] for t in pixels.validation))
    seconds = walked + time.process_time() - start
    yield Method("SWAG temperature", scaled, None, seconds, {"softmax_temperature": found.softmax_temperature})


def _all_weights(pixels: Pixels, sizes: Sizes, done: Container[str]) -> Iterator[Method]:
    """Yield posteriors of all weights that are not done: kron with the sketched GGN, one backward pass per batch."""
    if all(name in done for name in TUNED):
        return
    x, y = (t[: sizes.fitted] for t in pixels.train)
    batches, start = list(zip(x.split(BATCH), y.split(BATCH), strict=True)), time.process_time()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # BatchNorm has no Kronecker form: it is kept as dense blocks
        la = Laplace(pixels.network, "classification", "all", "kron", curvature="sketch")
        la.fit(batches, generator=torch.Generator().manual_seed(0))
        fitted = time.process_time() - start
        for name, how in TUNED.items():
            if name in done:
                continue
            own, start = copy.copy(la), time.process_time()
            if how == "calibrate":
                own.calibrate(tuple(t[: sizes.validation] for t in pixels.validation))
            else:
                own.tune("prior_precision", method=how, train_loader=batches)  # copies do not keep their data
            found = {"prior_precision": float(own.prior_precision.reshape(-1)[0])}
            found["softmax_temperature"] = own.softmax_temperature
            yield Method(name, own, None, fitted + time.process_time() - start, found)


def _pixels(folder: Folder, sizes: Sizes, n: int | None) -> Pixels:
    """Read the images themselves."""
    y = {name: values[:n] for name, values in labels(folder).items()}
    files = {name: images(folder, name, n) for name in ("test", *UNKNOWN)}
    index = chosen(folder, {name: len(x) for name, x in files.items()}, n).first(*sizes.part)
    labelled = {"c0": (files["test"][index.test], y["test"][index.test])}
    labelled |= {name: (images(folder, name, n)[index.corrupted], y["c"][index.corrupted]) for name in CORRUPTED}
    return Pixels(
        trained_resnet(LAYERS, folder.model(f"cifar10_resnet{LAYERS}")),
        (images(folder, "train", n), y["train"]),
        (files["test"][index.validation], y["test"][index.validation]),
        labelled,
        {name: files[name][index.outside[name]] for name in UNKNOWN},
    )
