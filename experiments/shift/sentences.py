"""Sentences: opinions on films, then on products; queries to an assistant, then queries that it was not made for.

`frozen`: MiniLM as it is, and a head with one hidden layer of 128 units. `fine-tuned`: the last of MiniLM's six layers
trained together with a linear head, the five others as they are.
"""

from __future__ import annotations

from functools import cache as once
from typing import Any

import torch
from benchmarks.harm.data import Folder
from benchmarks.harm.networks import Network, features, train
from experiments.shift.encoder import WIDTH, LastLayer, Tokens, tokens
from experiments.shift.sets import INSIDE, SHIFTED, Sizes, Task, held_out, kept, on_features
from experiments.uq.cache import Cache
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

HIDDEN, BATCH, DECAY, RATE = 128, 64, 1e-4, 5e-5
FEW = 3000  # sentences that the encoder is fine-tuned on
FILMS = {"train": ("sst2", "train"), "validation": ("sst2", "dev"), INSIDE: ("sst2", "test"), SHIFTED: ("cr", "all")}
QUERIES = {part: ("clinc150", part if part != INSIDE else "test") for part in ("train", INSIDE)}
QUERIES |= {"validation": ("clinc150", "val"), "out-of-scope": ("clinc150", "oos_test")}


def films_to_products(folder: Folder, cache: Cache, sizes: Sizes, seed: int) -> Task:
    """Return SST-2, and customer reviews (CR) as shift; a head on the frozen encoder."""
    return _frozen("films", FILMS, folder, cache, sizes, seed)


def queries(folder: Folder, cache: Cache, sizes: Sizes, seed: int) -> Task:
    """Return CLINC150, and its out-of-scope queries; a head on the frozen encoder."""
    return _frozen("queries", QUERIES, folder, cache, sizes, seed)


def films_to_products_tuned(folder: Folder, cache: Cache, sizes: Sizes, seed: int) -> Task:
    """Return the same as `films_to_products`, with the encoder's last layer trained, too."""
    sets = {part: _tokens(folder, cache, *where, sizes.examples) for part, where in FILMS.items()}
    labels = {part: _labels(folder, *where, sizes.examples) for part, where in FILMS.items()}
    few = held_out(len(labels["train"]), FEW)[0]
    shorter = _some(sets["train"], few)
    sets["train"], labels["train"] = shorter, labels["train"][few]

    def make(member: int) -> nn.Module:
        torch.manual_seed(1000 * seed + member)
        return nn.ModuleDict({"last": LastLayer(), "head": nn.Linear(WIDTH, 2)})

    def run(network: Any) -> None:
        _fine_tune(network["last"], network["head"], shorter, labels["train"], sizes.encoder_epochs)

    name = f"tuned_{seed}"
    networks: list[Any] = [kept(cache, f"{name}_{i}", lambda i=i: make(i), run) for i in range(sizes.members)]

    def through(i: int, part: str) -> Tensor:
        made = cache.get(f"{name}_{i}_{part}", lambda: {"features": networks[i]["last"].features(sets[part])})
        return made["features"]

    return on_features([network["head"] for network in networks], through, labels, ())


def _frozen(name: str, where: dict, folder: Folder, cache: Cache, sizes: Sizes, seed: int) -> Task:
    """Train heads on the features of the encoder as it is."""

    def encoded(part: str) -> Tensor:
        def make() -> dict[str, Tensor]:
            return {"features": LastLayer().eval().features(_tokens(folder, cache, *where[part], sizes.examples))}

        return cache.get(f"{name}_frozen_{part}", make)["features"]

    x = {part: encoded(part) for part in where}
    labels = {part: _labels(folder, *place, sizes.examples) for part, place in where.items()}
    outside = tuple(part for part in where if part not in ("train", "validation", INSIDE, SHIFTED))
    for part in outside:
        del labels[part]
    classes = 1 + max(int(y.max()) for y in labels.values())

    def make(member: int) -> Network:
        torch.manual_seed(1000 * seed + member)
        return Network(nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.ReLU()), nn.Linear(HIDDEN, classes))

    def run(network: nn.Module, member: int) -> None:
        steps = sizes.head_epochs * len(x["train"]) // BATCH
        data = x["train"], labels["train"]
        train(network, *data, steps=steps, seed=1000 * seed + member, decay=DECAY, batch=BATCH)

    networks: list[Any] = [
        kept(cache, f"{name}_{seed}_{i}", lambda i=i: make(i), lambda network, i=i: run(network, i))
        for i in range(sizes.members)
    ]
    heads = [network.head for network in networks]
    return on_features(heads, lambda i, part: features(networks[i], x[part]), labels, outside)


def _fine_tune(last: LastLayer, head: nn.Linear, x: Tokens, y: Tensor, epochs: int) -> None:
    """Train the last layer and the head by AdamW with a learning rate that falls to 0."""
    groups = [{"params": last.parameters(), "lr": RATE}, {"params": head.parameters(), "lr": 20 * RATE}]
    optimizer = torch.optim.AdamW(groups, weight_decay=0.01)
    batch, order = 32, torch.Generator().manual_seed(torch.initial_seed() % 2**31)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, epochs * -(-len(x) // batch))
    last.train(), head.train()
    for _ in range(epochs):
        for chosen in torch.randperm(len(x), generator=order).split(batch):
            optimizer.zero_grad()
            cross_entropy(head(last(*x.padded(chosen))), y[chosen]).backward()
            optimizer.step()
            schedule.step()


def _tokens(folder: Folder, cache: Cache, name: str, split: str, n: int | None) -> Tokens:
    return Tokens(**cache.get(f"tokens_{name}_{split}", lambda: tokens(_rows(folder, name, split, n)["text"])))


def _labels(folder: Folder, name: str, split: str, n: int | None) -> Tensor:
    return torch.tensor(_rows(folder, name, split, n)["label"])


def _some(x: Tokens, chosen: Tensor) -> Tokens:
    states, mask = x.padded(chosen)
    return Tokens(states[mask].half(), x.lengths[chosen])


@once
def _rows(folder: Folder, name: str, split: str, n: int | None) -> dict[str, list]:
    """Return a split, or n of its sentences from all over it: some splits are sorted by class."""
    rows = folder.texts(name)[split]
    step = 1 if n is None else max(1, len(rows["label"]) // n)
    return {key: rows[key][::step][:n] for key in ("text", "label")}
