"""Permuted MNIST, one task after another: what keeps Kronecker factors below the paper, and FROMP beside them.

    python -m experiments.continual_limits --data DIR [--quick] [--seeds K] [--cache DIR]

DIR holds mnist.npz. A network 784-100-100-10 sees the tasks one after the other. Each variant changes one thing of the
first one. What a task leaves is kept in the cache: a variant goes on after the last task that it has seen. Seeds have
other permutations and another start. The variants of `ONCE`, and those with all images, have the first seed only.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from experiments.continual_limits import figure, fromp
from experiments.continual_limits.fromp import FROMP
from experiments.continual_limits.report import PAPER, by_variant, table
from experiments.continual_limits.tasks import read
from experiments.continual_limits.training import Variant, learn
from experiments.uq.start import Rows, Study, started

FEW = 20_000  # training images of each task, for the variants that are compared with each other
VARIANTS: dict[str, Variant | FROMP] = {
    "kron": Variant(),
    "kron, sum of products": Variant(joining="products"),
    "kron, earlier tasks counted t times": Variant(joining="counted"),
    "kron, prior of the first task": Variant(tuned=False),
    "kron, counted t times, prior of the first task": Variant(joining="counted", tuned=False),
    "kron, prior per tensor": Variant(prior_structure="layerwise"),
    "kron, 100 epochs": Variant(epochs=100),
    "FROMP, diag": FROMP(tau=1000.0),
}
ONCE = (
    "kron, sum of products",
    "kron, prior per tensor",
    "kron, 100 epochs",
    "FROMP, diag",
)  # with the first seed only
WHOLE = {"kron": 5, "kron, counted t times, prior of the first task": 10}  # with all images, too: on so many tasks
TASKS = 5  # with `FEW` images
QUICK = {"tasks": 3, "examples": 1000, "epochs": 5, "points": 20}


def main(arguments: list[str] | None = None) -> None:
    """Run the study."""
    study = started("continual_limits", __doc__.splitlines()[0], arguments, seeds=2)
    rows = Rows(study.results, {"quick": QUICK} if study.quick else {"few": FEW})
    for seed in range(study.seeds):
        for name in [name for name in VARIANTS if seed == 0 or name not in ONCE]:
            variant = VARIANTS[name]
            few = _quick(variant) if study.quick else replace(variant, examples=FEW)
            run(name, few, QUICK["tasks"] if study.quick else TASKS, study, rows, seed)
        for name, tasks in {} if study.quick or seed else WHOLE.items():
            run(name, VARIANTS[name], tasks, study, rows, seed)
    figure.draw(by_variant(rows.rows), PAPER, study.results.with_suffix(".png"))
    print(table(rows.rows))


def run(name: str, variant: Variant | FROMP, n: int, study: Study, rows: Rows, seed: int) -> None:
    """Learn n tasks, and write a row after each: 'images/variant/seed/tasks seen'."""
    place = f"{variant.examples}/{name}/{seed}"
    if f"{place}/{n}" in rows.rows:
        return
    tasks = read(study.folder, n, variant.examples, seed)
    file = name.replace(", ", "_").replace(" ", "_")
    if isinstance(variant, FROMP):
        first = next(learn("", Variant(epochs=variant.epochs, examples=variant.examples), tasks, study.cache))
        after = fromp.learn(file, variant, first, tasks, study.cache)
    else:
        after = learn(file, variant, tasks, study.cache)
    for seen, learnt in enumerate(after, 1):
        each = [round(value, 4) for value in tasks.accuracies(learnt.model, seen)]
        row = {"mean": round(sum(each) / seen, 5), "each": each, "seconds": round(learnt.seconds, 1)}
        row |= {"prior_precision": [round(value, 4) for value in learnt.precision.reshape(-1).tolist()]}
        rows.get(f"{place}/{seen}", lambda row=row: row)
        print(row["mean"], row["seconds"], flush=True)


def _quick(variant: Variant | FROMP) -> Variant | FROMP:
    epochs = QUICK["epochs"] * variant.epochs // 25
    if isinstance(variant, FROMP):
        return replace(variant, epochs=epochs, examples=QUICK["examples"], points=QUICK["points"])
    return replace(variant, epochs=epochs, examples=QUICK["examples"])


if __name__ == "__main__":
    torch.manual_seed(0)
    main()
