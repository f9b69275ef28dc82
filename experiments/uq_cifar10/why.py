"""Why the defaults stay behind temperature scaling on CIFAR-10: the ResNet-20 at every prior precision.

    python -m experiments.uq_cifar10.why --data DIR [--quick] [--cache DIR]

The last layer with kron and GGN, as the defaults have it. Written are the NLL of the network on its training and test
images, and for each prior precision the evidence and the NLL with three links: on training images, test images and the
mean over corrupted ones. The third link is probit of what softmax sees of the logits, their differences from their
mean: beside probit, it tells what the variance that all logits share does to the probabilities.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

from experiments.uq.methods import BATCH, Method, rescaled, single
from experiments.uq.report import markdown
from experiments.uq.scores import Predicts
from experiments.uq.start import Rows, started
from experiments.uq_cifar10.data import Images, read
from torch import Tensor

from laplace import Laplace
from laplace.evaluation import nll
from laplace.predictive import OutputGaussian, Prediction
from laplace.predictive.links import probit

PRECISIONS = (0.01, 0.1, 1.0, 10.0, 100.0)
LINKS = ("one_vs_rest", "probit")
TRAINING = 5000  # training images that are scored


@dataclass(frozen=True)
class Differences:
    """Predicts softmax of g_c / sqrt(1 + pi/8 var(g_c)) with g_c = f_c - mean of f: no class shares a variance."""

    la: Laplace

    def predict(self, x: Tensor) -> Prediction:
        """Return the prediction with the default link, which contains the distribution of g."""
        return self.la.predict(x)

    def mean(self, x: Tensor) -> Tensor:  # (N, C)
        """Return the probabilities."""
        outputs = self.predict(x).outputs
        if not isinstance(outputs, OutputGaussian) or outputs.contrasts is None:
            raise TypeError("The differences of the logits need a Gaussian with contrasts.")
        return probit(outputs.contrasts.mean, outputs.contrasts.variance)


def main(arguments: list[str] | None = None) -> None:
    """Run the study."""
    study = started("uq_cifar10", __doc__.splitlines()[0], arguments)
    n = 400 if study.quick else None
    rows = Rows(study.results.with_name(study.results.name.replace("uq-cifar10", "uq-cifar10-why")), {"images": n})
    images = read(study.folder, study.cache, n, (20,))
    network = images.networks[0]
    rows.get("MAP", lambda: measured(single(network), images))
    rows.get("temperature", lambda: measured(rescaled("", [network], images.validation), images))
    batches = list(zip(images.train[0].split(BATCH), images.train[1].split(BATCH), strict=True))
    fitted = Laplace(network, "classification").fit(batches)
    for precision in PRECISIONS:
        la = copy.copy(fitted)
        la.prior_precision = precision
        found = {"evidence": round(float(la.log_marginal_likelihood()), 1)}
        for link in LINKS:
            own = Method("", la, link)
            rows.get(f"{precision:g}, {link}", lambda own=own, found=found: measured(own, images) | found)
        name, own = f"{precision:g}, probit of differences", Differences(la)
        rows.get(name, lambda own=own, found=found: measured(own, images) | found)
    names = ["train", "test", "shifted", "evidence"]
    print(markdown(["", *names], [[k, *(str(row.get(n, "-")) for n in names)] for k, row in rows.rows.items()]))


def measured(method: Predicts, images: Images) -> dict:
    """Return the NLL on training images, test images and corrupted ones."""
    train = images.train[0][:TRAINING], images.train[1][:TRAINING]
    scores = {name: nll(_p(method, x), y) for name, (x, y) in ({"train": train} | images.labelled).items()}
    shifted = [value for name, value in scores.items() if name not in ("train", "c0")]
    found = {"train": scores["train"], "test": scores["c0"], "shifted": sum(shifted) / len(shifted)}
    return {key: round(value, 4) for key, value in found.items()}


def _p(method: Predicts, x: Tensor) -> Tensor:  # (N, C)
    p = method.mean(x).double()
    return p / p.sum(-1, keepdim=True)


if __name__ == "__main__":
    main()
