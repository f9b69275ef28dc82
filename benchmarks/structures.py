"""How far each structure is from the full posterior, and what it costs: the figures of docs/choosing-a-structure.md.

Two networks are trained on the digits of scikit-learn, small enough for the full GGN. Every structure gets the prior
precision of maximal evidence of the full posterior, so that only the structure differs.
"""

from __future__ import annotations

import argparse
import json
import math
import warnings
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Final

import matplotlib as mpl
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

import machine
from data import Batches, epoch, in_batches
from laplace import Laplace
from laplace.budget import in_bytes
from laplace.errors import LaplaceError, LaplaceWarning
from measure import best_seconds, use_one_thread, warmed

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "structures.json"
PAGE = HERE.parent / "docs" / "choosing-a-structure.md"
FIGURE = HERE.parent / "docs" / "figures" / "structures.png"
MARK = "<!-- measured -->"
TRAINING, BATCH = 1200, 100

OPTIONS: Final[dict[str, dict[str, Any]]] = {
    "full": {},
    "lowrank, rank 50": {"rank": 50},
    "lowrank, rank 400": {"rank": 400},
    "block": {},
    "inf, rank 100": {"rank": 100},
    "ekfac": {},
    "kron": {},
    "kron, reduce": {"weight_sharing": "reduce"},
    "kron, damping": {"damping": True},
    "diag": {},
    "gp, 200 points": {"n_subset": 200},
    "gp, Nyström 200": {"n_subset": 200, "functional_approximation": "nystrom", "rank": 200},
}


@dataclass(frozen=True)
class Row:
    """One structure on one network; distances are relative to the full posterior."""

    network: str
    structure: str
    covariance: float | None  # Frobenius norm of the difference of the covariances
    kl: float | None  # KL(full || this) per weight, in nats
    variance: float  # median relative error of the predictive variances
    epochs: float  # of a fit with its decompositions
    bytes: int  # of what is kept


def main() -> None:
    """Measure, write the results, the table of the page and its figure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--redraw", action="store_true", help="draw the last results again, measure nothing")
    parser.add_argument("--repeats", type=int, default=3, help="turns that compared things take, at least (default 3)")
    options = parser.parse_args()
    if options.redraw:
        draw([Row(**row) for row in json.loads(RESULTS.read_text())["results"]], FIGURE)
        return
    use_one_thread()
    warnings.simplefilter("ignore", LaplaceWarning)
    here = machine.describe()
    print(f"{here}\n", flush=True)
    rows = [
        row for name, make in {"MLP": mlp, "conv net": conv}.items() for row in measure(name, make(), options.repeats)
    ]
    found = {
        "date": datetime.now(timezone.utc).date().isoformat(),
        "machine": asdict(here),
        "results": [asdict(row) for row in rows],
    }
    RESULTS.write_text(json.dumps(found, indent=2) + "\n")
    draw(rows, FIGURE)
    before, _, rest = PAGE.read_text().partition(MARK)
    after = rest.partition(MARK)[2]
    PAGE.write_text(f"{before}{MARK}\n\n{as_markdown(rows)}\n\n{MARK}{after}")
    print(f"\n{as_markdown(rows)}\n\nWritten to {RESULTS}, {PAGE} and {FIGURE}")


def mlp() -> nn.Module:
    """1,930 weights."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 20), nn.Tanh(), nn.Linear(20, 20), nn.Tanh(), nn.Linear(20, 10))


def conv() -> nn.Module:
    """1,898 weights."""
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(),
        nn.MaxPool2d(2), nn.Flatten(), nn.Linear(64, 10),
    )  # fmt: skip


def measure(name: str, model: nn.Module, repeats: int) -> list[Row]:
    """All structures on a network."""
    batches, x_test = digits()
    train(model, batches)
    full = Laplace(model, "classification", "all", "full").fit(batches)
    full.optimize_prior_precision()
    delta = float(full.prior_precision)
    sigma, precision = full.posterior_covariance.double(), full.posterior_precision.double()
    variance = outputs(full, x_test)
    rows = []
    for label, options in OPTIONS.items():
        structure = label.partition(",")[0]

        def fit(structure: str = structure, options: dict[str, Any] = options) -> Laplace:
            la = Laplace(model, "classification", "all", structure, prior_precision=delta, **options)
            la.fit(batches).log_marginal_likelihood()
            return la

        try:
            la = fit()
        except LaplaceError as error:
            print(f"{name}, {label}: {error}", flush=True)
            continue
        seconds = best_seconds(
            {"epoch": warmed(lambda: epoch(model, batches)), "fit": lambda fit=fit: fit}, repeats, at_least=2.0
        )
        found = outputs(la, x_test)
        distance, kl = weight_space(la, sigma, precision)
        rows.append(
            Row(
                name, label, distance, kl, float(((found - variance).abs() / variance).median()),
                seconds["fit"] / seconds["epoch"], la.coverage().bytes,
            )
        )  # fmt: skip
        print(rows[-1], flush=True)
    return rows


