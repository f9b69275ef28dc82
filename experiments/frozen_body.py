"""Compare noises of a last layer whose body was fitted to other data: should the body's weights be counted?

    python experiments/frozen_body.py --data FOLDER [--sets yacht energy ...]

The network of experiments/noise_rules.py is trained on the first half of the training split ('gentle', at most 4,000
examples in all). Its last layer is then fitted to the second half by ridge regression, and the posterior of the last
layer, too. Splits 0 to 4. FOLDER is as there.
"""

from __future__ import annotations

import argparse
import math

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from laplace import Laplace
from noise_rules import SCORES, TRAININGS, scored, show, standardised, trained
from rows import Rows

SETS = ("boston", "concrete", "energy", "kin8nm", "power", "wine", "yacht")
MOST, RIDGE, SPLITS = 4000, 0.05, 5


def run(name: str, split: int, folder: str | None) -> dict:
    """Train a body and a head on different halves, and return the scores of every rule as '<rule>/<score>'."""
    x, y, x_test, y_test = standardised(name, split, folder)
    half = min(len(x), MOST) // 2
    model = trained(x[:half], y[:half], split, *TRAININGS["gentle"]).double()
    x, y, x_test, y_test = (t.double() for t in (x[half : 2 * half], y[half : 2 * half], x_test, y_test))
    fit_head(model, x, y)
    with torch.no_grad():
        residual, error = float((y - model(x)).square().mean().sqrt()), y_test - model(x_test)
    found: dict[str, float] = {}

    def keep(rule: str, variance: Tensor) -> None:
        found.update(
            {f"{rule}/{key}": round(value, 4) for key, value in zip(SCORES, scored(error, variance), strict=True)}
        )

    keep("network/residual noise", torch.full_like(error, residual**2))
    loader = DataLoader(TensorDataset(x, y), batch_size=500)
    la, every = (Laplace(model, "regression", weights, "kron").fit(loader) for weights in ("last_layer", "all"))
    for posterior in (la, every):
        posterior.tune("prior_precision", "sigma_noise", method="evidence")
    keep("last/its own evidence", la.predict(x_test).total)
    la.sigma_noise = math.sqrt(residual * float(every.sigma_noise))
    la.tune("prior_precision", method="evidence")
    keep("last/between, of all weights", la.predict(x_test).total)
    return found


def fit_head(model: nn.Module, x: Tensor, y: Tensor) -> None:
    """Set the last layer by ridge regression on its features."""
    *body, head = model.children()
    with torch.no_grad():
        features = nn.Sequential(*body)(x)  # (N, H)
        features = torch.cat([features, torch.ones_like(features[:, :1])], 1)
        gram = features.T @ features + RIDGE * torch.eye(features.shape[1], dtype=features.dtype)
        solution = torch.linalg.solve(gram, features.T @ y)  # (H + 1, 1)
        head.weight.copy_(solution[:-1].T)
        head.bias.copy_(solution[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="folder with uci/<set>.npz; else the environment variable LAPLACE_DATA")
    parser.add_argument("--sets", nargs="+", choices=SETS, default=list(SETS))
    args = parser.parse_args()
    rows = Rows("frozen-body", {"network": "d-64-64-1, ReLU", "training": list(TRAININGS["gentle"]), "ridge": RIDGE})
    table = {
        name: [rows.get(f"{name}/split {s}", lambda n=name, s=s: run(n, s, args.data)) for s in range(SPLITS)]
        for name in args.sets
    }
    show("body fitted to other data", table)


if __name__ == "__main__":
    main()
