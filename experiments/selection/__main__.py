"""Evidence against test log-likelihood over 48 networks: depth, width, activation, augmentation on a table of UCI.

    python -m experiments.selection --data DIR [--quick] [--seeds K]

DIR holds uci/<set>.npz with X, y, train_idx and test_idx. Every network is trained for the same number of steps, half
of them on copies of the data with noise on the inputs. Then prior precision and noise are tuned by the evidence of the
data itself, once with all weights uncertain (kron) and once with the last layer alone. The rank correlation says how
well each evidence orders the networks by their test log-likelihood. The evidence of a last layer is conditional on the
features: it does not pay for the weights that made them.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from itertools import pairwise, product
from pathlib import Path

import torch
from benchmarks.harm.networks import train
from experiments.uq.report import markdown
from experiments.uq.start import Rows, Study, started
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from torch import Tensor, nn

from laplace import Laplace
from laplace.evaluation import gaussian_nll

SETS = ("energy", "concrete")
DEPTHS, WIDTHS, ACTIVATIONS = (1, 2, 3), (5, 20, 50, 100), {"tanh": nn.Tanh, "relu": nn.ReLU}
AUGMENTATIONS, COPIES = {"": 0.0, "-jitter": 0.1}, 4  # standard deviations of what is added to each copy
SUBSETS = ("all", "last_layer")
NAMES = {"all": "all weights", "last_layer": "last layer"}


def main(arguments: list[str] | None = None) -> None:
    """Run the study."""
    study = started("selection", __doc__.splitlines()[0], arguments, seeds=3)
    steps = 50 if study.quick else 1500
    rows = Rows(study.results, {"steps": steps, "sets": list(SETS)})
    grid = list(product(AUGMENTATIONS, DEPTHS, WIDTHS, ACTIVATIONS))[:: 6 if study.quick else 1]
    for name, split, kind in product(SETS, range(study.seeds), grid):
        key = f"{name}/{split}/{kind[1]}-{kind[2]}-{kind[3]}{kind[0]}"
        rows.get(key, lambda name=name, split=split, kind=kind: measured(study, name, split, *kind, steps))
    print(table(rows.rows))
    draw(rows.rows, study.results.with_suffix(".png"))


def table(rows: dict[str, dict]) -> str:
    """Return how each evidence orders the networks, and what it chooses: means over the splits of each set."""
    lines = []
    for name, subset in product(SETS, SUBSETS):
        found = []
        for score, evidence, own in by_split(rows, name, subset):
            picked = map(float, (score[evidence.argmax()], score.max(), score.median()))
            found.append([spearman(evidence, score), *picked, spearman(evidence, own)])
        if found:
            means = [f"{sum(column) / len(found):.3f}" for column in zip(*found, strict=True)]
            each = ", ".join(f"{values[0]:.2f}" for values in found)
            lines.append([name, NAMES[subset], str(len(score)), *means[:1], each, *means[1:]])
    names = [
        "rank correlation",
        "in each split",
        "chosen",
        "best",
        "median",
        "rank correlation with its own predictions",
    ]
    return markdown(["set", "evidence of", "networks", *names], lines)


def by_split(rows: dict[str, dict], name: str, subset: str) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield the test log-likelihood, the evidence and the log-likelihood of the subset's own predictions, by split."""
    keys = ("log_likelihood", f"evidence_{subset}", f"log_likelihood_{subset}")
    for split in sorted({key.split("/")[1] for key in rows if key.startswith(f"{name}/")}):
        own = [row for key, row in rows.items() if key.startswith(f"{name}/{split}/")]
        score, evidence, predicted = (torch.tensor([row[key] for row in own]) for key in keys)
        yield score, evidence, predicted


def measured(
    study: Study, name: str, split: int, augmentation: str, depth: int, width: int, activation: str, steps: int
) -> dict:
    """Train one network and return its evidence and its test log-likelihood, both per example."""
    x, y, new_x, new_y = standardised(study.folder.arrays(f"uci/{name}"), split)
    torch.manual_seed(split)
    sizes, layers = [x.shape[1], *[width] * depth], []
    for before, after in pairwise(sizes):
        layers += [nn.Linear(before, after), ACTIVATIONS[activation]()]
    network = nn.Sequential(*layers, nn.Linear(width, 1)).double()
    moved = AUGMENTATIONS[augmentation]
    seen = [torch.cat([t] * COPIES) for t in (x, y)] if moved else [x, y]
    train(network, seen[0] + moved * torch.randn_like(seen[0]), seen[1], steps=steps, seed=split, lr=5e-3, batch=128)
    found = {"weights": sum(p.numel() for p in network.parameters())}
    for subset in SUBSETS:
        la = Laplace(network, "regression", subset, "kron").fit([(x, y)])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            la.tune("prior_precision", "sigma_noise", method="evidence")
        prediction = la.predict(new_x)
        found[f"evidence_{subset}"] = float(la.log_marginal_likelihood()) / len(x)
        found[f"log_likelihood_{subset}"] = -gaussian_nll(prediction.mean, prediction.total, new_y)
    found["log_likelihood"] = found["log_likelihood_all"]
    return {key: round(value, 5) for key, value in found.items()}


def standardised(raw: dict, split: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return a split of a table, in units of the training data."""
    train_rows, test_rows = raw["train_idx"][split], raw["test_idx"][split]
    x, y = torch.from_numpy(raw["X"]).double(), torch.from_numpy(raw["y"]).double().reshape(-1, 1)
    x_train, y_train = x[train_rows], y[train_rows]
    x = (x - x_train.mean(0)) / x_train.std(0).clamp(min=1e-9)
    y = (y - y_train.mean()) / y_train.std()
    return x[train_rows], y[train_rows], x[test_rows], y[test_rows]


def spearman(a: Tensor, b: Tensor) -> float:
    """Return the correlation of the ranks."""
    ranks = torch.stack([t.argsort().argsort().double() for t in (a, b)])
    return float(ranks.corrcoef()[0, 1])


def draw(rows: dict[str, dict], file: Path) -> None:
    """Write the figure: evidence against test log-likelihood, all splits of a set in one panel."""
    fig = Figure(figsize=(4 * len(SETS), 3.4), layout="constrained")
    FigureCanvasAgg(fig)
    panels = fig.subplots(1, len(SETS), squeeze=False)[0]
    for axes, name in zip(panels, SETS, strict=True):
        for subset, colour in zip(SUBSETS, ("#1b9e77", "#d95f02"), strict=True):
            splits = list(by_split(rows, name, subset))
            mean = sum(spearman(evidence, score) for score, evidence, _ in splits) / len(splits)
            for i, (score, evidence, _) in enumerate(splits):
                label = None if i else f"{NAMES[subset]}: {mean:.2f}"
                axes.plot(evidence, score, "osD"[i % 3], ms=3.5, alpha=0.8, mew=0, color=colour, label=label)
        axes.set(title=name, xlabel="log evidence per example", ylabel="test log-likelihood")
        axes.legend(frameon=False, fontsize=8, title="rank correlation", title_fontsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    fig.savefig(file, dpi=150)


if __name__ == "__main__":
    main()
