"""UCI regression: prior and noise by online evidence, one hidden layer of 50 units, the full posterior of all weights.

    python experiments/uci.py --data FOLDER [--sets yacht energy ...] [--splits 20] [--quick]

FOLDER holds uci/<set>.npz with X (N, d), y (N,), and train_idx and test_idx, the indices of each split in a row: the
twenty usual ones of each set, five of protein. Reported are RMSE and log-likelihood on the test splits, in the units of
the data, beside those of Monte-Carlo dropout with the same network and splits (Gal, Ghahramani 2016).
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Iterable

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from data import arrays
from laplace import marglik_training
from rows import Rows, deviation, mean

DROPOUT = {  # RMSE and test log-likelihood of Monte-Carlo dropout
    "boston": (2.90, -2.40),
    "concrete": (4.82, -2.93),
    "energy": (0.54, -1.21),
    "kin8nm": (0.08, 1.14),
    "naval": (0.00, 4.45),
    "power": (4.01, -2.80),
    "protein": (4.27, -2.87),
    "wine": (0.62, -0.93),
    "yacht": (0.67, -1.25),
}
STEPS, EPOCHS = 8000, 100  # of the optimizer, so that small sets see more epochs; at least so many epochs


def run(name: str, split: int, folder: str | None, steps: int) -> dict:
    """One training and its scores on the test split."""
    raw, start = arrays(f"uci/{name}", folder), time.process_time()
    x, y = (torch.from_numpy(raw[key]).float() for key in ("X", "y"))
    train, test = (torch.from_numpy(raw[key][split]).long() for key in ("train_idx", "test_idx"))
    centre, scale = x[train].mean(0), x[train].std(0).clamp(min=1e-8)
    x, unit, zero = (x - centre) / scale, float(y[train].std()), float(y[train].mean())
    targets = ((y - zero) / unit).unsqueeze(1)
    torch.manual_seed(split)
    model = nn.Sequential(nn.Linear(x.shape[1], 50), nn.Tanh(), nn.Linear(50, 1))
    order = torch.Generator().manual_seed(split)
    loader = DataLoader(TensorDataset(x[train], targets[train]), batch_size=128, shuffle=True, generator=order)
    epochs = max(EPOCHS * steps // STEPS, steps // len(loader))
    la, *_ = marglik_training(
        model,
        loader,
        "regression",
        "full",
        n_epochs=epochs,
        n_epochs_burnin=epochs // 20,
        marglik_frequency=-(-epochs // 50),
        prior_structure="layerwise",
        sigma_noise_init=0.3,
        optimizer_kwargs={"lr": 1e-2},
        scheduler_cls=torch.optim.lr_scheduler.CosineAnnealingLR,
        scheduler_kwargs={"T_max": epochs * len(loader)},
    )
    found, variance = la(x[test], diagonal_output=True)
    spread = (variance + la.sigma_noise**2).sqrt()
    error = unit * (found - targets[test])
    log_prob = torch.distributions.Normal(found, spread).log_prob(targets[test]) - math.log(unit)
    scores = {"rmse": float(error.square().mean().sqrt()), "log_likelihood": float(log_prob.mean())}
    return scores | {"noise": unit * float(la.sigma_noise), "cpu_seconds": time.process_time() - start}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="folder with uci/<set>.npz; else the environment variable LAPLACE_DATA")
    parser.add_argument("--sets", nargs="+", choices=DROPOUT, default=list(DROPOUT))
    parser.add_argument("--splits", type=int, default=20, help="of each set; protein has five")
    parser.add_argument("--quick", action="store_true", help="an eighth of the training")
    args = parser.parse_args()
    report_all(args.data, args.quick, args.sets, args.splits)


def report_all(folder: str | None, quick: bool, sets: Iterable[str] = DROPOUT, splits: int = 20) -> None:
    """All rows that are asked for, then the table."""
    steps = STEPS // 8 if quick else STEPS
    how = {"steps": steps, "network": "d-50-1, tanh", "structure": "full", "epochs at least": EPOCHS * steps // STEPS}
    rows = Rows(f"uci{'-quick' if quick else ''}", how)
    found = {
        name: [
            rows.get(f"{name}/split {split}", lambda n=name, s=split: run(n, s, folder, steps))
            for split in range(min(splits, len(arrays(f"uci/{name}", folder)["train_idx"])))
        ]
        for name in sets
    }
    print(f"\n{'':10s}{'splits':>8s}{'RMSE':>18s}{'dropout':>10s}{'log-likelihood':>20s}{'dropout':>10s}")
    for name, runs in found.items():
        cells = [f"{mean(runs, key):.3f} ± {deviation(runs, key):.3f}" for key in ("rmse", "log_likelihood")]
        rmse, log_likelihood = DROPOUT[name]
        print(f"{name:10s}{len(runs):8d}{cells[0]:>18s}{rmse:>10.2f}{cells[1]:>20s}{log_likelihood:>10.2f}")


if __name__ == "__main__":
    main()
