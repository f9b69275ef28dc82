"""What one task consists of: networks, the data that they read, and where they are scored."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from experiments.uq.cache import Cache
from experiments.uq.columns import side_by_side
from torch import Tensor, nn

Labelled = tuple[Tensor, Tensor]
INSIDE, SHIFTED = "in", "out"  # the names of the two labelled sets


@dataclass(frozen=True)
class Task:
    """The networks of one seed, and what they read.

    Attributes:
        networks: all read the same inputs; those of a classifier are last layers on features.
        train: what they were trained on.
        validation: held out, from the distribution of the training data.
        labelled: the sets that are scored, INSIDE and SHIFTED.
        outside: inputs without a right answer, by name.
    """

    networks: list[nn.Module]
    train: Labelled
    validation: Labelled
    labelled: dict[str, Labelled]
    outside: dict[str, Tensor] = field(default_factory=dict)

    @property
    def regression(self) -> bool:
        """Return whether the targets are numbers."""
        return self.train[1].is_floating_point()


def held_out(n: int, first: int, seed: int = 42) -> tuple[Tensor, Tensor]:
    """Return the indices of `first` of n examples, drawn at random, and of the others."""
    order = torch.randperm(n, generator=torch.Generator().manual_seed(seed))
    return order[:first], order[first:]


def on_features(
    heads: list[nn.Linear], through: Callable[[int, str], Tensor], labels: dict[str, Tensor], outside: tuple[str, ...]
) -> Task:
    """Return a task whose networks are last layers.

    Args:
        heads: the last layer of each network.
        through: gives the features of a network, by its number, on a set, by its name, (N, H).
        labels: those of the sets 'train', 'validation', INSIDE and SHIFTED, if it is there.
        outside: the names of sets without labels.
    """
    x = {name: torch.cat([through(i, name) for i in range(len(heads))], 1) for name in (*labels, *outside)}
    pairs = {name: (x[name], y) for name, y in labels.items()}
    scored = {name: pairs[name] for name in (INSIDE, SHIFTED) if name in pairs}
    networks = list[nn.Module](side_by_side(heads))
    return Task(networks, pairs["train"], pairs["validation"], scored, {name: x[name] for name in outside})


@dataclass(frozen=True)
class Sizes:
    """How much is trained and scored.

    Attributes:
        members: networks of each ensemble.
        examples: at most so many of each set; all, if None.
        epochs: of the training of images, of heads, of the encoder's last layer; steps of a regression.
    """

    members: int = 3
    examples: int | None = None
    image_epochs: int = 10
    head_epochs: int = 20
    encoder_epochs: int = 2
    steps: int = 2000
    features: int | None = None  # features that a gap is made of; all, if None


QUICK = Sizes(members=2, examples=150, image_epochs=1, head_epochs=2, encoder_epochs=1, steps=200, features=2)


def kept(cache: Cache, name: str, make: Callable[[], nn.Module], train: Callable[[nn.Module], None]) -> nn.Module:
    """Return a trained network, trained if it is not in the cache. `make` sets the seed."""
    network = make()

    def run() -> dict[str, Tensor]:
        train(network)
        return network.state_dict()

    network.load_state_dict(cache.get(name, run))
    return network.eval()
