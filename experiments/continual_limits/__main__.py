"""Permuted MNIST, one task after another: what keeps Kronecker factors below the paper, and FROMP beside them.

    python -m experiments.continual_limits --data DIR [--quick] [--seeds K] [--cache DIR]

DIR holds mnist.npz. A network 784-100-100-10 sees the tasks one after the other. Each variant changes one thing of the
first one. What a task leaves is kept in the cache: a variant goes on after the last task that it has seen.
"""

from __future__ import annotations

from dataclasses import asdict, replace

import torch
from experiments.continual_limits import figure
from experiments.continual_limits.tasks import read
from experiments.continual_limits.training import Variant, learn
from experiments.uq.report import markdown
from experiments.uq.start import Rows, Study, started

VARIANTS = {
    "kron": Variant(),
    "kron, earlier tasks counted t times": Variant(joining="counted"),
    "kron, sum of products": Variant(joining="products"),
    "kron, prior per tensor": Variant(prior_structure="layerwise"),
    "kron, prior of the first task": Variant(tuned=False),
    "kron, 50 epochs": Variant(epochs=50),
}
TASKS = {}  # more than `SHORT` tasks
SHORT = 5


def main(arguments: list[str] | None = None) -> None:
    """Run the study."""
    study = started("continual_limits", __doc__.splitlines()[0], arguments)
    examples = 2000 if study.quick else None
    rows = Rows(study.results, {"examples": examples, "quick": study.quick})
    for seed in range(study.seeds):
        for name, variant in VARIANTS.items():
            laplace(study, rows, f"{name}/{seed}", variant, seed)


def laplace(study: Study, rows: Rows, name: str, variant: Variant, seed: int) -> None:
    n = 3 if study.quick else TASKS.get(name.split("/")[0], SHORT)
    if study.quick:
        variant = replace(variant, epochs=variant.epochs // 12)
    if f"{name}/{n}" in rows.rows:
        return
    tasks = read(study.folder, n, 2000 if study.quick else None, seed)
    file = name.split("/")[0].replace(", ", "_").replace(" ", "_")
    for task, learnt in enumerate(learn(file, variant, tasks, study.cache), 1):
        each = tasks.accuracies(learnt.model, task)
        row = {"mean": sum(each) / task, "each": each, "seconds": learnt.seconds}
        row |= {"prior_precision": learnt.precision.reshape(-1).tolist(), "variant": asdict(variant)}
        rows.get(f"{name}/{task}", lambda row=row: row)
        print(f"{row['mean']:.4f} {row['seconds']:.0f}", row["prior_precision"], flush=True)


if __name__ == "__main__":
    torch.manual_seed(0)
    main()
