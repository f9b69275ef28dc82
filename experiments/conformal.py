"""Coverage and size of conformal intervals and sets on data embedded in scikit-learn, over random splits.

    python experiments/conformal.py

For each of several networks, the data that it has not seen is split at random into calibration and test examples, many
times. Prints means over networks and splits, and writes experiments/results/conformal.json.
"""

from __future__ import annotations

import argparse
import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_diabetes, load_digits
from torch import Tensor, nn

from laplace import Laplace, Prediction
from laplace.conformal import from_predictions
from laplace.evaluation import interval_coverage, interval_width

LEVEL = 0.9
RESULTS = Path(__file__).parent / "results" / "conformal.json"


def trained(net: nn.Module, loss: Any, x: Tensor, y: Tensor, steps: int) -> nn.Module:
    optimizer = torch.optim.Adam(net.parameters(), 1e-2)
    for _ in range(steps):
        optimizer.zero_grad()
        loss(net(x), y).backward()
        optimizer.step()
    return net


def diabetes(seed: int) -> tuple[Prediction, Tensor, int]:
    """Return predictions of examples that were not trained on, their targets, and how many to calibrate by."""
    torch.manual_seed(seed)
    x, y = (torch.tensor(part, dtype=torch.float32) for part in load_diabetes(return_X_y=True))
    x, y = x / x.std(0), ((y - y.mean()) / y.std()).unsqueeze(1)
    order = torch.randperm(len(x))
    train, rest = order[:142], order[142:]
    net = nn.Sequential(nn.Linear(10, 50), nn.Tanh(), nn.Linear(50, 1))
    trained(net, nn.functional.mse_loss, x[train], y[train], 300)
    la = Laplace(net, "regression", "all", "full").fit(x[train], y[train])
    la.tune()
    return la.predict(x[rest]), y[rest], 150


def digits(seed: int) -> tuple[Prediction, Tensor, int]:
    torch.manual_seed(seed)
    x, y = load_digits(return_X_y=True)
    x, y = torch.tensor(x, dtype=torch.float32) / 16 + 0.5 * torch.randn(len(x), 64), torch.tensor(y)
    order = torch.randperm(len(x))
    train, rest = order[:600], order[600:]
    net = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10))
    trained(net, nn.functional.cross_entropy, x[train], y[train], 100)
    la = Laplace(net, "classification").fit(x[train], y[train])
    la.tune()
    return la.predict(x[rest]), y[rest], 500


def measured(
    prediction: Prediction, y: Tensor, n_cal: int, repeats: int, seed: int
) -> dict[str, list[dict[str, float]]]:
    """Return coverage and size of every method on every split."""
    rng, found = np.random.default_rng(seed), {}
    numbers = prediction.is_regression
    methods: dict[str, dict[str, Any]] = {name: {"method": name} for name in ("scaled", "absolute", "cqr")}
    if not numbers:
        methods = {name: {"method": name} for name in ("lac", "aps", "raps")}
        methods["raps, k_reg=2, penalty=.1"] = {"method": "raps", "k_reg": 2, "penalty": 0.1}
        methods |= {f"{name}, by class": {"method": name, "class_conditional": True} for name in ("lac", "aps")}
    for _ in range(repeats):
        order = rng.permutation(len(y))
        cal, test = order[:n_cal], order[n_cal:]
        own = alone(prediction[test], y[test])
        found.setdefault("posterior alone", []).append(own)
        for name, options in methods.items():
            generator = torch.Generator().manual_seed(int(rng.integers(2**31)))
            made = from_predictions(prediction[cal], y[cal], LEVEL, generator=generator, **options)
            if numbers:
                lower, upper = made.interval(prediction[test])
                row = scored_intervals(lower, upper, y[test], prediction[test].std)
            else:
                row = scored_sets(made.set(prediction[test], generator=generator), y[test], prediction[test].mean)
            found.setdefault(name, []).append(row)
    return found


def alone(prediction: Prediction, y: Tensor) -> dict[str, float]:
    """Score the posterior's own interval, or the most probable classes that hold the level together."""
    if prediction.is_regression:
        return scored_intervals(*prediction.interval(LEVEL), y, prediction.std)
    p, order = prediction.mean.sort(-1, descending=True)
    members = torch.zeros_like(p, dtype=torch.bool).scatter(-1, order, p.cumsum(-1) - p < LEVEL)
    return scored_sets(members, y, prediction.mean)


def scored_intervals(lower: Tensor, upper: Tensor, y: Tensor, std: Tensor) -> dict[str, float]:
    held = ((lower <= y) & (y <= upper)).float()[:, 0]
    unsure = std[:, 0] >= std[:, 0].quantile(0.8)
    return {
        "coverage": interval_coverage(lower, upper, y),
        "size": interval_width(lower, upper),
        "least certain fifth": float(held[unsure].mean()),
    }


def scored_sets(members: Tensor, y: Tensor, p: Tensor) -> dict[str, float]:
    held = members[torch.arange(len(y)), y].float()
    unsure = p.amax(-1) <= p.amax(-1).quantile(0.2)
    by_class = {f"class {k}": float(held[y == k].mean()) for k in range(p.shape[1])}
    return {
        "coverage": float(held.mean()),
        "size": float(members.sum(1).float().mean()),
        "empty": float((~members.any(1)).float().mean()),
        "least certain fifth": float(held[unsure].mean()),
    } | by_class


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--networks", type=int, default=5)
    parser.add_argument("--splits", type=int, default=100)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    table: dict[str, dict[str, dict[str, float]]] = {}
    for name, make in (("diabetes", diabetes), ("digits", digits)):
        rows: dict[str, list[dict[str, float]]] = {}
        for seed in range(arguments.networks):
            for method, found in measured(*make(seed), arguments.splits, seed).items():
                rows.setdefault(method, []).extend(found)
        table[name] = {}
        for method, found in rows.items():
            mean = {key: float(np.nanmean([row[key] for row in found])) for key in found[0]}
            if any(key.startswith("class") for key in mean):
                worst = min(value for key, value in mean.items() if key.startswith("class"))
                mean = {key: value for key, value in mean.items() if not key.startswith("class")} | {
                    "worst class": worst
                }
            mean["sd of coverage"] = float(np.std([row["coverage"] for row in found]))
            table[name][method] = mean
            print(f"{name:9s} {method:26s}", "  ".join(f"{key} {value:.3f}" for key, value in mean.items()), flush=True)
    RESULTS.write_text(json.dumps({"level": LEVEL, **vars(arguments), "table": table}, indent=1) + "\n")


if __name__ == "__main__":
    main()
