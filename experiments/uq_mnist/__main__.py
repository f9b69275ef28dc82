"""LeNet on MNIST: Laplace beside its rivals, on digits, rotated digits and images that are no such digits.

    python -m experiments.uq_mnist --data DIR [--quick] [--seeds K] [--epochs E] [--cache DIR]

DIR holds mnist.npz, fashion_mnist.npz, kmnist.npz and femnist_digits.npz (x_train, y_train, x_test, y_test: images of
28 x 28). Variational Bayes needs bayesian-torch and IVON needs ivon-opt (pip install --no-deps bayesian-torch
ivon-opt), cyclical SGHMC needs posteriors (the extra `experiments`); a rival without its library is left out. Networks
are trained once and kept in the cache; results are kept as they are found.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from benchmarks.harm.networks import Network, features, lenet
from experiments.uq.cache import Cache
from experiments.uq.columns import side_by_side
from experiments.uq.methods import POSTERIORS, Method, posteriors, rescaled, single
from experiments.uq.report import text
from experiments.uq.scores import averaged, scores
from experiments.uq.start import Rows, started
from experiments.uq_mnist import figure
from experiments.uq_mnist.data import ANGLES, Digits, digits, rotated
from experiments.uq_mnist.networks import trained
from experiments.uq_mnist.rivals import LIBRARIES, by_draws, missing
from torch import Tensor

from laplace.rivals import Ensemble, Mixture

Labelled = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Sizes:
    """How much is trained on and scored."""

    train: int = 60_000
    test: int = 8000
    shifted: int = 2000  # of each angle, and of each kind of unknown images
    draws: int = 20  # of rivals that run the network once for each
    iterates: int = 20  # of SWAG, a quarter of an epoch apart
    members: int = 5  # of the ensemble and of the mixtures


QUICK = Sizes(train=600, test=200, shifted=100, draws=3, iterates=3, members=2)


@dataclass(frozen=True)
class Sets:
    """What is scored: the images, or what last layers see of them."""

    train: Labelled
    validation: Labelled
    labelled: dict[str, Labelled]
    outside: dict[str, Tensor]


def main(arguments: list[str] | None = None) -> None:
    """Run the study."""
    study = started("uq_mnist", __doc__.splitlines()[0], arguments, seeds=3, epochs=5)
    sizes, epochs = QUICK if study.quick else Sizes(), study.epochs
    found = images(digits(study.folder, sizes.train), sizes)
    rows = Rows(study.results, {"sizes": vars(sizes), "epochs": epochs})
    for name in missing():
        print(f"{name} is left out, because {LIBRARIES[name][0]} is not installed: {LIBRARIES[name][1]}", flush=True)
    cache = Cache(study.cache.folder / f"epochs_{epochs}")
    for seed in range(study.seeds):
        if not all(f"{name}/{seed}" in rows.rows for name in _names(sizes.members)):
            for method, sets in of_last_layers(found, cache, sizes, epochs, seed):
                rows.get(f"{method.name}/{seed}", lambda method=method, sets=sets: _row(method, sets))
    for seed in range(study.seeds):
        first = seed * sizes.members
        rivals = by_draws(found.train, cache, epochs, seed, first, sizes.draws, sizes.iterates)
        for name, make in rivals.items():
            rows.get(f"{name}/{seed}", lambda make=make: _row(make(), found))
    names = dict.fromkeys(key.split("/")[0] for key in rows.rows)
    table = {name: averaged([_scores(rows.rows[f"{name}/{s}"]) for s in range(study.seeds)]) for name in names}
    figure.draw(table, study.results.with_suffix(".png"))
    print(text(table))


def images(found: Digits, sizes: Sizes) -> Sets:
    """Return the images that are scored."""
    x, y = found.test
    labelled = {"r0": (x[: sizes.test], y[: sizes.test])}
    labelled |= {f"r{a}": (rotated(x[: sizes.shifted], a), y[: sizes.shifted]) for a in ANGLES[1:]}
    outside = {name: other[: sizes.shifted] for name, other in found.outside.items()}
    return Sets(found.train, found.validation, labelled, outside)


def seen(networks: list[Network], sets: Sets, cache: Cache, name: str) -> Sets:
    """Return what the last layers of all networks see of the images, side by side."""

    def through(x: Tensor, what: str) -> Tensor:
        return cache.get(f"{name}_{what}", lambda: {"x": torch.cat([features(net, x) for net in networks], 1)})["x"]

    return Sets(
        (through(sets.train[0], "train"), sets.train[1]),
        (through(sets.validation[0], "validation"), sets.validation[1]),
        {key: (through(x, key), y) for key, (x, y) in sets.labelled.items()},
        {key: through(x, key) for key, x in sets.outside.items()},
    )


def of_last_layers(sets: Sets, cache: Cache, sizes: Sizes, epochs: int, seed: int) -> Iterator[tuple[Method, Sets]]:
    """Yield the methods that need each network once for each image, with the features that they read."""
    first, k = seed * sizes.members, sizes.members
    made = [trained(cache, f"lenet_{i}", lenet, sets.train, epochs, i) for i in range(first, first + k)]
    networks = [one.network for one in made]
    last = seen(networks, sets, cache, f"seen_{seed}")
    heads = side_by_side([net.head for net in networks])
    alone, together = made[0].seconds, sum(one.seconds for one in made)
    yield single(heads[0]).after(alone), last
    yield rescaled("temperature", heads[:1], last.validation).after(alone), last
    yield Method(f"DE-{k}", Ensemble(heads, "classification")).after(together), last
    yield rescaled(f"DE-{k} temperature", heads, last.validation).after(together), last
    members: dict[str, list[Method]] = {name: [] for name in POSTERIORS}
    for head in heads:
        for method in posteriors(head, last.train, last.validation):
            members[method.name].append(method)
            if head is heads[0]:
                yield method.after(alone), last
    for name, found in members.items():
        mixture, seconds = Mixture([one.source for one in found]), sum(one.seconds for one in found)
        yield Method(f"mixture of {name}", mixture, found[0].link, seconds).after(together), last


def _names(members: int) -> list[str]:
    together = [f"DE-{members}", f"DE-{members} temperature", *(f"mixture of {name}" for name in POSTERIORS)]
    return ["MAP", "temperature", *POSTERIORS, *together]


def _row(method: Method, sets: Sets) -> dict:
    found = scores(method, sets.labelled, sets.outside, "r0")
    spent = {"train_seconds": round(method.training, 2), "fit_seconds": round(method.seconds, 2)}
    return found | spent | {"found": method.found}


def _scores(row: dict) -> dict:
    return {"sets": row["sets"], "ood": row["ood"]}


if __name__ == "__main__":
    main()
