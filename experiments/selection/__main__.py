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


def main(arguments: list[str] | None = None) -> None:
    """Run the study."""
    study = started("selection", __doc__.splitlines()[0], arguments)
    steps = 50 if study.quick else 1500
    rows = Rows(study.results, {"steps": steps, "sets": list(SETS)})
    grid = list(product(AUGMENTATIONS, DEPTHS, WIDTHS, ACTIVATIONS))[:: 6 if study.quick else 1]
    for name, split, kind in product(SETS, range(study.seeds), grid):
        key = f"{name}/{split}/{kind[1]}-{kind[2]}-{kind[3]}{kind[0]}"
        rows.get(key, lambda name=name, split=split, kind=kind: measured(study, name, split, *kind, steps))
    lines, points = [], {}
    for name in SETS:
        found = [row for key, row in rows.rows.items() if key.startswith(name)]
        score = torch.tensor([row["log_likelihood"] for row in found])
        for subset in SUBSETS:
            evidence = torch.tensor([row[f"evidence_{subset}"] for row in found])
            points[name, subset] = (evidence, score)
            picked = [score[evidence.argmax()], score.max(), score.median()]
            lines.append([name, subset, f"{spearman(evidence, score):.2f}", *(f"{float(s):.3f}" for s in picked)])
    print(markdown(["set", "evidence of", "rank correlation", "chosen", "best", "median"], lines))
    draw(points, study.results.with_suffix(".png"))


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


def draw(points: dict[tuple[str, str], tuple[Tensor, Tensor]], file: Path) -> None:
    """Write the figure: evidence against test log-likelihood."""
    fig = Figure(figsize=(4 * len(SETS), 3.4), layout="constrained")
    FigureCanvasAgg(fig)
    panels = fig.subplots(1, len(SETS), squeeze=False)[0]
    for axes, name in zip(panels, SETS, strict=True):
        for subset, colour in zip(SUBSETS, ("#1b9e77", "#d95f02"), strict=True):
            evidence, score = points[name, subset]
            axes.plot(evidence, score, "o", ms=4, color=colour, label=f"{subset}: {spearman(evidence, score):.2f}")
        axes.set(title=name, xlabel="log evidence per example", ylabel="test log-likelihood")
        axes.legend(frameon=False, fontsize=8, title="rank correlation", title_fontsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    fig.savefig(file, dpi=150)


if __name__ == "__main__":
    main()