def digits() -> tuple[Batches, Tensor]:
    """Training batches and test inputs, (N, 1, 8, 8)."""
    data = load_digits()
    x = torch.as_tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16
    y = torch.as_tensor(data.target)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    x, y = x[order], y[order]
    return in_batches(x[:TRAINING], y[:TRAINING], BATCH), x[TRAINING:]


def train(model: nn.Module, batches: Batches) -> None:
    """Adam with a little weight decay."""
    torch.manual_seed(0)
    for layer in model:
        if hasattr(layer, "reset_parameters"):
            layer.reset_parameters()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3, weight_decay=1e-4)
    for _ in range(40):
        for x, y in batches:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()


def outputs(la: Laplace, x: Tensor) -> Tensor:
    """The variances of the linearised outputs, (N, C)."""
    return la.predict(x, n_samples=2, progress_bar=False).outputs.variance.double()


def weight_space(la: Laplace, sigma: Tensor, precision: Tensor) -> tuple[float | None, float | None]:
    """The relative distance of the covariance to that of the full posterior, and KL(full || this) per weight."""
    try:
        own = la.posterior_covariance.double()
    except LaplaceError:  # a posterior over functions
        return None, None
    inverse = torch.linalg.inv(own)
    kl = 0.5 * ((inverse * sigma).sum() - len(sigma) + torch.logdet(own) + torch.logdet(precision))
    return float((own - sigma).norm() / sigma.norm()), float(kl) / len(sigma)


def as_markdown(rows: list[Row]) -> str:
    """The table of the page."""
    lines = [
        "| network | structure | covariance | KL per weight | predictive variances | fit, epochs | kept |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        kl = "-" if row.kl is None else f"{max(row.kl, 0):.2g}"
        errors = (_share(row.covariance), kl, _share(row.variance))
        cells = (row.network, f"`{row.structure}`", *errors, f"{row.epochs:.1f}", in_bytes(row.bytes))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def draw(rows: list[Row], path: Path) -> None:
    """Error of the predictive variances against the bytes that are kept, a panel per network."""
    mpl.use("agg")
    from matplotlib import pyplot as plt

    networks = list(dict.fromkeys(row.network for row in rows))
    figure, axes = plt.subplots(1, len(networks), figsize=(11, 4.6), sharey=True, layout="constrained")
    for panel, network in zip(axes, networks, strict=True):
        own = [row for row in rows if row.network == network]
        taken: list[tuple[float, float]] = []  # where labels begin, in decades
        for row in sorted(own, key=lambda row: -row.variance):
            error = max(row.variance, 1e-4)
            colour = "tab:blue" if row.kl is not None else "tab:orange"
            panel.scatter(row.bytes, error, s=28, color=colour, zorder=3)
            left = any(
                row.bytes < other.bytes < 2.5 * row.bytes and abs(other.variance - row.variance) < 0.1 for other in own
            )
            x, y = math.log10(row.bytes) + (-0.12 if left else 0.12), math.log10(error)
            while not left and any(abs(x - a) < 1.3 and abs(y - b) < 0.13 for a, b in taken):
                y -= 0.02
            if not left:
                taken.append((x, y))
            panel.annotate(
                row.structure, (row.bytes, error), (10**x, 10**y), fontsize=8, va="center",
                ha="right" if left else "left",
                arrowprops={"arrowstyle": "-", "lw": 0.4, "color": "0.5"},
            )  # fmt: skip
        panel.set(xscale="log", yscale="log", xlabel="bytes kept", title=network, xlim=(2e3, 5e9))
        panel.grid(alpha=0.3)
    axes[0].set_ylabel("median relative error of the predictive variances\n(1e-4: exact up to rounding)")
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _share(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.2g} %"


if __name__ == "__main__":
    main()
