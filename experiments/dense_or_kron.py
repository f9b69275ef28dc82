"""Compare the intervals of dense and Kronecker posteriors after `la.tune()`: how many examples does 'full' need?

    python experiments/dense_or_kron.py --data FOLDER [--sets power wine ...]

d-32-32-1 with ReLU (about 1,400 weights) on the first 150, 300 and 600 training examples of five UCI sets, 1,000 steps
of Adam, splits 0 and 1. 90 % intervals of the test targets, in standard deviations of y. FOLDER as in noise_rules.py.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn

from laplace import Laplace
from noise_rules import SCORES, scored, standardised
from rows import Rows, mean

SETS = ("concrete", "energy", "kin8nm", "power", "wine")
EXAMPLES, SPLITS, WIDTH, STEPS, RATE = (150, 300, 600), 2, 32, 1000, 3e-3
POSTERIORS = {"last layer, kron": ("last_layer", "kron"), "all, kron": ("all", "kron"), "all, full": ("all", "full")}


def trained(x: Tensor, y: Tensor, split: int) -> nn.Module:
    """Return the network after its training with batches of 64."""
    torch.manual_seed(1000 + split)
    layers = nn.Linear(x.shape[1], WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 1)
    model = nn.Sequential(*layers)
    optimizer = torch.optim.Adam(model.parameters(), lr=RATE)
    for _ in range(STEPS):
        rows = torch.randint(len(x), (64,))
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x[rows]), y[rows]).backward()
        optimizer.step()
    return model


def run(name: str, split: int, n: int, folder: str | None) -> dict:
    """Return the scores of every posterior as '<posterior>/<score>'."""
    x, y, x_test, y_test = standardised(name, split, folder)
    x, y = x[:n], y[:n]
    model = trained(x, y, split)
    found: dict[str, float] = {"weights": sum(p.numel() for p in model.parameters())}
    for posterior, (weights, structure) in POSTERIORS.items():
        la = Laplace(model, "regression", weights, structure).fit([(x, y)])
        la.tune()
        prediction = la.predict(x_test)
        scores = scored((y_test - prediction.mean).double(), prediction.total.double())
        found |= {f"{posterior}/{key}": round(value, 4) for key, value in zip(SCORES, scores, strict=True)}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="folder with uci/<set>.npz; else the environment variable LAPLACE_DATA")
    parser.add_argument("--sets", nargs="+", choices=SETS, default=list(SETS))
    args = parser.parse_args()
    settings = {"network": f"d-{WIDTH}-{WIDTH}-1, ReLU", "steps": STEPS, "rate": RATE}
    rows = Rows("dense-or-kron", settings)
    for n in EXAMPLES:
        table = [
            rows.get(f"{name}/{n} examples/split {s}", lambda name=name, s=s, n=n: run(name, s, n, args.data))
            for name in args.sets
            for s in range(SPLITS)
        ]
        print(f"\n{n} examples, {mean(table, 'weights'):.0f} weights: {', '.join(SCORES)}")
        for posterior in POSTERIORS:
            print(f"{posterior:18s}", *(f"{mean(table, f'{posterior}/{key}'):8.3f}" for key in SCORES))


if __name__ == "__main__":
    main()
