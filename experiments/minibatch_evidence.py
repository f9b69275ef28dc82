"""Evidence by mini-batches: does `marglik_training` find the same prior and noise, and how much sooner?

    python experiments/minibatch_evidence.py [--quick] [--data FOLDER]

1. Small tanh networks (the data of online.py): `evidence='epochs'`, 'running' and 'bound'. How far are prior and noise
   from the optimum of the evidence at the final weights, what is lost by that, and how well does each predict?
2. With --data (or LAPLACE_DATA): a small CNN on all 60,000 images of Fashion-MNIST. CPU seconds, what tuning at the
   final weights would still gain, and test NLL.

Every row is written to experiments/results/minibatch-evidence-*.json once it is found; the same command goes on from
there.
"""

from __future__ import annotations

import argparse
import os
import time
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from data import VARIABLE, arrays
from laplace import Laplace, marglik_training
from online import BURN_IN, Data, arms, network, scores, wave
from rows import Rows, mean

IMAGES, TEST = 60_000, 2_000  # of Fashion-MNIST
SMALL: dict[str, dict[str, Any]] = {
    "epochs, every 5": {"marglik_frequency": 5},
    "running, every batch": {"evidence": "running"},
    "bound, every batch": {"evidence": "bound"},
    "bound, one batch of all data": {"evidence": "bound", "batch": 10_000},
}
CNN: dict[str, dict[str, Any]] = {
    "no tuning": {"n_epochs_burnin": 10_000},
    "bound, every batch, sketch": {"evidence": "bound", "curvature": "sketch"},
    "running, every 10 batches, sketch": {"evidence": "running", "marglik_frequency": 10, "curvature": "sketch"},
    "epochs, sketch": {"lr_hyp": 1.0, "curvature": "sketch"},  # 1: each look goes to its optimum
    "running, every 10 batches": {"evidence": "running", "marglik_frequency": 10},
    "running, every 50 batches": {"evidence": "running", "marglik_frequency": 50, "lr_hyp": 0.5},
    "epochs": {"lr_hyp": 1.0},
}


def train_small(
    task: str, data: Data, shape: tuple[int, int], structure: str, epochs: int, seed: int, how: str
) -> dict:
    """One small network, and the optimum of its evidence at the weights where training ended."""
    x, y, test_x, test_y = data
    options = {"batch": 50} | SMALL[how]
    generator = torch.Generator().manual_seed(seed)
    loader = DataLoader(TensorDataset(x, y), options.pop("batch"), shuffle=True, generator=generator)
    model = network(x.shape[1], 3 if task == "classification" else 1, *shape, seed)
    rest = {"n_epochs": epochs, "n_epochs_burnin": BURN_IN, "optimizer_kwargs": {"lr": 1e-2}, "generator": generator}
    start = time.process_time()
    la, *_ = marglik_training(model, loader, task, structure, **rest | options)
    row = {"how": how, "seed": seed, "cpu_seconds": time.process_time() - start} | scores(la, task, test_x, test_y)
    found, evidence = logarithms(la), float(la.log_marginal_likelihood())
    la.optimize_prior_precision(prior_structure="layerwise", tune_sigma_noise=task == "regression")
    best = logarithms(la)
    near = (best.abs() < 9) & (found.abs() < 9)  # a precision on its way to infinity has no optimum to compare with
    row |= {"log_evidence": evidence, "lost": float(la.log_marginal_likelihood()) - evidence}
    return row | {"distance": float((best - found)[near].abs().mean())}


def logarithms(la: Laplace) -> Tensor:
    """The logarithms of all prior precisions, and of the noise if there is one."""
    noise = [la.sigma_noise.log().reshape(1)] if la.likelihood.has_noise else []
    return torch.cat([la.prior_precision.log().double().reshape(-1), *noise])


def cnn() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 16, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(32 * 49, 64), nn.ReLU(), nn.Linear(64, 10),
    )  # fmt: skip


