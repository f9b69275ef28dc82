"""Online evidence: what `marglik_training` finds without validation data.

    python experiments/online.py [--quick] [--data FOLDER]

1. Regression: the noise level, and the test negative log-likelihood beside networks with a fixed prior.
2. Classification (three spiral arms): the same.
3. Among networks of several depths and widths: does the one of highest evidence predict best?
4. With --data (or LAPLACE_DATA): UCI regression on the standard splits, as in uci.py.

Every row is written to experiments/results/online.json as it is found; the same command goes on from there.
"""

from __future__ import annotations

import argparse
import math
import os
import time
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import uci
from data import VARIABLE
from laplace import Laplace, marglik_training
from rows import Rows, mean

NOISE = 0.3
BURN_IN = 10  # epochs before the first tuning
FIXED = (1e-3, 1.0, 100.0)  # prior precisions that are not tuned
SHAPES = ((1, 5), (1, 50), (2, 5), (2, 50), (3, 50))  # depth and width of the hidden layers
Data = tuple[Tensor, Tensor, Tensor, Tensor]


def wave(seed: int) -> Data:
    """200 noisy points of a function with a bend, and 2,000 more to test on."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(2200, 1, generator=generator) * 6 - 3
    y = 2 * (1.5 * x).sin() + 0.3 * x.square() + NOISE * torch.randn(2200, 1, generator=generator)
    return x[:200], y[:200], x[200:], y[200:]


def arms(seed: int) -> Data:
    """300 points on three spiral arms that blur into each other, and 2,000 more to test on."""
    generator = torch.Generator().manual_seed(seed)
    y = torch.randint(3, (2300,), generator=generator)
    radius = 0.3 + 2.2 * torch.rand(2300, generator=generator)
    angle = y * 2 * math.pi / 3 + 1.6 * radius + 0.25 * torch.randn(2300, generator=generator)
    x = torch.stack([radius * angle.cos(), radius * angle.sin()], 1) + 0.1 * torch.randn(2300, 2, generator=generator)
    return x[:300], y[:300], x[300:], y[300:]


def network(inputs: int, outputs: int, depth: int, width: int, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    sizes = [inputs, *[width] * depth]
    layers = [layer for a, b in pairwise(sizes) for layer in (nn.Linear(a, b), nn.Tanh())]
    return nn.Sequential(*layers, nn.Linear(sizes[-1], outputs))


def train(task: str, data: Data, depth: int, width: int, epochs: int, seed: int, fixed: float | None = None) -> dict:
    """One network; `fixed` is a prior precision that is left as it is, with the noise of the training residuals."""
    x, y, test_x, test_y = data
    model = network(x.shape[1], 3 if task == "classification" else 1, depth, width, seed)
    loader = DataLoader(TensorDataset(x, y), batch_size=50, shuffle=True, generator=torch.Generator().manual_seed(seed))
    start = time.process_time()
    la, *_ = marglik_training(
        model,
        loader,
        task,
        n_epochs=epochs,
        marglik_frequency=5,
        n_epochs_burnin=BURN_IN if fixed is None else epochs,
        prior_prec_init=1.0 if fixed is None else fixed,
        sigma_noise_init=1.0,
        optimizer_kwargs={"lr": 1e-2},
    )
    if fixed is not None and task == "regression":
        la.sigma_noise = (model(x) - y).detach().square().mean().sqrt()
    row = {"prior": "tuned" if fixed is None else fixed, "depth": depth, "width": width, "seed": seed}
    row |= {"log_evidence": float(la.log_marginal_likelihood()), "cpu_seconds": time.process_time() - start}
    return row | scores(la, task, test_x, test_y)


def scores(la: Laplace, task: str, x: Tensor, y: Tensor) -> dict:
    if task == "classification":
        p = la(x, link_approx="mc")
        nll = -p.gather(1, y.unsqueeze(1)).log().mean()
        return {"test_nll": float(nll), "test_accuracy": float((p.argmax(1) == y).float().mean())}
    mean, variance = la(x, diagonal_output=True)
    normal = torch.distributions.Normal(mean, (variance + la.sigma_noise**2).sqrt())
    return {"test_nll": float(-normal.log_prob(y).mean()), "noise": float(la.sigma_noise)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one seed and few epochs")
    parser.add_argument("--data", default=os.environ.get(VARIABLE), help="folder with uci/<set>.npz")
    args = parser.parse_args()
    epochs = 60 if args.quick else 300
    settings = {"seeds": 1 if args.quick else 3, "epochs": epochs, "burn-in": BURN_IN}
    rows = Rows(f"online{'-quick' if args.quick else ''}", settings)
    for task, make, what in (
        ("regression", wave, f"200 points, true noise {NOISE}"),
        ("classification", arms, "300 points of 3 classes"),
    ):

        def find(name: str, depth: int, width: int, fixed: float | None = None) -> list[dict]:
            return [
                rows.get(f"{task}/{name}/seed {s}", partial(train, task, make(s), depth, width, epochs, s, fixed))  # noqa: B023
                for s in range(settings["seeds"])
            ]

        tuned = {f"{depth} x {width}": find(f"{depth} x {width}", depth, width) for depth, width in SHAPES}
        fixed = {f"{prior:g}": find(f"2 x 50, prior {prior:g}", 2, 50, prior) for prior in FIXED}
        print(f"\n{task}, {what}; mean of {settings['seeds']} seed(s)")
        report("prior, 2 x 50", {"tuned": tuned["2 x 50"], **fixed}, task)
        report("depth x width", tuned, task)
    if args.data:
        uci.report_all(args.data, args.quick)
    else:
        print(f"\nUCI regression was left out: say where uci/<set>.npz is with --data FOLDER or {VARIABLE}=FOLDER.")


def report(title: str, found: dict[str, list[dict]], task: str) -> None:
    """A table; the highest evidence and the lowest test NLL are marked."""
    last = "noise" if task == "regression" else "test_accuracy"
    evidence, nll = ({name: mean(rows, key) for name, rows in found.items()} for key in ("log_evidence", "test_nll"))
    print(f"  {title:16s}{'log evidence':>14s}{'test NLL':>12s}{last.replace('_', ' '):>16s}")
    for name, rows in found.items():
        most = "*" if evidence[name] == max(evidence.values()) else " "
        least = "*" if nll[name] == min(nll.values()) else " "
        print(f"  {name:16s}{evidence[name]:13.1f}{most}{nll[name]:11.3f}{least}{mean(rows, last):16.3f}")


if __name__ == "__main__":
    main()
