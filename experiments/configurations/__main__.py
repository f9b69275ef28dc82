"""Weights x structure x curvature x tuning x link: NLL against how well unknown images are told apart.

    python -m experiments.configurations --data DIR [--quick] [--seeds K] [--cache DIR]

Two tasks. CIFAR-10: the last layer of a ResNet-20, on the features of `uq_cifar10`, which are taken from the cache if
they are there; DIR is that of `uq_cifar10`. Fashion-MNIST: a CNN that is trained here, with its last layer, some or all
of its weights uncertain; DIR holds fashion_mnist.npz, mnist.npz and kmnist.npz. The figure is the paper's Figure 3: one
point for each configuration, its mean over seeds, coloured by each component in turn. Named is the Pareto front of the
means: the configurations that no other one beats in both.
"""

from __future__ import annotations

import copy
import time
import warnings
from collections.abc import Iterator
from itertools import product
from statistics import median

import torch
from experiments.configurations import figure
from experiments.configurations.tasks import CURVATURES, LINKS, PARTS, TUNINGS, Task, cifar10, fmnist
from experiments.uq.methods import Method, rescaled, single
from experiments.uq.report import markdown
from experiments.uq.scores import averaged, scores
from experiments.uq.start import Rows, started

from laplace import Laplace

Points = dict[str, dict]
SCORES = ("nll", "auroc_confidence", "auroc_epistemic")
DEFAULT = "last_layer/kron/ggn/auto/one_vs_rest"  # of this library


def main(arguments: list[str] | None = None) -> None:
    """Run the study."""
    study = started("configurations", __doc__.splitlines()[0], arguments, seeds=3, epochs=10)
    rows = Rows(study.results, {"quick": study.quick, "epochs": study.epochs})
    for seed, make in product(range(study.seeds), (cifar10, fmnist)):
        run(make(study, seed), seed, rows)
    print("\n\n".join(fronts(rows.rows, task) for task in by_task(rows.rows)))
    alone = {task: references(rows.rows, task) for task in by_task(rows.rows)}
    figure.draw(by_task(rows.rows), alone, study.results.with_suffix(".png"))


def run(task: Task, seed: int, rows: Rows) -> None:
    """Measure all configurations of a task that are not done: 'task/weights/structure/curvature/tuning/link/seed'."""
    for method in (single(task.network), rescaled("temperature", [task.network], task.validation)):
        rows.get(f"{task.name}/{method.name}/{seed}", lambda method=method: point(task, method))
    for (subset, structure), curvature in product(task.kinds, CURVATURES):
        names = [_name(task, seed, subset, structure, curvature, *rest) for rest in product(TUNINGS, LINKS)]
        if not all(name in rows.rows for name in names):
            for name, method in methods(task, seed, subset, structure, curvature, rows.rows):
                rows.get(name, lambda method=method: point(task, method))


def methods(
    task: Task, seed: int, subset: str, structure: str, curvature: str, done: Points
) -> Iterator[tuple[str, Method]]:
    """Yield one fitted posterior, tuned in each way, with each link; ways that are done with all links are left out."""
    start, indices = time.process_time(), {"subnetwork_indices": task.indices} if subset == "subnetwork" else {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the evidence warns that it may do harm: that is what is measured
        fitted = Laplace(task.network, "classification", subset, structure, curvature=curvature, **indices)
        fitted.fit(task.batches)
        seconds = time.process_time() - start
        for tuning in TUNINGS:
            names = {link: _name(task, seed, subset, structure, curvature, tuning, link) for link in LINKS}
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
    """Return the points of each task under the names of their components, averaged over seeds."""
    found: dict[str, dict[str, list[dict]]] = {}
    for name, row in rows.items():
        task, *parts, _ = name.split("/")
        if len(parts) == len(PARTS):
            found.setdefault(task, {}).setdefault("/".join(parts), []).append(row)
    return {task: {name: averaged(each) for name, each in points.items()} for task, points in found.items()}


def references(rows: Points, task: str) -> Points:
    """Return what has no posterior: the network, and the network with a temperature; averaged over seeds."""
    found: dict[str, list[dict]] = {}
    for name, row in rows.items():
        if name.split("/")[0] == task and name.count("/") == 2:
            found.setdefault(name.split("/")[1], []).append(row)
    return {name: averaged(each) for name, each in found.items()}


def pareto(points: Points) -> list[str]:
    """Return the names of points that no other one beats in NLL and AUROC, by NLL."""
    found, best = [], -1.0
    for name, row in sorted(points.items(), key=lambda item: (item[1]["nll"], -item[1]["auroc_confidence"])):
        if row["auroc_confidence"] > best:
            found.append(name)
            best = row["auroc_confidence"]
    return found


def fronts(rows: Points, task: str) -> str:
    """Return a table: the network alone, the Pareto front, the defaults; means, and what each seed has beside MAP."""
    points = by_task(rows)[task]
    found = {**references(rows, task), **{name: points[name] for name in pareto(points)}}
    lines = [[_spelt(name), *_cells(rows, task, name, row)] for name, row in found.items()]
    if DEFAULT in points:
        lines.append([f"the defaults: {_spelt(DEFAULT)}", *_cells(rows, task, DEFAULT, points[DEFAULT])])
    beside = "less MAP's, in each seed"
    title = f"{task}: {', '.join(PARTS)}"
    return markdown([title, "NLL", beside, "AUROC, confidence", beside, "AUROC, epistemic"], lines)


def medians(rows: Points, task: str) -> str:
    """Return a table: the medians over all configurations that share a component, of means over seeds."""
    points, lines = by_task(rows)[task], []
    for i, (part, values) in enumerate(PARTS.items()):
        for value in values:
            own = [row for name, row in points.items() if name.split("/")[i] == value]
            if own:
                middle = [f"{median(row[score] for row in own):.4f}" for score in SCORES]
                lines.append([part, value, str(len(own)), *middle])
    names = ["value", "points", "median NLL", "median AUROC, confidence", "by epistemic"]
    return markdown([f"{task}: component", *names], lines)


def _cells(rows: Points, task: str, name: str, row: dict) -> list[str]:
    cells = []
    for score in SCORES[:2]:
        each = [value[score] for key, value in rows.items() if key.rpartition("/")[0] == f"{task}/{name}"]
        alone = [value[score] for key, value in rows.items() if key.rpartition("/")[0] == f"{task}/MAP"]
        beside = [f"{one - other:+.4f}" for one, other in zip(each, alone, strict=True)]
        cells += [f"{row[score]:.4f}", "-" if name == "MAP" else ", ".join(beside)]
    return [*cells, f"{row['auroc_epistemic']:.4f}" if "auroc_epistemic" in row else "-"]


def _spelt(name: str) -> str:
    return name.replace("/", ", ")


def _name(task: Task, seed: int, *parts: str) -> str:
    return "/".join([task.name, *parts, str(seed)])


if __name__ == "__main__":
    torch.manual_seed(0)
    main()
