"""Regression with a gap in the inputs (Foong et al. 2019): the middle third of one feature is left out of training.

For every feature in turn, the examples are sorted by it. The middle third is the shifted test set. Of the rest, a tenth
each is the test set inside and the validation data. Features and targets are standardised by the training data; scores
are in those units. A feature with fewer than three values has no middle third, and is left out.
"""

from __future__ import annotations

import torch
from benchmarks.harm.data import Folder
from benchmarks.harm.networks import perceptron, train
from experiments.shift.sets import INSIDE, SHIFTED, Labelled, Sizes, Task, held_out, kept
from experiments.uq.cache import Cache
from torch import Tensor, nn

HIDDEN, BATCH, DECAY = (50,), 32, 1e-5


def features_of(folder: Folder, name: str, sizes: Sizes) -> list[int]:
    """Return the features that a gap is made of."""
    x = torch.from_numpy(folder.arrays(f"uci/{name}")["X"])
    return [j for j in range(x.shape[1]) if len(x[:, j].unique()) > 2][: sizes.features]


def read(name: str, feature: int, folder: Folder, cache: Cache, sizes: Sizes, seed: int) -> Task:
    """Train small networks on a table of UCI with a gap, or read them."""
    raw = folder.arrays(f"uci/{name}")
    x, y = torch.from_numpy(raw["X"]).double(), torch.from_numpy(raw["y"]).double().reshape(-1, 1)
    rest, gap = _around(x[:, feature], seed)
    some, train_rows = held_out(len(rest), len(rest) // 5, seed)
    rows = {"train": rest[train_rows], "validation": rest[some[::2]], INSIDE: rest[some[1::2]], SHIFTED: gap}
    sets = {
        part: (_like(x, x[rows["train"]])[index], _like(y, y[rows["train"]])[index]) for part, index in rows.items()
    }

    def trained(member: int) -> nn.Module:
        def make() -> nn.Module:
            torch.manual_seed(1000 * seed + member)
            return perceptron(x.shape[1], HIDDEN, 1)

        def run(network: nn.Module) -> None:
            options = {"seed": 1000 * seed + member, "decay": DECAY, "batch": BATCH, "lr": 1e-2}
            train(network, *sets["train"], steps=sizes.steps, **options)

        return kept(cache, f"gap_{name}_{feature}_{seed}_{member}", make, run)

    networks = [trained(member) for member in range(sizes.members)]
    scored: dict[str, Labelled] = {part: sets[part] for part in (INSIDE, SHIFTED)}
    return Task(networks, sets["train"], sets["validation"], scored)


def _around(values: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    """Return the rows outside of the middle third, and those in it. Equal values are put in random order first."""
    shuffled = torch.randperm(len(values), generator=torch.Generator().manual_seed(seed))
    order = shuffled[values[shuffled].argsort(stable=True)]
    a, b = len(values) // 3, len(values) - len(values) // 3
    return torch.cat([order[:a], order[b:]]), order[a:b]


def _like(values: Tensor, train: Tensor) -> Tensor:
    """Return values in units of the training data's standard deviation, around its mean."""
    scale = train.std(0)
    return ((values - train.mean(0)) / torch.where(scale > 0, scale, 1.0)).float()
