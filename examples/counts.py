"""Counts and rates: how many visitors come in an hour, and how sure is the network of that?

A small network gives the logarithm of a rate, and counts are Poisson distributed around it. Counts were taken from 8 to
20 o'clock; asked is also about the evening and the night.

    python examples/counts.py [--quick]
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from laplace import Laplace
from laplace.evaluation import interval_coverage

OPEN, CLOSE = 8.0, 20.0


def true_rate(hour: Tensor) -> Tensor:
    """Visitors per hour: a few in the morning, a peak at noon, a higher one at half past five."""
    return 2 + 9 * torch.exp(-((hour - 12) ** 2) / 3) + 16 * torch.exp(-((hour - 17.5) ** 2) / 4)


def scaled(hour: Tensor) -> Tensor:
    """Hours as the network takes them, about -1 to 1 while counts were taken."""
    return (hour - 14) / 6


def trained(hours: Tensor, counts: Tensor, steps: int) -> nn.Module:
    """A network that gives the logarithm of the rate."""
    model = nn.Sequential(nn.Linear(1, 30), nn.Tanh(), nn.Linear(30, 30), nn.Tanh(), nn.Linear(30, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.poisson_nll_loss(
            model(scaled(hours)), counts
        ).backward()  # its input is the logarithm of the rate
        optimizer.step()
        scheduler.step()
    return model


def fitted(model: nn.Module, hours: Tensor, counts: Tensor, subset: str, structure: str) -> Laplace:
    """A posterior with the prior precision of maximal evidence."""
    la = Laplace(model, "poisson", subset_of_weights=subset, hessian_structure=structure)
    la.fit(DataLoader(TensorDataset(scaled(hours), counts), batch_size=100))
    la.tune(method="evidence")
    return la


def show_rates(la: Laplace) -> dict[str, Tensor]:
    """Print the rates at some hours."""
    asked = torch.tensor([[9.0], [12.0], [15.0], [17.5], [19.5], [21.0], [22.0], [23.0]])
    prediction = la.predict(scaled(asked))
    lower, upper = prediction.interval(0.95)  # of the rate
    median = prediction.quantile(0.5)
    draws = prediction.distribution.sample((4000,))  # of counts: the rate's uncertainty and the Poisson noise
    most = draws.quantile(0.95, 0)
    print(f"{'hour':>4} {'counted':>8} {'truth':>6} {'median':>7} {'mean':>6} {'95 % interval':>14} {'95 % of y':>11}")
    for i, hour in enumerate(asked.flatten().tolist()):
        interval = f"{float(lower[i]):.1f} to {float(upper[i]):.1f}"
        counts = f"up to {float(most[i]):.0f}"
        print(
            f"{hour:4.1f} {'yes' if OPEN <= hour <= CLOSE else 'no':>8} {float(true_rate(asked[i])):6.1f}"
            f" {float(median[i]):7.1f} {float(prediction.mean[i]):6.1f} {interval:>14} {counts:>11}"
        )
    columns = {"hour": asked, "rate": median, "lower": lower, "upper": upper, "count_below": most}
    return {name: column.squeeze(1) for name, column in columns.items()}


def main(quick: bool = False) -> dict[str, Tensor]:
    """Rates at some hours with their intervals, and how often the intervals of some posteriors hold the true rate."""
    n, repeats, steps = (200, 1, 1000) if quick else (400, 6, 1500)
    print(f"How many visitors come in an hour? {n} hours were counted, all from {OPEN:g} to {CLOSE:g} o'clock.\n")
    kinds = {"last layer, full": ("last_layer", "full"), "all, kron": ("all", "kron"), "all, full": ("all", "full")}
    grid = torch.linspace(OPEN, CLOSE, 200).unsqueeze(1)
    held: dict[str, list[float]] = {name: [] for name in kinds}
    width: dict[str, list[float]] = {name: [] for name in kinds}
    found: dict[str, Tensor] = {}
    for repeat in range(repeats):
        torch.manual_seed(repeat)
        hours = OPEN + (CLOSE - OPEN) * torch.rand(n, 1)
        counts = torch.poisson(true_rate(hours))
        model = trained(hours, counts, steps)
        posteriors = {name: fitted(model, hours, counts, *kind) for name, kind in kinds.items()}
        if repeat == 0:
            found = show_rates(posteriors["all, full"])
        for name, la in posteriors.items():
            lower, upper = la.predict(scaled(grid)).interval(0.95)
            held[name].append(interval_coverage(lower, upper, true_rate(grid)))
            width[name].append(float((upper / lower).mean()))

    print(f"\nHow often a 95 % interval of the rate holds the true rate, from {OPEN:g} to {CLOSE:g} o'clock; ", end="")
    print(f"data drawn {repeats} times.\n" if repeats > 1 else "data drawn once.\n")
    print(f"{'uncertain':17} {'mean':>6} {'lowest':>7} {'upper / lower end':>18}")
    for name in kinds:
        mean = sum(held[name]) / repeats
        print(f"{name:17} {mean:6.0%} {min(held[name]):7.0%} {sum(width[name]) / repeats:18.2f}")
        found[name] = torch.tensor(mean)
    nearest = min(kinds, key=lambda name: abs(float(found[name]) - 0.95))
    print(f"\nNearest to 95 %: {nearest}.")
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="fewer counts, less training")
    main(parser.parse_args().quick)
