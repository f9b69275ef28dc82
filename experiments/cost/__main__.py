"""Training and prediction time relative to the network alone, and megabytes, of all methods of `uq_mnist`.

    python -m experiments.cost --data DIR [--quick] [--epochs E]

DIR holds mnist.npz, fashion_mnist.npz, kmnist.npz and femnist_digits.npz; bayesian-torch and posteriors are needed.
CPU seconds on one thread, the smallest of three runs, alternating. Training is measured on a part of the data, epoch
for epoch, and multiplied by the epochs that `uq_mnist` gives each method: E for a network, E more for variational
Bayes, 4 E for cyclical SGHMC, 2.5 more for SWAG.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable

import torch
from benchmarks.harm.networks import lenet, train
from experiments.uq.report import markdown
from experiments.uq.start import Rows, started
from experiments.uq_mnist.data import digits
from experiments.uq_mnist.networks import BATCH, lenet_with_dropout
from experiments.uq_mnist.training import CYCLES, KEPT, Shuffled, cyclical, variational
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from laplace import Laplace
from laplace.rivals import SWAG, Ensemble, MCDropout, Mixture

MEMBERS, DRAWS, ITERATES, REPEATS = 5, 10, 10, 3
Labelled = tuple[Tensor, Tensor]


def main(arguments: list[str] | None = None) -> None:
    """Run the study."""
    study = started("cost", __doc__.splitlines()[0], arguments)
    n, inputs = (256, 200) if study.quick else (6000, 2000)
    found = digits(study.folder, n, inputs)
    rows = Rows(study.results, {"examples": n, "inputs": inputs, "epochs": study.epochs})
    costs = rows.get("costs", lambda: measured(found.train, found.test[0], study.epochs))
    names = ["method", "training", "la(x)", "predict(x)", "megabytes"]
    lines = [[name, *(f"{v:.2f}" for v in row.values())] for name, row in costs.items()]
    print(markdown(names, lines))


def measured(data: Labelled, x: Tensor, epochs: int) -> dict:
    """Return training, probabilities, whole predictions (times those of the network alone) and megabytes."""
    network = lenet()
    _epoch(network, data)
    epoch = _seconds({"MAP": lambda: _epoch(lenet(), data), "dropout": lambda: _epoch(lenet_with_dropout(), data)})
    batches = list(zip(data[0].split(BATCH), data[1].split(BATCH), strict=True))
    las = {
        "LA": lambda: _tuned(Laplace(copy.deepcopy(network), "classification").fit(batches), "auto"),
        "LA paper": lambda: _tuned(Laplace(copy.deepcopy(network), "classification").fit(batches), "evidence"),
    }
    others = {"SWAG": lambda: _swag(network, data, 1), "VB": lambda: variational(network, data, 1, 0, 1)}
    once = _seconds({**las, **others, "CSGHMC": lambda: cyclical(data, 1, 0)})  # all cycles, of one epoch each
    alone = epochs * epoch["MAP"]
    training = {
        "MAP": 1.0,
        "LA": 1 + once["LA"] / alone,
        "LA paper": 1 + once["LA paper"] / alone,
        "DE-5": float(MEMBERS),
        "mixture of LA": MEMBERS * (1 + once["LA"] / alone),
        "MC dropout": epochs * epoch["dropout"] / alone,
        "SWAG": 1 + ITERATES / 4 * once["SWAG"] / alone,
        "VB": 1 + epochs * once["VB"] / alone,
        "CSGHMC": epochs * once["CSGHMC"] / alone,
    }
    sources = _sources(network, data, batches)
    mean = _seconds({name: lambda s=s, link=link: s(x, link_approx=link) for name, (s, link, _) in sources.items()})
    whole = _seconds({name: lambda s=s, k=k: s.predict(x, link_approx=k) for name, (s, k, _) in sources.items()})
    with torch.no_grad():
        plain = _seconds({"network": lambda: network(x).softmax(-1)})["network"]
    return {
        name: {"training": training[name], "mean": mean[name] / plain, "predict": whole[name] / plain, "mb": size / 1e6}
        for name, (_, _, size) in sources.items()
    }


def _sources(network: nn.Module, data: Labelled, batches: list[Labelled]) -> dict[str, tuple]:
    """Return every method with its link and its bytes."""
    one, members = _bytes(network.state_dict()), [lenet().eval() for _ in range(MEMBERS)]
    las = [Laplace(member, "classification").fit(batches) for member in members]
    posterior = _bytes(las[0].state_dict())
    swag = _swag(network, data, ITERATES).draw()
    drawn, kept = ([lenet().eval() for _ in range(count)] for count in (DRAWS, CYCLES * KEPT))
    return {
        "MAP": (Ensemble([network], "classification"), None, one),
        "LA": (las[0], None, one + posterior),
        "LA paper": (las[0], "probit", one + posterior),
        "DE-5": (Ensemble(members, "classification"), None, MEMBERS * one),
        "mixture of LA": (Mixture(las), None, MEMBERS * (one + posterior)),
        "MC dropout": (MCDropout(lenet_with_dropout(), "classification", DRAWS), None, one),
        "SWAG": (swag, None, one + _bytes([swag.mean, swag.variance, swag.deviations])),
        "VB": (Ensemble(drawn, "classification"), None, 2 * one),
        "CSGHMC": (Ensemble(kept, "classification"), None, len(kept) * one),
    }


def _epoch(network: nn.Module, data: Labelled) -> None:
    train(network, *data, steps=len(data[0]) // BATCH, seed=0, batch=BATCH)


def _tuned(la: Laplace, method: str) -> None:
    la.tune("prior_precision", method=method)


def _swag(network: nn.Module, data: Labelled, iterates: int) -> SWAG:
    """Run SWAG with one epoch of all data between iterates."""
    swag = SWAG(network, "classification", rank=DRAWS, n_samples=DRAWS)
    return swag.run(Shuffled(data, len(data[0]), 0), iterates, lr=1e-3)


def _bytes(tree: object) -> int:
    return sum(leaf.nbytes for leaf in tree_leaves(tree) if isinstance(leaf, Tensor))


def _seconds(calls: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Return the CPU seconds of each call, the least of a few rounds in which they alternate."""
    found: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(REPEATS):
        for name, call in calls.items():
            start = time.process_time()
            call()
            found[name].append(time.process_time() - start)
    return {name: min(seconds) for name, seconds in found.items()}


if __name__ == "__main__":
    main()
