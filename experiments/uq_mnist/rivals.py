"""The rivals that run the whole network once for each draw: MC dropout, SWAG, VB, IVON, cyclical SGHMC."""

from __future__ import annotations

import time
from collections.abc import Callable
from importlib.util import find_spec

from benchmarks.harm.networks import lenet
from experiments.uq.cache import Cache
from experiments.uq.methods import Method
from experiments.uq.shuffled import Shuffled
from experiments.uq_mnist.networks import BATCH, Trained, lenet_with_dropout, trained
from experiments.uq_mnist.training import Labelled, States, cyclical, online, packed, unpacked, variational

from laplace.rivals import SWAG, Ensemble, MCDropout

LIBRARIES = {  # of a rival: what it imports, and how that is installed
    "VB": ("bayesian_torch", "pip install --no-deps bayesian-torch"),
    "IVON": ("ivon", "pip install --no-deps ivon-opt"),
    "CSGHMC": ("posteriors", "pip install posteriors"),
}


def by_draws(
    data: Labelled, cache: Cache, epochs: int, seed: int, first: int, draws: int, iterates: int
) -> dict[str, Callable[[], Method]]:
    """Return what trains each rival, by its name; rivals whose libraries are not installed are left out.

    Args:
        data: the training images.
        cache: where networks are kept.
        epochs: of each training, and of each cycle of SGHMC.
        seed: of what is trained here.
        first: the number of the trained network that SWAG and VB begin at.
        draws: how many networks MC dropout, SWAG, VB and IVON draw.
        iterates: of SWAG, a quarter of an epoch apart.
    """

    def begin() -> Trained:
        return trained(cache, f"lenet_{first}", lenet, data, epochs, first)

    def kept(name: str, run: Callable[[], tuple[States, float]], before: float = 0.0) -> Method:
        networks, seconds = unpacked(cache.get(f"{name.lower()}_{seed}", lambda: packed(*run())))
        return Method(name, Ensemble(networks, "classification")).after(before + seconds)

    def dropout() -> Method:
        made = trained(cache, f"dropout_{seed}", lenet_with_dropout, data, epochs, seed)
        return Method("MC dropout", MCDropout(made.network, "classification", draws)).after(made.seconds)

    def swag() -> Method:
        start, begun = begin(), time.process_time()
        walk = SWAG(start.network, "classification", rank=iterates, n_samples=draws)
        walk.run(Shuffled(data, len(data[0]) // 4, seed, BATCH), n_iterates=iterates, lr=0.01)
        return Method("SWAG", walk.draw()).after(start.seconds + time.process_time() - begun)

    def vb() -> Method:
        start = begin()
        return kept("VB", lambda: variational(start.network, data, epochs, seed, draws), start.seconds)

    found = {"MC dropout": dropout, "SWAG": swag, "VB": vb}
    found["IVON"] = lambda: kept("IVON", lambda: online(data, epochs, seed, draws))
    found["CSGHMC"] = lambda: kept("CSGHMC", lambda: cyclical(data, epochs, seed))
    return {name: make for name, make in found.items() if name not in missing()}


def missing() -> list[str]:
    """Return the rivals whose libraries are not installed."""
    return [name for name, (library, _) in LIBRARIES.items() if find_spec(library) is None]
