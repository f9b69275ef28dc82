"""Draw docs/figures/regression.png: `python docs/figures/regression.py`; with --seeds 20, measure instead of drawing.

A tanh network is trained on 120 noisy points with a gap in the middle. All its weights become uncertain; prior and
noise are tuned by the evidence. The band is `prediction.interval(0.95)`: the interval of a new observation y.
"""
# ruff: noqa: T201

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor, nn

from laplace import Laplace
from laplace.evaluation import interval_coverage

NOISE = 0.1
# Of Okabe and Ito, distinct to colour-blind readers; PALE is the blue of the band, darkened for its label.
BLUE, PALE, ORANGE, BLACK = "#0072B2", "#5E9EC6", "#D55E00", "#222222"


def truth(x: Tensor) -> Tensor:
    """Return the function that the data comes from."""
    return torch.sin(2 * x) + x / 2


def observed(x: Tensor) -> Tensor:
    """Return the function with noise."""
    return truth(x) + NOISE * torch.randn(x.shape)


def fitted(seed: int, epochs: int = 3000) -> tuple[Tensor, Tensor, Laplace]:
    """Return the data, (120, 1) each, and the tuned posterior."""
    torch.manual_seed(seed)
    x = torch.cat([torch.rand(60, 1) * 2 - 3, torch.rand(60, 1) * 2 + 1])
    y = observed(x)
    model = nn.Sequential(nn.Linear(1, 50), nn.Tanh(), nn.Linear(50, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, weight_decay=1e-5)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
    for _ in range(epochs):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        schedule.step()
    la = Laplace(model, "regression", "all", "full").fit([(x, y)])
    la.tune("prior_precision", "sigma_noise", method="evidence")
    return x, y, la


def draw(path: Path) -> None:
    """Draw the band, the data and the truth."""
    from matplotlib.figure import Figure

    x, y, la = fitted(seed=0)
    grid = torch.linspace(-4, 4, 401).unsqueeze(-1)
    prediction = la.predict(grid)
    lower, upper = (end.squeeze(-1) for end in prediction.interval(0.95))
    at = grid.squeeze(-1)

    figure = Figure(figsize=(8, 4.6), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    axes.fill_between(at, lower, upper, color=BLUE, alpha=0.22, linewidth=0)
    axes.plot(at, prediction.mean.squeeze(-1), color=BLUE, linewidth=3)
    axes.plot(at, truth(at), color=ORANGE, linewidth=3, linestyle=(0, (3, 1.5)))
    axes.scatter(x, y, color=BLACK, s=22, zorder=3, linewidth=0)
    axes.set(xlim=(-4, 4), ylim=(-5.6, 5.6), xticks=range(-4, 5, 2), yticks=range(-4, 5, 2))
    axes.tick_params(labelsize=17, length=0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlabel("x", fontsize=19)
    axes.set_ylabel("y", fontsize=19, rotation=0, labelpad=10)
    labels = (("prediction", 4.6, BLUE), ("95 % interval", 3.6, PALE), ("truth", 2.6, ORANGE), ("data", 1.6, BLACK))
    for text, height, colour in labels:
        axes.text(-3.9, height, text, color=colour, fontsize=20, weight="bold")
    figure.savefig(path)


def measure(seeds: int) -> None:
    """Print the share of new points in their 95 % interval, and in that of the network alone with the true noise."""
    places = {"where there is data": (1, 3), "in the gap": (0, 1), "beyond, up to |x| = 4": (3, 4)}
    found: dict[str, list[tuple[float, float]]] = {place: [] for place in places}
    for seed in range(seeds):
        *_, la = fitted(seed)
        for place, (low, high) in places.items():
            x = (low + (high - low) * torch.rand(2000, 1)) * torch.rand(2000, 1).sub(0.5).sign()
            y, prediction = observed(x), la.predict(x)
            lower, upper = prediction.interval(0.95)
            known = 1.96 * NOISE
            found[place].append(
                (
                    interval_coverage(lower, upper, y),
                    interval_coverage(prediction.mean - known, prediction.mean + known, y),
                )
            )
    for place, values in found.items():
        band, alone = torch.tensor(values).mean(0).tolist()
        lowest = min(value for value, _ in values)
        print(f"{place:24}{100 * band:4.0f} %, lowest {100 * lowest:.0f} %; network alone {100 * alone:.0f} %")


def main() -> None:
    """Draw, or measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=0, help="measure the coverage over so many draws of the data")
    seeds = parser.parse_args().seeds
    torch.set_num_threads(1)
    if seeds:
        measure(seeds)
    else:
        draw(Path(__file__).with_suffix(".png"))


if __name__ == "__main__":
    main()