def train_cnn(folder: str, images: int, epochs: int, how: str) -> dict:
    """The CNN on images of Fashion-MNIST. The last fit, which all ways share, is timed apart."""
    whole = arrays("fashion_mnist", folder)
    x, test_x = ((torch.from_numpy(whole[f"x_{part}"]).float().unsqueeze(1) / 255 - 0.286) / 0.353 for part in PARTS)
    y, test_y = (torch.from_numpy(whole[f"y_{part}"]).long() for part in PARTS)
    test_x, test_y = test_x[:TEST], test_y[:TEST]
    generator, model = torch.Generator().manual_seed(0), cnn()
    data = TensorDataset(x[:images], y[:images])
    loader = DataLoader(data, batch_size=128, shuffle=True, generator=generator)
    with Timed() as fits:
        start = time.process_time()
        rest = {"n_epochs": epochs, "optimizer_kwargs": {"lr": 1e-3}, "generator": torch.Generator().manual_seed(1)}
        la, *_ = marglik_training(model, loader, **rest | CNN[how])
        seconds = time.process_time() - start
    row = {"how": how, "cpu_seconds": seconds - fits[-1], "last_fit": fits[-1]}
    row |= {"log_evidence": float(la.log_marginal_likelihood()), "prior_precision": la.prior_precision.tolist()}
    with torch.no_grad():
        logits = torch.cat([model(part) for part in test_x.split(500)])
    p = torch.cat([la(part, link_approx="probit") for part in test_x.split(200)])
    row |= {"network_nll": float(nn.functional.cross_entropy(logits, test_y))}
    row |= {"test_nll": float(-p.gather(1, test_y.unsqueeze(1)).log().mean())}
    row |= {"test_accuracy": float((p.argmax(1) == test_y).float().mean())}
    found = logarithms(la)
    la.optimize_prior_precision(prior_structure="layerwise")
    row |= {"lost": float(la.log_marginal_likelihood()) - row["log_evidence"]}
    return row | {"distance": float((logarithms(la) - found).abs().mean())}


PARTS = ("train", "test")


class Timed:
    """Notes the CPU seconds of each `Laplace.fit` in a list."""

    def __enter__(self) -> list[float]:
        fit, seconds = Laplace.fit, list[float]()
        self.fit = fit

        def timed(*args: Any, **kwargs: Any) -> Laplace:
            start = time.process_time()
            try:
                return fit(*args, **kwargs)
            finally:
                seconds.append(time.process_time() - start)

        Laplace.fit = timed  # type: ignore[method-assign]
        return seconds

    def __exit__(self, *_: object) -> None:
        Laplace.fit = self.fit  # type: ignore[method-assign]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one seed, few epochs, few images")
    parser.add_argument("--data", default=os.environ.get(VARIABLE), help="folder with fashion_mnist.npz")
    parser.add_argument("--only-cnn", action="store_true", help="leave the small networks out")
    args = parser.parse_args()
    quick = "-quick" if args.quick else ""
    if not args.only_cnn:
        settings = {"seeds": 1, "epochs": 30} if args.quick else {"seeds": 1, "epochs": 300}
        small(Rows(f"minibatch-evidence-small{quick}", settings), settings)
    if args.data:
        images, epochs = (1000, 1) if args.quick else (IMAGES, 3)
        rows = Rows(f"minibatch-evidence-cnn{quick}", {"images": images, "epochs": epochs})
        found = [rows.get(f"cnn/{how}", partial(train_cnn, args.data, images, epochs, how)) for how in CNN]
        print(f"\n{images:,} images of Fashion-MNIST, {epochs} epochs, batches of 128")
        heads = f"{'CPU s':>8s}{'last fit':>10s}{'log evidence':>14s}{'lost':>8s}{'distance':>10s}{'test NLL':>10s}"
        print(f"  {'':38s}{heads}{'network':>9s}")
        for row in found:
            print(
                f"  {row['how']:38s}{row['cpu_seconds']:8.0f}{row['last_fit']:10.0f}{row['log_evidence']:14.0f}"
                f"{row['lost']:8.1f}{row['distance']:10.3f}"
                f"{row['test_nll']:10.4f}{row['network_nll']:9.4f}"
            )
    else:
        print(f"\nFashion-MNIST was left out: say where fashion_mnist.npz is with --data FOLDER or {VARIABLE}=FOLDER.")


def small(rows: Rows, settings: dict) -> None:
    for task, make in (("regression", wave), ("classification", arms)):
        for shape, structure in (((2, 50), "kron"), ((1, 20), "full")):
            print(f"\n{task}, {shape[0]} x {shape[1]}, {structure}; mean of {settings['seeds']} seed(s)")
            print(f"  {'':30s}{'log evidence':>14s}{'lost':>8s}{'distance':>10s}{'test NLL':>10s}{'CPU s':>8s}")
            for how in SMALL:
                if structure == "kron" and how.startswith("bound, one"):
                    continue  # that is the evidence of full
                found = [
                    rows.get(
                        f"{task}/{shape[0]} x {shape[1]} {structure}/{how}/seed {seed}",
                        partial(train_small, task, make(seed), shape, structure, settings["epochs"], seed, how),
                    )
                    for seed in range(settings["seeds"])
                ]
                keys = ("log_evidence", "lost", "distance", "test_nll", "cpu_seconds")
                evidence, lost, distance, nll, seconds = (mean(found, key) for key in keys)
                print(f"  {how:30s}{evidence:14.1f}{lost:8.2f}{distance:10.3f}{nll:10.3f}{seconds:8.1f}")


if __name__ == "__main__":
    main()
