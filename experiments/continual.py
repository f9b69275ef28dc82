"""Permuted MNIST, one task after another: how much is forgotten with no prior, a diagonal one, and Kronecker factors.

    python -m experiments.continual --data FOLDER [--quick] [--epochs E] [--results DIR] [--cache DIR]

FOLDER holds mnist.npz with x_train, y_train, x_test and y_test: images (uint8, N x 28 x 28) and labels.

Ten tasks, each MNIST with its pixels in another order, seen one after the other by a 784-100-100-10 network. Reported
is the accuracy over all tasks seen so far. Every task's training and every method's results are kept as they are made:
the same command goes on where it was interrupted.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from experiments.data import arrays
from experiments.rows import replace
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR

from laplace import Laplace, marglik_training

HERE = Path(__file__).parent
METHODS = ("map", "diag", "kron")
PAPER = {"map": 0.239, "diag": 0.822, "kron": 0.960}  # after ten tasks


@dataclass(frozen=True)
class Settings:
    """All that a result depends on."""

    tasks: int = 10
    examples: int = 60_000  # of each task
    epochs: int = 25  # of each task
    marglik_frequency: int = 5
    batch_size: int = 256
    lr: float = 1e-3  # with cosine decay to zero over each task
    prior_precision: float = 1e-3  # at the start; then one for all weights, tuned by the evidence on each task
    curvature: str = "ggn"
    seed: int = 0


QUICK = Settings(tasks=5, examples=10_000, epochs=10)


class Batches:
    """Shuffled batches of tensors; `generator` is what they are shuffled with."""

    def __init__(self, x: Tensor, y: Tensor, size: int, seed: int) -> None:
        self.x, self.y, self.size = x, y, size
        self.generator = torch.Generator().manual_seed(seed)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for index in torch.randperm(len(self.x), generator=self.generator).split(self.size):
            yield self.x[index], self.y[index]

    def __len__(self) -> int:
        return math.ceil(len(self.x) / self.size)


class PermutedMNIST:
    """Training and test data of each task; the first task has its pixels as they are."""

    def __init__(self, folder: str | None, settings: Settings) -> None:
        raw = arrays("mnist", folder)
        self.x, self.test = (torch.from_numpy(raw[k]).flatten(1).float() / 255 for k in ("x_train", "x_test"))
        self.y, self.test_y = (torch.from_numpy(raw[k]).long() for k in ("y_train", "y_test"))
        self.settings, generator = settings, torch.Generator().manual_seed(settings.seed)
        orders = [torch.randperm(784, generator=generator) for _ in range(settings.tasks - 1)]
        self.orders = [torch.arange(784), *orders]

    def training(self, task: int) -> Batches:
        n, seed = self.settings.examples, 1000 * self.settings.seed + task
        return Batches(self.x[:n][:, self.orders[task]], self.y[:n], self.settings.batch_size, seed)

    @torch.no_grad()
    def accuracy(self, model: nn.Module, task: int) -> float:
        found = model(self.test[:, self.orders[task]]).argmax(1)
        return float((found == self.test_y).float().mean())


def network(settings: Settings) -> nn.Module:
    torch.manual_seed(settings.seed)
    return nn.Sequential(nn.Linear(784, 100), nn.ReLU(), nn.Linear(100, 100), nn.ReLU(), nn.Linear(100, 10))


def train(model: nn.Module, loader: Batches, settings: Settings) -> None:
    """Without a prior: what is best for this task alone."""
    optimizer = torch.optim.Adam(model.parameters(), settings.lr)
    scheduler = CosineAnnealingLR(optimizer, settings.epochs * len(loader))
    for _ in range(settings.epochs):
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            scheduler.step()


def train_on_prior(model: nn.Module, loader: Batches, settings: Settings, method: str, before: Laplace | None, file):
    """With the posterior of the tasks before as prior; its precision is tuned on the way."""
    start = {"prior_prec_init": settings.prior_precision} if before is None else {"prior": before.as_prior()}
    la, *_ = marglik_training(
        model,
        loader,
        hessian_structure=method,
        optimizer_kwargs={"lr": settings.lr},
        scheduler_cls=CosineAnnealingLR,
        scheduler_kwargs={"T_max": settings.epochs * len(loader)},
        n_epochs=settings.epochs,
        prior_structure="scalar",
        marglik_frequency=settings.marglik_frequency,
        curvature=settings.curvature,
        checkpoint=file,
        **start,
    )
    return la


def run(method: str, data: PermutedMNIST, settings: Settings, results: Results) -> None:
    """One method over all tasks that are left."""
    model, la, file = network(settings), None, results.state(method)
    done = results.of(method)
    state = torch.load(file, weights_only=True) if done and file.exists() else {}
    if state.get("tasks") == len(done) > 0:
        model.load_state_dict(state["model"])
        if method != "map":
            la = Laplace(model, "classification", "all", method, curvature=settings.curvature)
            la.load_state_dict(state["la"])
    else:
        done.clear()
    for task in range(len(done), settings.tasks):
        start, loader = time.process_time(), data.training(task)
        if method == "map":
            train(model, loader, settings)
        else:
            training = file.with_suffix(f".task{task}.pt")
            la = train_on_prior(model, loader, settings, method, la, training)
            training.unlink(missing_ok=True)
        each = [data.accuracy(model, t) for t in range(task + 1)]
        row = {"mean": sum(each) / len(each), "each": each, "cpu_seconds": time.process_time() - start}
        done.append(row if la is None else row | {"prior_precision": float(la.prior_precision)})
        torch.save(
            {"tasks": len(done), "model": model.state_dict(), "la": None if la is None else la.state_dict()}, file
        )
        results.save()
        print(f"{method:5s} task {task + 1:2d}: {row['mean']:.3f}  ({row['cpu_seconds']:.0f} CPU seconds)", flush=True)


class Results:
    """Accuracies of each method after each task, in a file."""

    def __init__(self, name: str, settings: Settings, folder: Path, cache: Path) -> None:
        self.path, self.settings = folder / f"{name}.json", asdict(settings)
        self.states = cache / name
        self.states.mkdir(parents=True, exist_ok=True)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.methods: dict[str, list[dict]] = {}
        if self.path.exists():
            found = json.loads(self.path.read_text())
            if found["settings"] == self.settings:
                self.methods = found["methods"]

    def of(self, method: str) -> list[dict]:
        return self.methods.setdefault(method, [])

    def state(self, method: str) -> Path:
        return self.states / f"{method}.pt"

    def save(self) -> None:
        spent = sum(row["cpu_seconds"] for rows in self.methods.values() for row in rows)
        machine = f"{platform.machine()}, {os.cpu_count()} cores, one thread, torch {torch.__version__}"
        whole = {"settings": self.settings, "machine": machine, "paper_after_ten_tasks": PAPER}
        whole |= {"cpu_seconds": round(spent, 1), "methods": self.methods}
        replace(self.path, json.dumps(whole, indent=1) + "\n")

    def table(self) -> str:
        methods = [m for m in METHODS if self.methods.get(m)]
        lines = ["tasks  " + "  ".join(f"{m:>5s}" for m in methods)]
        for task in range(max(len(self.methods[m]) for m in methods)):
            cells = [f"{self.methods[m][task]['mean']:.3f}" if task < len(self.methods[m]) else "" for m in methods]
            lines.append(f"{task + 1:5d}  " + "  ".join(f"{c:>5s}" for c in cells))
        return "\n".join(lines)

    def draw(self) -> None:
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt

        figure, axes = plt.subplots(figsize=(5, 3.2), layout="constrained")
        for method in METHODS:
            means = [row["mean"] for row in self.methods.get(method, [])]
            axes.plot(range(1, len(means) + 1), means, marker="o", label=method)
        axes.set(xlabel="tasks seen", ylabel="accuracy over all of them", ylim=(0, 1.02))
        axes.legend(frameon=False)
        figure.savefig(self.path.with_suffix(".png"), dpi=150)


def main(arguments: list[str] | None = None) -> None:
    """Run the study."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="folder with mnist.npz; else the environment variable LAPLACE_DATA")
    parser.add_argument("--quick", action="store_true", help="fewer tasks and examples: five minutes on one thread")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS)
    parser.add_argument("--epochs", type=int, help="of each task; 25 unless said")
    parser.add_argument("--results", type=Path, default=HERE / "results", help="where the JSON and the figure go")
    parser.add_argument("--cache", type=Path, default=HERE / "state", help="where the networks of each method are kept")
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)  # CPU seconds are those of one core
    settings = QUICK if args.quick else Settings()
    if args.epochs is not None:
        settings = Settings(**asdict(settings) | {"epochs": args.epochs})
    data = PermutedMNIST(args.data, settings)
    results = Results("continual-quick" if args.quick else "continual", settings, args.results, args.cache)
    for method in args.methods:
        run(method, data, settings, results)
    results.draw()
    print(results.table())


if __name__ == "__main__":
    main()
