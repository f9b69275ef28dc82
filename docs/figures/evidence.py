"""Compare evidences of the last layer and of all weights: `python docs/figures/evidence.py` prints the table.

Three tanh networks are trained on 60 points of a wave with noise 0.3, without weight decay; the last one overfits. The
test NLL is that of each posterior's own predictions at 2,000 new points.
"""
# ruff: noqa: T201

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn

from laplace import Laplace
from laplace.evaluation import gaussian_nll

NETWORKS = {"1 x 50, 500 steps": (1, 500), "3 x 50, 500 steps": (3, 500), "3 x 50, 3,000 steps": (3, 3000)}
SEEDS = 5


def drawn(n: int) -> tuple[Tensor, Tensor]:
    """Return inputs and targets, (n, 1) each."""
    x = 6 * torch.rand(n, 1, dtype=torch.float64) - 3
    return x, 2 * x.sin() + 0.3 * torch.randn(n, 1, dtype=torch.float64)


def trained(layers: int, steps: int, x: Tensor, y: Tensor) -> nn.Module:
    """Return a tanh network after that many steps of Adam on all points."""
    sizes = [1, *[50] * layers]
    hidden = [part for a, b in pairwise(sizes) for part in (nn.Linear(a, b), nn.Tanh())]
    model = nn.Sequential(*hidden, nn.Linear(50, 1)).double()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    return model


def scores(model: nn.Module, train: tuple[Tensor, Tensor], test: tuple[Tensor, Tensor]) -> list[float]:
    """Return log evidence and test NLL of the last layer, then of all weights, each tuned by its evidence."""
    found = []
    for weights, structure in (("last_layer", "full"), ("all", "kron")):
        la = Laplace(model, "regression", weights, structure).fit([train])
        evidence = la.tune("prior_precision", "sigma_noise", method="evidence").score
        prediction = la.predict(test[0])
        found += [evidence, gaussian_nll(prediction.mean, prediction.total, test[1])]
    return found


def main() -> None:
    """Print means over the seeds."""
    torch.set_num_threads(1)
    print("last layer: log evidence, test NLL; all weights: log evidence, test NLL")
    for name, (layers, steps) in NETWORKS.items():
        rows = []
        for seed in range(SEEDS):
            torch.manual_seed(seed)
            train, test = drawn(60), drawn(2000)
            rows.append(scores(trained(layers, steps, *train), train, test))
        print(f"{name:24}" + "  ".join(f"{value:8.3f}" for value in torch.tensor(rows).mean(0)), flush=True)


if __name__ == "__main__":
    main()
