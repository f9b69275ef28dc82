"""Structures of the curvature on Fashion-MNIST: a small CNN trained with online evidence, all weights uncertain.

    python -m experiments.structures_fmnist --data DIR [--quick] [--seeds K] [--epochs E]

DIR holds fashion_mnist.npz, mnist.npz and kmnist.npz. Each structure trains its own network with `marglik_training`,
from the same start: the prior precision of each tensor is set by the evidence of that structure at two moments of the
training. Scored with 100 draws of the linearised network's outputs: test log-likelihood, accuracy, AUROC of digits and
characters by confidence, CPU seconds. MAP is the network that `diag` trained, without its posterior; "MAP, best
temperature" is the same with the softmax temperature that is best on the test images themselves: what is left to gain
by being more or less sure everywhere.
"""

from __future__ import annotations

import time
import warnings

import torch
from experiments.structures_fmnist import figure
from experiments.uq.report import markdown
from experiments.uq.scores import averaged
from experiments.uq.shuffled import Shuffled
from experiments.uq.start import Rows, Study, started
from torch import Tensor, nn

from laplace import Laplace, marglik_training
from laplace.evaluation import accuracy, auroc, nll
from laplace.rivals import Ensemble

ALONE = ("MAP", "MAP, best temperature")
STRUCTURES = ("diag", "kron", "ekfac", "block", "full")
PAPER = {"diag": (-0.302, 0.894, 0.832), "kron": (-0.282, 0.899, 0.836), "full": (-0.285, 0.898, 0.876)}
CENTRE, SCALE, BATCH = 0.286, 0.353, 128
Labelled = tuple[Tensor, Tensor]


def main(arguments: list[str] | None = None) -> None:
    """Run the study."""
    study = started("structures_fmnist", __doc__.splitlines()[0], arguments, seeds=3, epochs=8)
    n_train, n_test, epochs = *((256, 64) if study.quick else (20_000, 2000)), study.epochs
    rows = Rows(study.results, {"train": n_train, "test": n_test, "epochs": epochs})
    train, test = (images(study, "fashion_mnist", part, n) for part, n in (("train", n_train), ("test", n_test)))
    outside = {name: images(study, name, "test", n_test)[0] for name in ("mnist", "kmnist")}
    for seed in range(study.seeds):
        for structure in STRUCTURES:
            names = [structure, *(ALONE if structure == "diag" else ())]
            if not all(f"{name}/{seed}" in rows.rows for name in names):
                la, seconds = trained(study, structure, train, epochs, seed)
                if structure == "diag":
                    rows.get(f"{ALONE[0]}/{seed}", lambda la=la: measured(la.model, test, outside))
                    rows.get(f"{ALONE[1]}/{seed}", lambda la=la: rescaled(la.model, test, outside))
                rows.get(
                    f"{structure}/{seed}",
                    lambda la=la, s=seconds: measured(la, test, outside) | {"train_seconds": round(s, 2)},
                )
    table = summary(rows.rows)
    names = ["log_likelihood", "accuracy", "auroc", "predict_seconds", "train_seconds"]
    lines = []
    for name, row in table.items():
        cells = [f"{row[key]:.4f}" if key in row else "-" for key in names]
        lines.append([name, *cells, " / ".join(map(str, PAPER.get(name, ("-",))))])
    print(markdown(["structure", *names, "paper: log-lik / accuracy / AUROC"], lines))
    figure.draw(table, PAPER, study.results.with_suffix(".png"))


def summary(rows: dict[str, dict]) -> dict[str, dict]:
    """Return the mean over seeds of each structure, and of the network alone."""
    groups: dict[str, list[dict]] = {}
    for name, row in rows.items():
        groups.setdefault(name.split("/")[0], []).append(row)
    return {name: averaged(groups[name]) for name in (*ALONE, *STRUCTURES) if name in groups}


def images(study: Study, name: str, part: str, n: int) -> Labelled:
    """Return the first n images of a set, with the constants of Fashion-MNIST."""
    raw = study.folder.arrays(name)
    x = (torch.from_numpy(raw[f"x_{part}"][:n]).float() / 255 - CENTRE) / SCALE
    return x.unsqueeze(1), torch.from_numpy(raw[f"y_{part}"][:n]).long()


def small_cnn() -> nn.Sequential:
    """Return a CNN of 2,106 weights, few enough for the full structure."""
    return nn.Sequential(
        nn.Conv2d(1, 8, 5, stride=2), nn.Tanh(), nn.Conv2d(8, 8, 3, stride=2), nn.Tanh(), nn.Conv2d(8, 8, 3), nn.Tanh(),
        nn.Flatten(), nn.Linear(72, 10),
    )  # fmt: skip


def trained(study: Study, structure: str, data: Labelled, epochs: int, seed: int) -> tuple[Laplace, float]:
    """Train with the online evidence of one structure; goes on from its checkpoint if it was interrupted."""
    torch.manual_seed(seed)
    start, steps = time.process_time(), epochs * -(-len(data[0]) // BATCH)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        la, *_ = marglik_training(
            small_cnn(), Shuffled(data, len(data[0]), seed, BATCH), "classification", structure, n_epochs=epochs,
            marglik_frequency=max(1, epochs // 2), optimizer_kwargs={"lr": 5e-3},
            scheduler_cls=torch.optim.lr_scheduler.CosineAnnealingLR, scheduler_kwargs={"T_max": steps},
            checkpoint=study.cache.folder / f"{structure}_{seed}_{epochs}.safetensors", progress_bar=False,
        )  # fmt: skip
    return la, time.process_time() - start


def rescaled(network: nn.Module, test: Labelled, outside: dict[str, Tensor]) -> dict:
    """Return the scores of the network with the temperature that is best on the test images, and that temperature."""
    ensemble = Ensemble([network], "classification")
    found = ensemble.calibrate(test)
    return measured(ensemble, test, outside) | {"softmax_temperature": round(found.softmax_temperature, 4)}


def measured(source: Laplace | Ensemble | nn.Module, test: Labelled, outside: dict[str, Tensor]) -> dict:
    """Return the scores, and the CPU seconds of predicting the test set."""

    def probabilities(x: Tensor) -> Tensor:
        if isinstance(source, nn.Module):
            return source(x).detach().double().softmax(-1)
        p = source(x, link_approx="mc", n_samples=100, generator=torch.Generator().manual_seed(0)).double()
        return p / p.sum(-1, keepdim=True)

    start = time.process_time()
    known = probabilities(test[0])
    spent = time.process_time() - start
    apart = [auroc(1 - known.amax(-1), 1 - probabilities(x).amax(-1)) for x in outside.values()]
    return {
        "log_likelihood": round(-nll(known, test[1]), 5),
        "accuracy": accuracy(known, test[1]),
        "auroc": round(sum(apart) / len(apart), 5),
        "predict_seconds": round(spent, 2),
    }


if __name__ == "__main__":
    main()
