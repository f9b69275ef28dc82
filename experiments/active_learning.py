"""Label a pool of digits by active learning: how many labels does a network need?

    python experiments/active_learning.py [--data FOLDER] [--seeds 5] [--methods margin ...] [--draw]

Begins with 20 random labels and adds 20 at a time, up to 120; the network (one hidden layer of 64 units) is trained
from scratch each time, and its last layer is uncertain, with the prior that la.tune() finds; with --untuned, prior
precision 1. scikit-learn's digits; with FOLDER, MNIST from FOLDER/mnist.npz (x_train, y_train, x_test, y_test; a pool
of 2,000 images). Writes the test accuracy after each round to results/active-learning.json, or with FOLDER to
results/active-learning-mnist.json. --draw makes the figure docs/figures/active_learning.png of both.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from laplace import Laplace
from laplace.decisions import METHODS, acquire
from rows import RESULTS, Rows

FIRST, EACH, LAST, STEPS = 20, 20, 120, 150
DIGITS, MNIST = "active-learning", "active-learning-mnist"
FIGURE = Path(__file__).parents[1] / "docs" / "figures" / "active_learning.png"


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


def named(method: str, untuned: bool) -> str:
    """Return what is put behind the name of a method. Random choice has no prior."""
    return " untuned" if untuned and method != "random" else ""


def accuracies(rows: Mapping[str, dict], method: str, seeds: int) -> list[list[float]]:
    """Return the accuracy after each round, for every seed."""
    return [rows[f"{method}/{seed}"]["accuracy"] for seed in range(seeds)]


def gains(rows: Mapping[str, dict], method: str, seeds: int) -> list[float]:
    """Return for every seed the accuracy less that of random choice, averaged over the rounds after the first."""
    pairs = zip(accuracies(rows, method, seeds), accuracies(rows, "random", seeds), strict=True)
    return [statistics.fmean(a - b for a, b in zip(own[1:], other[1:], strict=True)) for own, other in pairs]


def table(rows: Mapping[str, dict], methods: Sequence[str], seeds: int) -> None:
    """Print the mean accuracy after each round, the gain over random choice with its error, and each seed's last."""
    compared = all(f"random/{seed}" in rows for seed in range(seeds))
    for method in methods:
        found = accuracies(rows, method, seeds)
        mean = " ".join(f"{statistics.fmean(column):.3f}" for column in zip(*found, strict=True))
        line = f"{method:11} {mean}   {LAST} labels: " + " ".join(f"{own[-1]:.3f}" for own in found)
        if compared and seeds > 1:
            less = gains(rows, method, seeds)
            error = statistics.stdev(less) / seeds**0.5
            line += f"   gain {statistics.fmean(less):+.3f} +- {error:.3f}, {sum(gain > 0 for gain in less)} of {seeds}"
        print(line)


def draw() -> None:
    """Draw the mean accuracy of each method over all seeds, and each seed of random choice and of small margins."""
    from matplotlib.figure import Figure

    lines = {
        "random": ("random choice", "#777777"),
        "margin": ("small margin", "#0072B2"),
        "batch_bald": ("BatchBALD", "#D55E00"),
        "bald": ("BALD", "#E69F00"),
        "entropy": ("entropy", "#CC79A7"),
        "epig": ("EPIG", "#009E73"),
    }
    labels, figure = range(FIRST, LAST + 1, EACH), Figure(figsize=(9, 3.9), layout="constrained")
    for axes, (name, title) in zip(figure.subplots(1, 2), {DIGITS: "digits", MNIST: "MNIST"}.items(), strict=True):
        rows = json.loads((RESULTS / f"{name}.json").read_text())["rows"]
        seeds = sum(key.startswith("random/") for key in rows)
        for method, (label, colour) in lines.items():
            found = accuracies(rows, method, seeds)
            for one in found if method in ("random", "margin") else ():
                axes.plot(labels, one, color=colour, alpha=0.25, linewidth=0.7)
            mean = [statistics.fmean(column) for column in zip(*found, strict=True)]
            axes.plot(labels, mean, color=colour, linewidth=2, label=label)
        axes.set(title=f"{title}, {seeds} seeds", xlabel="labels", xticks=labels)
        axes.spines[["top", "right"]].set_visible(False)
        if name == DIGITS:
            axes.set_ylabel("test accuracy")
            figure.legend(loc="outside lower center", ncols=6, frameon=False)
    figure.savefig(FIGURE, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="folder with mnist.npz")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--untuned", action="store_true")
    parser.add_argument("--methods", nargs="+", default=["random", *METHODS], choices=("random", *METHODS))
    parser.add_argument("--draw", action="store_true", help="draw the figure of what was run on both sets")
    args = parser.parse_args()
    warnings.simplefilter("ignore")  # about priors at the edge of their range
    settings = {"first": FIRST, "each": EACH, "last": LAST, "steps": STEPS}
    rows = Rows(DIGITS if args.data is None else MNIST, settings)
    for seed in range(args.seeds):
        for method in args.methods:
            name = f"{method}{named(method, args.untuned)}/{seed}"
            rows.get(name, lambda m=method, s=seed: run(m, s, args.data, not args.untuned))
    table(rows.rows, [f"{method}{named(method, args.untuned)}" for method in args.methods], args.seeds)
    if args.draw:
        draw()


if __name__ == "__main__":
    main()
