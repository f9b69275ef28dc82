"""Posteriors over functions at equal numbers of points: the figures on 'gp' in docs/choosing-a-structure.md.

Two networks, a regression on the diabetes data and a classifier on the digits of scikit-learn, are small enough for the
full posterior. All others get its prior precision (and noise) of maximal evidence. 'sod' keeps M points, 'nystrom' and
'variational' take all data in the directions that the gradients at M points span, and 'moved' are inducing points after
100 steps. Each M is repeated with several seeds for the points.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Final

import matplotlib as mpl
import torch
from sklearn.datasets import load_diabetes, load_digits
from torch import Tensor, nn
from torch.nn import functional as F

import machine
from data import Batches, in_batches
from laplace import Laplace
from laplace.errors import LaplaceWarning
from measure import use_one_thread

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "inducing_points.json"
PAGE = HERE.parent / "docs" / "choosing-a-structure.md"
FIGURE = HERE.parent / "docs" / "figures" / "inducing-points.png"
MARK = "<!-- inducing points -->"
STEPS = 100

KINDS: Final[dict[str, dict[str, Any]]] = {
    "sod": {},
    "nystrom": {"functional_approximation": "nystrom"},
    "variational": {"functional_approximation": "variational"},
    "variational, moved": {"functional_approximation": "variational", "inducing_steps": STEPS},
}


@dataclass(frozen=True)
class Data:
    """A trained network with its data."""

    name: str
    likelihood: str
    model: nn.Module
    batches: Batches
    x_test: Tensor
    y_test: Tensor
    outputs: int
    points: tuple[int, ...]


@dataclass(frozen=True)
class Row:
    """One approximation with M points on one network, medians over seeds."""

    data: str
    kind: str
    points: int
    smallest: float  # 5 % quantile of the predictive variances divided by those of the full posterior
    ratio: float  # their median
    largest: float  # 95 % quantile
    evidence: float  # log evidence minus that of the full posterior
    nll: float  # of the test data, minus that of the full posterior
    seconds: float  # CPU seconds of the fit
    prior: float  # prior precision of maximal evidence, divided by that of the full posterior


def main() -> None:
    """Measure, write the results, the table of the page and its figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--redraw", action="store_true", help="draw the last results again, measure nothing")
    parser.add_argument("--seeds", type=int, default=3, help="how often points are drawn (default 3)")
    options = parser.parse_args()
    if options.redraw:
        draw([Row(**row) for row in json.loads(RESULTS.read_text())["results"]], FIGURE)
        return
    use_one_thread()
    warnings.simplefilter("ignore", LaplaceWarning)
    rows = [row for make in (diabetes, digits) for row in measure(make(), options.seeds)]
    found = {"date": datetime.now(timezone.utc).date().isoformat(), "machine": asdict(machine.describe())}
    RESULTS.write_text(json.dumps(found | {"results": [asdict(row) for row in rows]}, indent=2) + "\n")
    draw(rows, FIGURE)
    before, _, rest = PAGE.read_text().partition(MARK)
    PAGE.write_text(f"{before}{MARK}\n\n{as_markdown(rows)}\n\n{MARK}{rest.partition(MARK)[2]}")
    print(as_markdown(rows))


def diabetes() -> Data:
    """Return a network of 361 weights on 342 patients."""
    x, y = (torch.as_tensor(part, dtype=torch.float32) for part in load_diabetes(return_X_y=True))
    x, y = (x - x.mean(0)) / x.std(0), ((y - y.mean()) / y.std()).unsqueeze(1)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    x, y = x[order], y[order]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(10, 30), nn.Tanh(), nn.Linear(30, 1))
    train(model, in_batches(x[:342], y[:342], 38), F.mse_loss, 60)
    return Data(
        "diabetes", "regression", model, in_batches(x[:342], y[:342], 38), x[342:], y[342:], 1, (5, 10, 20, 40, 80)
    )


def digits() -> Data:
    """Return a network of 1,210 weights on 1,200 images."""
    data = load_digits()
    x, y = torch.as_tensor(data.data, dtype=torch.float32) / 16, torch.as_tensor(data.target)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    x, y = x[order], y[order]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 16), nn.Tanh(), nn.Linear(16, 10))
    batches = in_batches(x[:1200], y[:1200], 100)
    train(model, batches, F.cross_entropy, 40)
    return Data("digits", "classification", model, batches, x[1200:], y[1200:], 10, (5, 10, 20, 40))


