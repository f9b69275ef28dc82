"""How many posteriors tuning by validation scores, and how near the best of a dense grid it ends.

Three tasks: prior precision, noise and temperature of two regressions, prior precision and temperature of a classifier.

    python benchmarks/tuning_points.py
"""

from __future__ import annotations

import time
import warnings
from typing import Any

import torch
from torch import nn

import machine
from laplace import Laplace
from laplace.errors import LaplaceWarning
from laplace.tuning.methods import Method
from laplace.tuning.problem import Problem
from laplace.tuning.result import Tuned
from measure import use_one_thread

DENSE = {2: 33, 3: 17}  # hyperparameters: values of each in the dense grid
ENDS = {"prior_precision": (1e-4, 1e4), "sigma_noise": (1e-3, 1e3), "temperature": (1e-3, 1e3)}


class Dense(Method):
    """Scores all points of a dense grid."""

    def tune(self, problem: Problem) -> Tuned:
        """Return the best of them."""
        ends = [torch.tensor(ENDS[kind]).double().log() for kind in problem.kinds]
        axes = [torch.linspace(float(a), float(b), DENSE[len(ends)], dtype=torch.float64) for a, b in ends]
        for part in torch.cartesian_prod(*axes).split(256):
            problem.losses(list(part))
        return problem.tuned("dense")


def main() -> None:
    """Tune each task, and print a row for it."""
    use_one_thread()
    warnings.simplefilter("ignore", LaplaceWarning)
    print(machine.describe(), flush=True)
    measure("regression 8-50-50-1, all weights, kron", "regression", "all", "kron", ("sigma_noise", "temperature"))
    measure(
        "regression 8-50-50-1, last layer, full", "regression", "last_layer", "full", ("sigma_noise", "temperature")
    )
    measure("classification 8-50-50-4, all weights, kron", "classification", "all", "kron", ("temperature",))


def measure(name: str, task: Any, subset: str, structure: str, others: tuple[str, ...]) -> None:
    """Fit a network, tune, and print points, CPU seconds, and the distance to the best of a dense grid."""
    torch.manual_seed(0)
    x = torch.randn(900, 8)
    y = x.sin().sum(1, keepdim=True) + 0.5 * torch.randn(900, 1)
    if task == "classification":
        y = (y[:, 0] > -1).long() + (y[:, 0] > 0).long() + (y[:, 0] > 1).long()
    widths = (
        nn.Linear(8, 50),
        nn.Tanh(),
        nn.Linear(50, 50),
        nn.Tanh(),
        nn.Linear(50, 4 if task == "classification" else 1),
    )
    model = nn.Sequential(*widths)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    loss = nn.functional.cross_entropy if task == "classification" else nn.functional.mse_loss
    for _ in range(300):
        optimizer.zero_grad()
        loss(model(x[:500]), y[:500]).backward()
        optimizer.step()
    la = Laplace(model, task, subset, structure).fit([(x[:500], y[:500])])
    start = time.process_time()
    found = la.tune("prior_precision", *others, method="validation", val_loader=[(x[500:], y[500:])])
    seconds = time.process_time() - start
    dense = la.tune("prior_precision", *others, method=Dense(), val_loader=[(x[500:], y[500:])])
    print(
        f"{name}: {len(found.points)} points, {found.steps} rounds, {seconds:.2f} CPU s, score {found.score:.6f}, "
        f"{found.score - dense.score:+.1e} from the best of {len(dense.points):,}",
        flush=True,
    )


if __name__ == "__main__":
    main()
