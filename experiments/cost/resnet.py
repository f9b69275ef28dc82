"""The methods of `uq_cifar10`: ResNet-20 on CIFAR-10, measured on a part of the images and multiplied."""

from __future__ import annotations

import copy
import warnings

from benchmarks.harm.data import Folder
from benchmarks.harm.networks import ResNet, train, trained_resnet
from experiments.cost.lenet import KINDS, tuned
from experiments.cost.timing import Priced, nbytes, priced, seconds
from experiments.uq.methods import POSTERIORS
from experiments.uq.shuffled import Shuffled
from experiments.uq_cifar10.features import images, labels
from experiments.uq_cifar10.whole import BATCH, LAYERS, Sizes
from torch import Tensor

from laplace import Laplace
from laplace.rivals import SWAG, Ensemble, Mixture

EPOCHS, EXAMPLES, MEMBERS = 200, 50_000, 4  # of the published training; networks of the ensemble
Labelled = tuple[Tensor, Tensor]


def resnet_costs(folder: Folder, quick: bool) -> dict:
    """Return the costs of all methods, and the CPU seconds on the part of the images."""
    n, inputs, rounds = (100, 50, 1) if quick else (1000, 200, 2)
    network = trained_resnet(LAYERS, folder.model(f"cifar10_resnet{LAYERS}"))
    y = labels(folder)
    data, held_out = (images(folder, "train", n), y["train"][:n]), (images(folder, "test", n), y["test"][:n])
    batches = list(zip(data[0].split(BATCH), data[1].split(BATCH), strict=True))
    las = {name: tuned(network, batches, held_out, *kind) for name, kind in KINDS.items()}
    whole = _all_weights(network, batches)
    spent = seconds(
        {
            "epoch": lambda: train(copy.deepcopy(network), *data, steps=n // BATCH, seed=0, batch=BATCH),
            "last layer": lambda: Laplace(network, "classification").fit(batches),
            "last layer, full": lambda: Laplace(
                network, "classification", hessian_structure="full", curvature="ef"
            ).fit(batches),
            "all weights": lambda: _all_weights(network, batches),
            "tune": lambda: copy.copy(las["LA"]).tune(method="auto", train_loader=batches),
            "tune all weights": lambda: copy.copy(whole).tune(method="auto", train_loader=batches),
            "calibrate": lambda: copy.copy(las["LA"]).calibrate(held_out),
            "temperature": lambda: Ensemble([network], "classification").calibrate(held_out),
            "SWAG": lambda: _swag(network, data),
            "renew": lambda: _swag(network, data).draw(batches),  # two draws
        },
        rounds,
    )
    sources = _sources(network, data, batches, las, whole, spent, EXAMPLES / n)
    methods = priced(sources, network, images(folder, "test", inputs), rounds)
    return {"methods": methods, "seconds": {name: round(each, 3) for name, each in spent.items()}, "examples": n}


def _sources(
    network: ResNet,
    data: Labelled,
    batches: list[Labelled],
    las: dict[str, Laplace],
    whole: Laplace,
    spent: dict[str, float],
    times: float,
) -> dict[str, Priced]:
    """Return every method with its training time and its bytes; passes over the data are multiplied by `times`."""
    one, alone, n, sizes = nbytes(network.state_dict()), EPOCHS * times * spent["epoch"], len(data[0]), Sizes()
    head, full = times * spent["last layer"], times * spent["last layer, full"]
    extra = {"LA": head + spent["tune"], "LA calibrated": head + spent["calibrate"]}
    extra |= {"LA paper": head + spent["tune"], "LA* paper": full + spent["tune"]}
    walked = sizes.iterates * sizes.between / (2 * n) * spent["SWAG"]  # two iterates, each after n images
    renewed = sizes.draws / 2 * sizes.renewed / n * max(0.0, spent["renew"] - spent["SWAG"])
    swag = _swag(network, data).draw(batches)
    deviations = sizes.iterates * nbytes(swag.deviations) // len(swag.deviations)
    drawn = SWAG(network, "classification", 2, sizes.draws).run(batches, 2, lr=0.01).draw(batches)
    members = [copy.deepcopy(network) for _ in range(MEMBERS)]
    mixture = Mixture([Laplace(m, "classification").fit(batches) for m in members])
    kept = {name: one + nbytes(la.state_dict()) for name, la in las.items()}
    return {
        "MAP": Priced(Ensemble([network], "classification"), 1.0, one),
        "temperature": Priced(Ensemble([network], "classification"), 1 + spent["temperature"] / alone, one),
        **{name: Priced(la, 1 + extra[name] / alone, kept[name], POSTERIORS[name][3]) for name, la in las.items()},
        "LA all weights": Priced(
            whole,
            1 + (times * spent["all weights"] + spent["tune all weights"]) / alone,
            one + nbytes(whole.state_dict()),
        ),
        "SWAG": Priced(drawn, 1 + (walked + renewed) / alone, one + nbytes([swag.mean, swag.variance]) + deviations),
        "ensemble of 4": Priced(Ensemble(members, "classification"), float(MEMBERS), MEMBERS * one),
        "mixture of 4 LA": Priced(mixture, MEMBERS * (1 + extra["LA"] / alone), MEMBERS * kept["LA"]),
    }


def _all_weights(network: ResNet, batches: list[Labelled]) -> Laplace:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # BatchNorm has no Kronecker form
        return Laplace(network, "classification", "all", "kron", curvature="sketch").fit(batches)


def _swag(network: ResNet, data: Labelled) -> SWAG:
    """Run SWAG for two iterates, each after all of the images, for two draws."""
    return SWAG(network, "classification", 2, 2).run(Shuffled(data, len(data[0]), 0, BATCH), 2, lr=0.01)
