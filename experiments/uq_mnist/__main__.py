"""LeNet on MNIST: Laplace beside nine rivals, on digits, rotated digits and images that are no such digits.

    python -m experiments.uq_mnist --data DIR [--quick] [--seeds K] [--epochs E] [--cache DIR]

DIR holds mnist.npz, fashion_mnist.npz, kmnist.npz and femnist_digits.npz (x_train, y_train, x_test, y_test: images of
28 x 28). Variational Bayes needs bayesian-torch (pip install --no-deps bayesian-torch), cyclical SGHMC needs posteriors
(the extra `experiments`). Networks are trained once and kept in the cache; results are kept as they are found.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec

import torch
from benchmarks.harm.networks import Network, features, lenet
from experiments.uq.cache import Cache
from experiments.uq.columns import side_by_side
from experiments.uq.methods import POSTERIORS, Method, posteriors, rescaled, single
from experiments.uq.report import text
from experiments.uq.scores import averaged, scores
from experiments.uq.start import Rows, started
from experiments.uq_mnist import figure
from experiments.uq_mnist.data import Digits, digits, rotated
from experiments.uq_mnist.networks import lenet_with_dropout, trained
from experiments.uq_mnist.training import Shuffled, cyclical, packed, unpacked, variational
from torch import Tensor

from laplace.rivals import SWAG, Ensemble, MCDropout, Mixture

ANGLES = tuple(range(0, 181, 30))
Labelled = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Sizes:
    """How much is trained on and scored."""

    train: int = 60_000
    test: int = 4000
    shifted: int = 1000  # of each angle, and of each kind of unknown images
    draws: int = 10  # of rivals that run the network once for each
    members: int = 5  # of the ensemble and of the mixtures


QUICK = Sizes(train=600, test=200, shifted=100, draws=3, members=2)


@dataclass(frozen=True)
class Sets:
    """What is scored: the images, or what last layers see of them."""

    train: Labelled
    validation: Labelled
    labelled: dict[str, Labelled]
    outside: dict[str, Tensor]


def main(arguments: list[str] | None = None) -> None:
    """Run the study."""
    study = started("uq_mnist", __doc__.splitlines()[0], arguments)
    sizes, epochs = (QUICK, 1) if study.quick else (Sizes(), study.epochs)
    found = images(digits(study.folder, sizes.train), sizes)
    rows = Rows(study.results, {"sizes": vars(sizes), "epochs": epochs})
    for seed in range(study.seeds):
        for method, sets in methods(found, study.cache, sizes, epochs, seed):
            rows.get(f"{method.name}/{seed}", lambda method=method, sets=sets: _row(method, sets))
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


def methods(sets: Sets, cache: Cache, sizes: Sizes, epochs: int, seed: int) -> Iterator[tuple[Method, Sets]]:
    """Yield everything that is compared, with what it reads."""
    first, k = seed * sizes.members, sizes.members
    made = [trained(cache, f"lenet_{i}", lenet, sets.train, epochs, i) for i in range(first, first + k)]
    networks = [one.network for one in made]
    last = seen(networks, sets, cache, f"seen_{seed}")
    heads = side_by_side([net.head for net in networks])
    yield single(heads[0]), last
    yield rescaled("temperature", heads[:1], last.validation), last
    yield Method(f"DE-{k}", Ensemble(heads, "classification")), last
    yield rescaled(f"DE-{k} temperature", heads, last.validation), last
    members: dict[str, list[Method]] = {name: [] for name in POSTERIORS}
    for head in heads:
        for method in posteriors(head, last.train, last.validation):
            members[method.name].append(method)
            if head is heads[0]:
                yield method, last
    for name, found in members.items():
        yield Method(f"mixture of {name}", Mixture([one.source for one in found]), found[0].link), last
    yield from _by_draws(sets, cache, sizes, epochs, seed, networks[0])


def _by_draws(
    sets: Sets, cache: Cache, sizes: Sizes, epochs: int, seed: int, network: Network
) -> Iterator[tuple[Method, Sets]]:
    """Yield the rivals that run the whole network once for each draw."""
    dropped = trained(cache, f"dropout_{seed}", lenet_with_dropout, sets.train, epochs, seed)
    yield Method("MC dropout", MCDropout(dropped.network, "classification", sizes.draws)), sets
    swag = SWAG(network, "classification", rank=min(10, sizes.draws), n_samples=sizes.draws)
    swag.run(Shuffled(sets.train, len(sets.train[0]) // 4, seed), n_iterates=10, lr=0.01)
    yield Method("SWAG", swag.draw()), sets
    if _there("bayesian_torch", "VB", "pip install --no-deps bayesian-torch"):
        drawn = cache.get(f"vb_{seed}", lambda: packed(*variational(network, sets.train, epochs, seed, sizes.draws)))
        yield Method("VB", Ensemble(unpacked(drawn)[0], "classification")), sets
    if _there("posteriors", "CSGHMC", "pip install posteriors"):
        sampled = cache.get(f"csghmc_{seed}", lambda: packed(*cyclical(sets.train, epochs, seed)))
        yield Method("CSGHMC", Ensemble(unpacked(sampled)[0], "classification")), sets


def _there(library: str, method: str, install: str) -> bool:
    """Whether a library is installed; says what is left out if not."""
    if find_spec(library) is not None:
        return True
    print(f"{method} is left out, because {library} is not installed: {install}", flush=True)
    return False


def _row(method: Method, sets: Sets) -> dict:
    found = scores(method, sets.labelled, sets.outside, "r0")
    return found | {"fit_seconds": round(method.seconds, 2), "found": method.found}


def _scores(row: dict) -> dict:
    return {"sets": row["sets"], "ood": row["ood"]}


if __name__ == "__main__":
    main()