def train(model: nn.Module, batches: Batches, loss: Callable[[Tensor, Tensor], Tensor], epochs: int) -> None:
    """Train with Adam and a little weight decay."""
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3, weight_decay=1e-4)
    for _ in range(epochs):
        for x, y in batches:
            optimizer.zero_grad()
            loss(model(x), y).backward()
            optimizer.step()


def measure(data: Data, seeds: int) -> list[Row]:
    """Return all approximations with all numbers of points."""
    full = Laplace(data.model, data.likelihood, "all", "full").fit(data.batches)
    full.optimize_prior_precision(tune_sigma_noise=data.likelihood == "regression")
    tuned = {"prior_precision": float(full.prior_precision), "sigma_noise": float(full.sigma_noise)}
    exact, evidence, nll = variances(full, data), float(full.log_marginal_likelihood()), score(full, data)
    rows = []
    for points in data.points:
        for kind, options in KINDS.items():
            if kind == "nystrom":
                options = options | {"rank": points * data.outputs}
            found = []
            for seed in range(seeds):
                start = time.process_time()
                la = Laplace(
                    data.model, data.likelihood, "all", "gp", n_subset=points, seed=seed, **tuned, **options
                ).fit(data.batches)
                bound = float(la.log_marginal_likelihood()) - evidence
                seconds = time.process_time() - start
                ratios = (variances(la, data) / exact).quantile(torch.tensor([0.05, 0.5, 0.95], dtype=torch.float64))
                value = score(la, data) - nll
                la.optimize_prior_precision(tune_sigma_noise=data.likelihood == "regression")
                prior = float(la.prior_precision) / tuned["prior_precision"]
                found.append((*ratios.tolist(), bound, value, seconds, prior))
            rows.append(Row(data.name, kind, points, *map(statistics.median, zip(*found, strict=True))))
            print(rows[-1], flush=True)
    return rows


def variances(la: Laplace, data: Data) -> Tensor:
    """Return the variances of the linearised outputs at the test inputs, (N, C)."""
    return la.predict(data.x_test, progress_bar=False).outputs.variance.double()


def score(la: Laplace, data: Data) -> float:
    """Return the negative log-likelihood of the test data, in nats per example."""
    return -float(la.predict(data.x_test, progress_bar=False).distribution.log_prob(data.y_test).sum()) / len(
        data.y_test
    )


def as_markdown(rows: list[Row]) -> str:
    """Return the table of the page: few, some and many points."""
    lines = [
        "| data | M | approximation | variances / full's: 5 %, median, 95 % | log evidence - full's "
        "| its prior / full's | test NLL - full's | fit, CPU s |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        if row.points in (10, 40):
            ratios = f"{row.smallest:.2f}, {row.ratio:.2f}, {row.largest:.2f}"
            cells = (row.data, str(row.points), f"`{row.kind}`", ratios, f"{row.evidence:+.0f}")
            lines.append(f"| {' | '.join(cells)} | {row.prior:.2f} | {row.nll:+.3f} | {row.seconds:.2f} |")
    return "\n".join(lines)


def draw(rows: list[Row], path: Path) -> None:
    """Draw the ratio of variances, and the test score, against M."""
    mpl.use("agg")
    from matplotlib import pyplot as plt

    names = list(dict.fromkeys(row.data for row in rows))
    figure, axes = plt.subplots(2, len(names), figsize=(10, 7), sharex="col", layout="constrained")
    for column, name in enumerate(names):
        for number, kind in enumerate(KINDS):
            own = [row for row in rows if (row.data, row.kind) == (name, kind)]
            m, colour = [row.points for row in own], f"C{number}"
            axes[0, column].plot(m, [row.ratio for row in own], "o-", color=colour, label=kind)
            ends = ([row.smallest for row in own], [row.largest for row in own])
            axes[0, column].fill_between(m, *ends, color=colour, alpha=0.12, lw=0)
            axes[1, column].plot(m, [row.nll for row in own], "o-", color=colour, label=kind)
        for panel in axes[:, column]:
            panel.set(xscale="log", xticks=m, xticklabels=m)
            panel.minorticks_off()
            panel.grid(alpha=0.3)
        axes[0, column].axhline(1, color="0.3", lw=0.8)
        axes[1, column].axhline(0, color="0.3", lw=0.8)
        axes[0, column].set(yscale="log", title=name)
        axes[1, column].set(xlabel="points M")
    axes[0, 0].set_ylabel("predictive variances / full's\n(median; 5 % to 95 %)")
    axes[1, 0].set_ylabel("test NLL - full's, nats per example")
    axes[0, 0].legend()
    figure.savefig(path, dpi=130)
    plt.close(figure)


if __name__ == "__main__":
    main()
