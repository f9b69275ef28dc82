"""Compare rules that set the noise and the prior of a regression from the training data alone, on UCI's nine sets.

    python experiments/noise_rules.py --data FOLDER [--sets yacht energy ...] [--trainings short ...] [--quick]

FOLDER holds uci/<set>.npz as for experiments/uci.py. The network is d-64-64-1 with ReLU, inputs and targets are
standardised on the training split, at most 10,000 training examples. It is trained for four lengths of time, from
mildly overfitted to nearly interpolating: the longer the training, the smaller its residuals, and the less they say.

Splits 5 to 7 are measured (protein has five splits: 0 to 2). The shares of the rule 'between' were chosen on splits 0
to 4; 'auto' is `la.tune()`, whose rule has no number that was chosen. Reported are the share of test targets in their
interval of 90 %, its width and the negative log-likelihood, in units of the standardised target.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from data import arrays
from laplace import Laplace
from laplace.evaluation import interval_coverage
from rows import Rows, mean

SETS = ("boston", "concrete", "energy", "kin8nm", "naval", "power", "protein", "wine", "yacht")
TRAININGS = {  # steps of Adam, learning rate
    "short": (500, 1e-2),
    "gentle": (1500, 3e-3),
    "usual": (2000, 1e-2),
    "long": (10000, 1e-2),
}
MOST, FIRST, SPLITS, LEVEL = 10_000, 5, 3, 0.9
WHERE = {"last": "last_layer", "all": "all"}
SHARE = {"last": 0.5, "all": 0.25}  # of the evidence's log noise in the rule 'between'; the rest is the residuals'
SCORES = ("coverage", "width", "nll")


@dataclass(frozen=True)
class Training:
    """What a rule may look at besides the posterior that it sets.

    Attributes:
        x: inputs, (N, d).
        residuals: y - f(x) of the trained network, (N, 1).
        every: the posterior of all weights.
        share: of the evidence's log noise in the rule 'between'.
    """

    x: Tensor
    residuals: Tensor
    every: Laplace
    share: float

    @property
    def rms(self) -> float:
        """Return the root mean square of the residuals."""
        return rms(self.residuals)


def run(name: str, split: int, training: str, folder: str | None) -> dict:
    """Train one network and return the scores of every rule as '<weights>/<rule>/<score>'."""
    x, y, x_test, y_test = standardised(name, split, folder)
    model = trained(x, y, split, *TRAININGS[training]).double()
    x, y, x_test, y_test = (t.double() for t in (x, y, x_test, y_test))
    with torch.no_grad():
        residuals, error = y - model(x), y_test - model(x_test)
    found = {"train_rms": round(rms(residuals), 4), "test_rms": round(rms(error), 4)}

    def keep(rule: str, variance: Tensor) -> None:
        found.update(
            {f"{rule}/{key}": round(value, 4) for key, value in zip(SCORES, scored(error, variance), strict=True)}
        )

    keep("network/residual noise", residuals.square().mean().expand_as(error))
    keep("network/noise of the test", error.square().mean().expand_as(error))
    loader = DataLoader(TensorDataset(x, y), batch_size=500)
    fits = {where: Laplace(model, "regression", weights, "kron").fit(loader) for where, weights in WHERE.items()}
    for where, la in fits.items():
        for rule, apply in RULES.items():
            apply(la, Training(x, residuals, fits["all"], SHARE[where]))
            keep(f"{where}/{rule}", la.predict(x_test).total)
    return found


def by_evidence(la: Laplace, _: Training) -> None:
    """Set prior and noise by the joint maximum of the evidence."""
    la.tune("prior_precision", "sigma_noise", method="evidence")


def by_leave_one_out(la: Laplace, training: Training) -> None:
    """Set prior and noise by the leave-one-out score of the training data, on a grid of delta sigma^2.

    h = S / sigma^2 depends on delta sigma^2 alone. With sigma^2 = mean of r^2 / (1 - h) the score is, up to constants,
    log sigma^2 - mean of log (1 - h). Both terms grow with h. Kron's h can exceed 1, where there is no score.
    """
    found: list[tuple[float, float, float]] = []
    for ratio in torch.logspace(-4, 5, 19).tolist():
        la.sigma_noise, la.prior_precision = 1.0, ratio
        h = la(training.x, diagonal_output=True)[1]  # (N, 1)
        if float(h.max()) < 1:
            squared = float((training.residuals.square() / (1 - h)).mean())
            found.append((math.log(squared) - float(torch.log1p(-h).mean()), ratio, squared))
    _, ratio, squared = min(found)
    la.sigma_noise, la.prior_precision = math.sqrt(squared), ratio / squared


def by_residuals(la: Laplace, training: Training) -> None:
    """Take the root mean square of the residuals as the noise, and the prior by the evidence at that noise."""
    _hold(la, training.rms)


def by_absorbing(la: Laplace, training: Training) -> None:
    """Add to the squared residuals what all weights do not know of the outputs, on average over the training data."""
    _hold(training.every, training.rms)
    unknown = float(training.every(training.x, diagonal_output=True)[1].mean())
    _hold(la, math.sqrt(training.rms**2 + unknown))


def between(la: Laplace, training: Training) -> None:
    """Take a noise between the residuals' and that of the evidence of all weights, on the scale of its logarithm."""
    training.every.tune("prior_precision", "sigma_noise", method="evidence")
    upper = float(training.every.sigma_noise)
    _hold(la, training.rms ** (1 - training.share) * upper**training.share)


