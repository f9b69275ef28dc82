"""Structures of the curvature on Fashion-MNIST: a small CNN trained with online evidence, all weights uncertain.

    python -m experiments.structures_fmnist --data DIR [--quick] [--seeds K] [--epochs E]

DIR holds fashion_mnist.npz, mnist.npz and kmnist.npz. The network is trained once per seed with `marglik_training`
(diagonal); then each structure is fitted at its weights, and its prior precision is tuned by the evidence. Scored with
100 draws through the linearised network: test log-likelihood, accuracy, AUROC of digits and characters, CPU seconds.
"""

from __future__ import annotations

import time
import warnings

import torch
from experiments.uq.report import markdown
from experiments.uq.scores import averaged
from experiments.uq.start import Rows, Study, started
from torch import Tensor, nn

from laplace import Laplace, marglik_training
from laplace.evaluation import accuracy, auroc, nll

STRUCTURES = ("diag", "kron", "ekfac", "block", "full")
PAPER = {"diag": (-0.302, 0.894, 0.832), "kron": (-0.282, 0.899, 0.836), "full": (-0.285, 0.898, 0.876)}
CENTRE, SCALE, BATCH = 0.286, 0.353, 128
Labelled = tuple[Tensor, Tensor]


def main(arguments: list[str] | None = None) -> None:
    """Run the study."""
    study = started("structures_fmnist", __doc__.splitlines()[0], arguments)
    n_train, n_test, epochs = (256, 64, 1) if study.quick else (60_000, 2000, study.epochs)
    rows = Rows(study.results, {"train": n_train, "test": n_test, "epochs": epochs})
    sets = {part: images(study, "fashion_mnist", part, n) for part, n in (("train", n_train), ("test", n_test))}
    outside = {name: images(study, name, "test", n_test)[0] for name in ("mnist", "kmnist")}
    for seed in range(study.seeds):
        network = trained(study, sets["train"], epochs, seed)
        for structure in STRUCTURES:
            key = f"{structure}/{seed}"
            rows.get(key, lambda s=structure, net=network: measured(net, s, sets["train"], sets["test"], outside))
    lines = []
    for structure in STRUCTURES:
        row = averaged([rows.rows[f"{structure}/{seed}"] for seed in range(study.seeds)])
        paper = " / ".join(map(str, PAPER[structure])) if structure in PAPER else "-"
        lines.append([structure, *(f"{v:.4f}" for v in row.values()), paper])
    print(markdown(["structure", *rows.rows["diag/0"], "paper: log-lik / accuracy / AUROC"], lines))


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


def trained(study: Study, data: Labelled, epochs: int, seed: int) -> nn.Module:
    """Train with online evidence, or read the network."""
    torch.manual_seed(seed)
    network = small_cnn()

    def run() -> dict[str, Tensor]:
        batches = list(zip(data[0].split(BATCH), data[1].split(BATCH), strict=True))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            _, model, *_ = marglik_training(
                network, batches, hessian_structure="diag", n_epochs=epochs, marglik_frequency=max(1, epochs // 3),
                optimizer_kwargs={"lr": 1e-3},
            )  # fmt: skip
        return dict(model.state_dict())

    network.load_state_dict(study.cache.get(f"cnn_{seed}", run))
    return network.eval()


def measured(network: nn.Module, structure: str, train: Labelled, test: Labelled, outside: dict[str, Tensor]) -> dict:
    """Fit one structure and return its scores and CPU seconds."""
    batches, start = list(zip(train[0].split(BATCH), train[1].split(BATCH), strict=True)), time.process_time()
    la = Laplace(network, "classification", "all", structure).fit(batches)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        la.tune("prior_precision", method="evidence")
    fitted, start = time.process_time() - start, time.process_time()

    def probabilities(x: Tensor) -> Tensor:
        p = la(x, link_approx="mc", n_samples=100, generator=torch.Generator().manual_seed(0)).double()
        return p / p.sum(-1, keepdim=True)

    known = probabilities(test[0])
    predicted = time.process_time() - start
    apart = [auroc(-known.amax(-1), -probabilities(x).amax(-1)) for x in outside.values()]
    return {
        "log_likelihood": round(-nll(known, test[1]), 5),
        "accuracy": accuracy(known, test[1]),
        "auroc": round(sum(apart) / len(apart), 5),
        "fit_seconds": round(fitted, 2),
        "predict_seconds": round(predicted, 2),
    }


if __name__ == "__main__":
    main()
