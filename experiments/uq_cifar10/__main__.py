"""CIFAR-10 with published residual networks: Laplace beside temperature scaling, SWAG, an ensemble and a mixture.

    python -m experiments.uq_cifar10 --data DIR [--quick] [--cache DIR]

DIR holds cifar10_webp.npz, cifar100_test_webp.npz, svhn_test10k_webp.npz, cifar10c_2k_webp.npz (lossless mosaics of
colour images) and models/cifar10_resnet{20,32,44,56}.safetensors. Each network runs once over each set; nearly all else
is computed from the features of its last layer. The four networks are the seeds: rows of a single network are their
mean. A posterior of all weights and SWAG run the whole network for each prediction: those are scored with the ResNet-20
on a part of the images, and written to a file of their own, uq-cifar10-whole.json.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from experiments.uq.methods import POSTERIORS, Method, posteriors, rescaled, single
from experiments.uq.report import Table, text
from experiments.uq.scores import averaged, scores
from experiments.uq.start import Rows, Study, started
from experiments.uq_cifar10 import figure, whole
from experiments.uq_cifar10.data import Images, read
from experiments.uq_cifar10.features import LAYERS

from laplace.rivals import Ensemble, Mixture

SINGLE = ("MAP", "temperature", *POSTERIORS)
TOGETHER = ("ensemble", "ensemble temperature", *(f"mixture of {name}" for name in POSTERIORS))
NAMES = (*(f"{name}/{layers}" for name in SINGLE for layers in LAYERS), *TOGETHER)
WHOLE = (*SINGLE, *whole.TUNED, *whole.WALKED)


def main(arguments: list[str] | None = None) -> None:
    """Run the study."""
    study = started("uq_cifar10", __doc__.splitlines()[0], arguments)
    n = 400 if study.quick else None
    rows = Rows(study.results, {"networks": list(LAYERS), "images": n})
    if not all(name in rows.rows for name in NAMES):
        images = read(study.folder, study.cache, n)
        for method in methods(images):
            rows.get(method.name, lambda method=method: _row(method, images))
    table = {name: averaged([_scores(rows.rows[f"{name}/{layers}"]) for layers in LAYERS]) for name in SINGLE}
    table |= {name: _scores(row) for name, row in rows.rows.items() if "/" not in name}
    figure.draw(table, study.results.with_suffix(".png"))
    print(text(table))
    print(text(slow(study)))


def slow(study: Study) -> Table:
    """Return the scores of the methods that run the whole network, beside those of the last layer."""
    sizes, n = (whole.QUICK, 400) if study.quick else (whole.Sizes(), None)
    path = study.results.with_name(study.results.name.replace("uq-cifar10", "uq-cifar10-whole"))
    rows = Rows(path, {"network": whole.LAYERS, "images": n, **vars(sizes)})
    if not all(name in rows.rows for name in WHOLE):
        for method, read_by in whole.methods(study.folder, study.cache, sizes, n, rows.rows):
            rows.get(method.name, lambda method=method, read_by=read_by: _row(method, read_by))
    table = {name: _scores(rows.rows[name]) for name in WHOLE}
    figure.draw(table, path.with_suffix(".png"))
    return table


def methods(images: Images) -> Iterator[Method]:
    """Yield everything that is compared: each network by itself, then all of them together."""
    members: dict[str, list[Method]] = {}
    for layers, network in zip(LAYERS, images.networks, strict=True):
        found = [single(network), rescaled("temperature", [network], images.validation)]
        for method in [*found, *posteriors(network, images.train, images.validation)]:
            members.setdefault(method.name, []).append(method)
            yield method.named(f"{method.name}/{layers}")
    yield Method("ensemble", Ensemble(images.networks, "classification"))
    yield rescaled("ensemble temperature", images.networks, images.validation)
    for name in POSTERIORS:
        yield Method(f"mixture of {name}", Mixture([one.source for one in members[name]]), members[name][0].link)


def _row(method: Method, images: Images | whole.Pixels) -> dict:
    found = scores(method, images.labelled, images.outside, "c0")
    return found | {"fit_seconds": round(method.seconds, 2), "found": method.found}


def _scores(row: dict) -> dict:
    return {"sets": row["sets"], "ood": row["ood"]}


if __name__ == "__main__":
    torch.manual_seed(0)
    main()