def auto(la: Laplace, _: Training) -> None:
    """Let the library choose: noise and width from the effective parameters of all weights."""
    la.sigma_noise = la.prior_precision = 1.0
    la.tune()


def _hold(la: Laplace, noise: float) -> None:
    la.sigma_noise = noise
    la.tune("prior_precision", method="evidence")


RULES: dict[str, Callable[[Laplace, Training], None]] = {
    "evidence": by_evidence,
    "leave one out": by_leave_one_out,
    "residuals": by_residuals,
    "absorbed": by_absorbing,
    "between": between,
    "auto": auto,
}


def rms(errors: Tensor) -> float:
    """Return the root mean square."""
    return float(errors.square().mean().sqrt())


def scored(error: Tensor, variance: Tensor) -> tuple[float, float, float]:
    """Return coverage, width and negative log-likelihood of N(f, variance)."""
    normal = torch.distributions.Normal(torch.zeros_like(error), variance.sqrt())
    half = normal.icdf(torch.full_like(error, (1 + LEVEL) / 2))
    return float(interval_coverage(-half, half, error)), float(2 * half.mean()), -float(normal.log_prob(error).mean())


def standardised(name: str, split: int, folder: str | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return training and test data, (N, d) and (N, 1), in units of the training split."""
    raw = arrays(f"uci/{name}", folder)
    x, y = torch.from_numpy(raw["X"]).double(), torch.from_numpy(raw["y"]).double().unsqueeze(1)
    train, test = (torch.from_numpy(raw[key][split]).long() for key in ("train_idx", "test_idx"))
    train = train[:MOST]
    x, y = ((t - t[train].mean(0)) / t[train].std(0).clamp(min=1e-8) for t in (x, y))
    return x[train].float(), y[train].float(), x[test].float(), y[test].float()


def trained(x: Tensor, y: Tensor, split: int, steps: int, rate: float) -> nn.Module:
    """Return the network after so many steps of Adam with batches of 64, a cosine schedule and weight decay 1e-4."""
    torch.manual_seed(1000 + split)
    model = nn.Sequential(nn.Linear(x.shape[1], 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=rate, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    order = torch.Generator().manual_seed(split)
    batches: list[Tensor] = []
    for _ in range(steps):
        if not batches:
            batches = list(torch.randperm(len(x), generator=order)[: len(x) // 64 * 64].split(64))
        rows = batches.pop()
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x[rows]), y[rows]).backward()
        optimizer.step()
        schedule.step()
    return model


def report_all(folder: str | None, quick: bool, sets: list[str], trainings: list[str]) -> None:
    """Measure all rows that are asked for, then print a table per training."""
    how = {"network": "d-64-64-1, ReLU", "steps and rates": {key: list(value) for key, value in TRAININGS.items()}}
    rows = Rows(f"noise-rules{'-quick' if quick else ''}", how | {"shares": SHARE})
    for training in trainings:
        table: dict[str, list[dict]] = {}
        for name in sets:
            available = len(arrays(f"uci/{name}", folder)["train_idx"])
            splits = range(FIRST, FIRST + SPLITS) if available >= FIRST + SPLITS else range(min(SPLITS, available))
            table[name] = [
                rows.get(f"{training}/{name}/split {s}", lambda n=name, s=s, t=training: run(n, s, t, folder))
                for s in list(splits)[: 1 if quick else None]
            ]
        show(training, table)


def show(training: str, table: dict[str, list[dict]]) -> None:
    """Print coverage by set, and means of all three scores over the sets."""
    rules = [key.removesuffix("/coverage") for key in next(iter(table.values()))[0] if key.endswith("/coverage")]
    heads = [*table, "mean", "width", "nll"]
    print(f"\n{training}: coverage of {LEVEL:.0%}\n{'':28s}", *(f"{head:>8s}" for head in heads))
    for rule in rules:
        cells = [mean(runs, f"{rule}/coverage") for runs in table.values()]
        whole = [sum(mean(runs, f"{rule}/{key}") for runs in table.values()) / len(table) for key in SCORES]
        print(f"{rule:28s}", *(f"{cell:8.3f}" for cell in (*cells, *whole)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="folder with uci/<set>.npz; else the environment variable LAPLACE_DATA")
    parser.add_argument("--sets", nargs="+", choices=SETS, default=list(SETS))
    parser.add_argument("--trainings", nargs="+", choices=TRAININGS, default=list(TRAININGS))
    parser.add_argument("--quick", action="store_true", help="one split of each set")
    args = parser.parse_args()
    report_all(args.data, args.quick, args.sets, args.trainings)


if __name__ == "__main__":
    main()
