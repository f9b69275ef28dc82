"""Training and prediction time relative to the network alone, and megabytes, of all methods of the two studies.

    python -m experiments.cost --data DIR [--quick] [--epochs E]

DIR holds the files of `uq_mnist` and of `uq_cifar10`; bayesian-torch, ivon-opt and posteriors are needed. CPU seconds
on one thread, the smallest of a few rounds in which the methods alternate. LeNet on MNIST: training is E epochs for a
network and for IVON, E more for variational Bayes, 4 E for cyclical SGHMC, 5 more for SWAG, as in `uq_mnist`. ResNet-20
on CIFAR-10: training is 200 epochs of 50,000 images, as published. Passes over the data are measured on a part of it
and multiplied.
"""

from __future__ import annotations

from experiments.cost import figure
from experiments.cost.lenet import lenet_costs
from experiments.cost.resnet import resnet_costs
from experiments.uq.report import markdown
from experiments.uq.start import Rows, started

NAMES = ["method", "training", "la(x)", "predict(x)", "megabytes"]


def main(arguments: list[str] | None = None) -> None:
    """Run the study."""
    study = started("cost", __doc__.splitlines()[0], arguments, epochs=5)
    rows = Rows(study.results, {"quick": study.quick, "epochs": study.epochs})
    rows.get("lenet", lambda: lenet_costs(study.folder, study.epochs, study.quick))
    rows.get("resnet20", lambda: resnet_costs(study.folder, study.quick))
    for name, costs in rows.rows.items():
        lines = [[method, *(f"{v:.3f}" for v in row.values())] for method, row in costs["methods"].items()]
        print(name, costs["seconds"], markdown(NAMES, lines), sep="\n")
    figure.draw(rows.rows, study.results.with_suffix(".png"))


if __name__ == "__main__":
    main()
