"""The methods of `uq_mnist`: LeNet on MNIST, passes over a part of the training data, multiplied."""

from __future__ import annotations

import copy
import warnings
from typing import Any

from benchmarks.harm.data import Folder
from benchmarks.harm.networks import lenet, train
from experiments.cost.timing import Priced, nbytes, priced, seconds
from experiments.uq.methods import POSTERIORS
from experiments.uq.shuffled import Shuffled
from experiments.uq_mnist.data import digits
from experiments.uq_mnist.networks import BATCH, lenet_with_dropout
from experiments.uq_mnist.training import CYCLES, KEPT, cyclical, online, variational
from torch import Tensor, nn

from laplace import Laplace
from laplace.rivals import SWAG, Ensemble, MCDropout, Mixture

MEMBERS, DRAWS, ITERATES = 5, 20, 20  # as in `uq_mnist`
EXAMPLES = 60_000  # of the whole training set
KINDS = {name: kind[:3] for name, kind in POSTERIORS.items()}  # structure, curvature, tuning
Labelled = tuple[Tensor, Tensor]


def lenet_costs(folder: Folder, epochs: int, quick: bool) -> dict:
    """Return the costs of all methods, and the CPU seconds of passes over the part and of tuning."""
    n, inputs, rounds = (256, 100, 1) if quick else (10_000, 2000, 2)
    found = digits(folder, n, inputs)
    data, network = found.train, lenet()
    _epoch(network, data)
    batches = list(zip(data[0].split(BATCH), data[1].split(BATCH), strict=True))
    las = {name: tuned(network, batches, found.validation, *kind) for name, kind in KINDS.items()}
    passes = {
        "epoch": lambda: _epoch(lenet(), data),
        "dropout": lambda: _epoch(lenet_with_dropout(), data),
        "SWAG": lambda: _swag(network, data, ITERATES),
        "VB": lambda: variational(network, data, 1, 0, 1),
        "IVON": lambda: online(data, 1, 0, 1),
        "CSGHMC": lambda: cyclical(data, 1, 0),  # all cycles, of one epoch each
    }
    for name, (structure, curvature, _) in KINDS.items():
        own = {"hessian_structure": structure, "curvature": curvature}
        passes[f"fit {name}"] = lambda own=own: Laplace(network, "classification", **own).fit(batches)
    once = {}
    for name, (_, _, how) in KINDS.items():
        la = las[name]
        once[f"tune {name}"] = lambda la=la, how=how: tune(copy.copy(la), batches, found.validation, how)
    once["temperature"] = lambda: Ensemble([network], "classification").calibrate(found.validation)
    spent = seconds(passes | once, rounds)
    whole = {name: each * (EXAMPLES / n if name in passes else 1) for name, each in spent.items()}
    return {
        "methods": priced(_sources(network, data, batches, las, whole, epochs), network, found.test[0]),
        "seconds": {name: round(each, 3) for name, each in spent.items()},
        "examples": n,
    }


def tuned(
    network: nn.Module, batches: Any, validation: Labelled, structure: str, curvature: str, tuning: str
) -> Laplace:
    """Return a fitted and tuned posterior of the last layer."""
    la = Laplace(network, "classification", "last_layer", structure, curvature=curvature).fit(batches)
    return tune(la, batches, validation, tuning)


def tune(la: Laplace, batches: Any, validation: Labelled, tuning: str) -> Laplace:
    """Tune a fitted posterior, and return it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if tuning == "calibrate":
            la.calibrate(validation)
        else:
            la.tune("prior_precision", method=tuning, train_loader=batches)
    return la


def _sources(
    network: nn.Module, data: Labelled, batches: Any, las: dict[str, Laplace], spent: dict[str, float], epochs: int
) -> dict[str, Priced]:
    """Return every method with its training time and its bytes; `spent` is in CPU seconds on all of the data."""
    one, alone = nbytes(network.state_dict()), epochs * spent["epoch"]
    members = [lenet().eval() for _ in range(MEMBERS)]
    kept = {name: one + nbytes(la.state_dict()) for name, la in las.items()}
    ensemble = Ensemble(members, "classification")
    mixture = Mixture([Laplace(member, "classification").fit(batches) for member in members])
    swag = _swag(network, data, min(3, ITERATES)).draw()
    deviations = ITERATES * nbytes(swag.deviations) // len(swag.deviations)
    drawn, sampled = ([lenet().eval() for _ in range(count)] for count in (DRAWS, CYCLES * KEPT))
    more = {name: 1 + (spent[f"fit {name}"] + spent[f"tune {name}"]) / alone for name in KINDS}
    more |= {name: 1 + spent[name] / alone for name in ("temperature", "SWAG")}
    return {
        "MAP": Priced(Ensemble([network], "classification"), 1.0, one),
        "temperature": Priced(Ensemble([network], "classification"), more["temperature"], one),
        **{name: Priced(la, more[name], kept[name], POSTERIORS[name][3]) for name, la in las.items()},
        "DE-5": Priced(ensemble, float(MEMBERS), MEMBERS * one),
        "mixture of LA": Priced(mixture, MEMBERS * more["LA"], MEMBERS * kept["LA"]),
        "MC dropout": Priced(
            MCDropout(lenet_with_dropout(), "classification", DRAWS), epochs * spent["dropout"] / alone, one
        ),
        "SWAG": Priced(swag, more["SWAG"], one + nbytes([swag.mean, swag.variance]) + deviations),
        "VB": Priced(Ensemble(drawn, "classification"), 1 + epochs * spent["VB"] / alone, 2 * one),
        "IVON": Priced(Ensemble(drawn, "classification"), epochs * spent["IVON"] / alone, 2 * one),
        "CSGHMC": Priced(Ensemble(sampled, "classification"), epochs * spent["CSGHMC"] / alone, len(sampled) * one),
    }


def _epoch(network: nn.Module, data: Labelled) -> None:
    train(network, *data, steps=len(data[0]) // BATCH, seed=0, batch=BATCH)


def _swag(network: nn.Module, data: Labelled, iterates: int) -> SWAG:
    """Run SWAG with a quarter of an epoch between iterates."""
    swag = SWAG(network, "classification", rank=ITERATES, n_samples=DRAWS)
    return swag.run(Shuffled(data, len(data[0]) // 4, 0, BATCH), iterates, lr=1e-3)
