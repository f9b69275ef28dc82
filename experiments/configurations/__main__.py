"""Weights x structure x curvature x tuning x link: NLL against how well unknown images are told apart.

    python -m experiments.configurations --data DIR [--quick] [--cache DIR]

Two tasks. CIFAR-10: the last layer of a ResNet-20, on the features of `uq_cifar10`, which are taken from the cache if
they are there; DIR is that of `uq_cifar10`. Fashion-MNIST: a CNN that is trained here, with its last layer, some or all
of its weights uncertain; DIR holds fashion_mnist.npz, mnist.npz and kmnist.npz. The figure is the paper's Figure 3: one
point for each configuration, coloured by each component in turn. Named is the Pareto front: the configurations that no
other one beats in both.
"""

from __future__ import annotations

import copy
import time
import warnings
from collections.abc import Iterator
from itertools import product

import torch
from experiments.configurations import figure
from experiments.configurations.tasks import CURVATURES, LINKS, PARTS, TUNINGS, Task, cifar10, fmnist
from experiments.uq.methods import Method, rescaled, single
from experiments.uq.report import markdown
from experiments.uq.scores import scores
from experiments.uq.start import Rows, started

from laplace import Laplace

Points = dict[str, dict]


def main(arguments: list[str] | None = None) -> None:
    """Run the study."""
    study = started("configurations", __doc__.splitlines()[0], arguments, epochs=10)
    rows = Rows(study.results, {"quick": study.quick, "epochs": study.epochs})
    for make in (cifar10, fmnist):
        task = make(study)
        for method in (single(task.network), rescaled("temperature", [task.network], task.validation)):
            rows.get(f"{task.name}/{method.name}", lambda task=task, method=method: point(task, method))
        for subset, structure in task.kinds:
            for curvature in CURVATURES:
                names = [_name(task, subset, structure, curvature, *rest) for rest in product(TUNINGS, LINKS)]
                if not all(name in rows.rows for name in names):
                    for name, method in methods(task, subset, structure, curvature, rows.rows):
                        rows.get(name, lambda task=task, method=method: point(task, method))
    for task, points in by_task(rows.rows).items():
        lines = [[*name.split("/"), *(f"{v:.4f}" for v in list(points[name].values())[:3])] for name in pareto(points)]
        print(task, markdown([*PARTS, "NLL", "AUROC, confidence", "AUROC, epistemic"], lines), sep="\n")
    figure.draw(by_task(rows.rows), references(rows.rows), study.results.with_suffix(".png"))


def methods(task: Task, subset: str, structure: str, curvature: str, done: Points) -> Iterator[tuple[str, Method]]:
    """Yield one fitted posterior, tuned in each way, with each link; ways that are done with all links are left out."""
    start, indices = time.process_time(), {"subnetwork_indices": task.indices} if subset == "subnetwork" else {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the evidence warns that it may do harm: that is what is measured
        fitted = Laplace(task.network, "classification", subset, structure, curvature=curvature, **indices)
        fitted.fit(task.batches)
        seconds = time.process_time() - start
        for tuning in TUNINGS:
            names = {link: _name(task, subset, structure, curvature, tuning, link) for link in LINKS}
            if all(name in done for name in names.values()):
                continue
            la, start = copy.copy(fitted), time.process_time()
            if tuning == "calibrate":
                la.calibrate(task.validation)
            else:
                la.tune("prior_precision", method=tuning, train_loader=task.batches)  # copies do not keep their data
            found = {"prior_precision": float(la.prior_precision.reshape(-1)[0])}
            spent = seconds + time.process_time() - start
            for link, name in names.items():
                yield name, Method(name, la, link, spent, found)


def point(task: Task, method: Method) -> dict:
    """Return where a configuration lies, and the CPU seconds of its fit and tuning."""
    found = scores(method, {"known": task.known}, task.unknown, "known")
    apart = found["ood"].values()
    row = {"nll": found["sets"]["known"]["nll"]}
    for score in ("confidence", "epistemic"):
        if all(score in one for one in apart):  # a network alone has no epistemic part
            row[f"auroc_{score}"] = round(sum(one[score] for one in apart) / len(apart), 5)
    return row | {"ece": found["sets"]["known"]["ece"], "fit_seconds": round(method.seconds, 2)} | method.found


def by_task(rows: Points) -> dict[str, Points]:
    """Return the points of each task under the names of their components."""
    found: dict[str, Points] = {}
    for name, row in rows.items():
        task, rest = name.split("/", 1)
        if rest.count("/") == len(PARTS) - 1:
            found.setdefault(task, {})[rest] = row
    return found


def references(rows: Points) -> dict[str, Points]:
    """Return what has no posterior, for each task: the network, and the network with a temperature."""
    found: dict[str, Points] = {}
    for name, row in rows.items():
        task, rest = name.split("/", 1)
        if "/" not in rest:
            found.setdefault(task, {})[rest] = row
    return found


def pareto(points: Points) -> list[str]:
    """Return the names of points that no other one beats in NLL and AUROC, by NLL."""
    found, best = [], -1.0
    for name, row in sorted(points.items(), key=lambda item: (item[1]["nll"], -item[1]["auroc_confidence"])):
        if row["auroc_confidence"] > best:
            found.append(name)
            best = row["auroc_confidence"]
    return found


def _name(task: Task, *parts: str) -> str:
    return "/".join([task.name, *parts])


if __name__ == "__main__":
    torch.manual_seed(0)
    main()
