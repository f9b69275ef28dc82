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
from laplace.evaluation import coverage

OPEN, CLOSE = 8.0, 20.0


def true_rate(hour: Tensor) -> Tensor:
    """Visitors per hour: a few in the morning, a peak at noon, a higher one at half past five."""
    return 2 + 9 * torch.exp(-((hour - 12) ** 2) / 3) + 16 * torch.exp(-((hour - 17.5) ** 2) / 4)


def scaled(hour: Tensor) -> Tensor:
    """Hours as the network takes them, about -1 to 1 while counts were taken."""
    return (hour - 14) / 6


def main(quick: bool = False) -> dict[str, Tensor]:
    """Rates at some hours with their intervals, and how often the intervals hold the true rate in opening hours."""
    torch.manual_seed(0)
    hours = OPEN + (CLOSE - OPEN) * torch.rand(200 if quick else 400, 1)
    counts = torch.poisson(true_rate(hours))
    x = scaled(hours)

    model = nn.Sequential(nn.Linear(1, 30), nn.Tanh(), nn.Linear(30, 30), nn.Tanh(), nn.Linear(30, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(1000 if quick else 1500):
        optimizer.zero_grad()
        nn.functional.poisson_nll_loss(model(x), counts).backward()  # its input is the logarithm of the rate
        optimizer.step()

    la = Laplace(model, "poisson", hessian_structure="full").fit(DataLoader(TensorDataset(x, counts), batch_size=100))
    la.tune()

    asked = torch.tensor([[9.0], [12.0], [15.0], [17.5], [19.5], [21.0], [22.0], [23.0]])
    prediction = la.predict(scaled(asked))
    lower, upper = prediction.interval(0.95)  # of the rate
    draws = prediction.distribution.sample((4000,))  # of counts: the rate's uncertainty and the Poisson noise
    most = draws.quantile(0.95, 0)

    print(f"{len(hours)} hours with their counts, all between {OPEN:g} and {CLOSE:g} o'clock.\n")
    print(
        f"{'hour':>5} {'true rate':>10} {'mean rate':>10} {'95 % interval':>15}"
        f" {'count, 95 % below':>18} {'counts seen':>12}"
    )
    for i in range(len(asked)):
        hour = float(asked[i])
        interval = f"{float(lower[i]):.1f} to {float(upper[i]):.1f}"
        seen = "yes" if OPEN <= hour <= CLOSE else "no"
        print(
            f"{hour:5.1f} {float(true_rate(asked[i])):10.1f} {float(prediction.mean[i]):10.1f} {interval:>15} "
            f"{float(most[i]):18.0f} {seen:>12}"
        )

    grid = torch.linspace(OPEN, CLOSE, 200).unsqueeze(1)
    held = coverage(*la.predict(scaled(grid)).interval(0.95), true_rate(grid))
    print(f"\nThe 95 % interval of the rate holds the true rate at {held:.0%} of the times of the opening hours.")
    return {
        "hour": asked.squeeze(1),
        "rate": prediction.mean.squeeze(1),
        "lower": lower.squeeze(1),
        "upper": upper.squeeze(1),
        "epistemic": prediction.epistemic.squeeze(1),
        "count_below": most.squeeze(1),
        "coverage": torch.tensor(held),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="fewer counts, less training")
    main(parser.parse_args().quick)
