"""Label a pool of digits by active learning: how many labels does a network need?

    python experiments/active_learning.py [--data FOLDER] [--seeds 5] [--methods margin ...]

Begins with 20 random labels and adds 20 at a time, up to 120; the network (one hidden layer of 64 units) is trained
from scratch each time, and its last layer is uncertain, with the prior that la.tune() finds; with --untuned, prior
precision 1. scikit-learn's digits; with FOLDER, MNIST from FOLDER/mnist.npz (x_train, y_train, x_test, y_test; a pool
of 2,000 images). Writes results/active-learning.json: the test accuracy after each round.
"""

from __future__ import annotations

import argparse
import time
import warnings
from pathlib import Path

import torch
from torch import Tensor, nn

from laplace import Laplace
from laplace.decisions import METHODS, acquire
from rows import Rows

FIRST, EACH, LAST, STEPS = 20, 20, 120, 150


def digits(seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return a pool of 1,000 digits and 700 for the test."""
    from sklearn.datasets import load_digits

    found = load_digits()
    x, y = torch.tensor(found.data / 16, dtype=torch.float32), torch.tensor(found.target)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    pool, test = order[:1000], order[1000:1700]
    return x[pool], y[pool], x[test], y[test]


def mnist(folder: str, seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return a pool of 2,000 images of MNIST and 2,000 for the test."""
    import numpy as np

    with np.load(Path(folder) / "mnist.npz") as file:
        arrays = {key: torch.as_tensor(np.asarray(file[key])) for key in file.files}
    generator = torch.Generator().manual_seed(seed)
    out = []
    for part in ("train", "test"):
        x, y = arrays[f"x_{part}"], arrays[f"y_{part}"].long()
        chosen = torch.randperm(len(x), generator=generator)[:2000]
        out += [x[chosen].flatten(1).float() / 255, y[chosen]]
    return out[0], out[1], out[2], out[3]


def trained(x: Tensor, y: Tensor, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(x.shape[1], 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, weight_decay=1e-4)
    for _ in range(STEPS):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return model


def run(method: str, seed: int, folder: str | None, tuned: bool = True) -> dict:
    """Return the test accuracy for each number of labels."""
    began = time.process_time()
    x, y, x_test, y_test = digits(seed) if folder is None else mnist(folder, seed)
    known = torch.zeros(len(x), dtype=torch.bool)
    known[:FIRST] = True  # the pool is in random order
    accuracies = []
    while True:
        model = trained(x[known], y[known], seed)
        with torch.no_grad():
            accuracies.append(round(float((model(x_test).argmax(1) == y_test).double().mean()), 4))
        if int(known.sum()) >= LAST:
            return {"accuracy": accuracies, "seconds": round(time.process_time() - began, 1)}
        rest = (~known).nonzero().flatten()
        if method == "random":
            chosen = torch.arange(EACH)
        else:
            la = Laplace(model, "classification").fit([(x[known], y[known])])
            if tuned:
                la.tune("prior_precision")
            generator = torch.Generator().manual_seed(seed)
            targets = {"targets": x[rest][::5]} if method == "epig" else {}
            chosen = acquire(la, x[rest], EACH, method, n_samples=100, generator=generator, **targets).indices
        known[rest[chosen]] = True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="folder with mnist.npz")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--untuned", action="store_true")
    parser.add_argument("--methods", nargs="+", default=["random", *METHODS])
    args = parser.parse_args()
    warnings.simplefilter("ignore")  # about priors at the edge of their range
    settings = {"first": FIRST, "each": EACH, "last": LAST, "steps": STEPS}
    rows = Rows("active-learning" if args.data is None else "active-learning-mnist", settings)
    how = " untuned" if args.untuned else ""
    for seed in range(args.seeds):
        for method in args.methods:
            rows.get(f"{method}{how}/{seed}", lambda m=method, s=seed: run(m, s, args.data, not args.untuned))
    labels = range(FIRST, LAST + 1, EACH)
    for method in args.methods:
        found = torch.tensor([rows.rows[f"{method}{how}/{seed}"]["accuracy"] for seed in range(args.seeds)])
        mean = found.mean(0)
        need = next((n for n, a in zip(labels, mean.tolist(), strict=True) if a >= 0.9), None)
        each = " ".join(f"{a:.3f}" for a in found[:, -1].tolist())
        print(f"{method:11} over all rounds {mean.mean():.4f}  at {LAST} labels {mean[-1]:.4f} ({each})  0.9 at {need}")


if __name__ == "__main__":
    main()
