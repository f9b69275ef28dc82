"""Measure what a Laplace approximation adds to a classifier: `python docs/figures/digits.py` prints the table.

A convolutional network learns scikit-learn's 8x8 digits 0 to 7 with pixel noise. It is scored on test digits, and by
how well it tells them from two kinds of unknown inputs: the digits 8 and 9, and patches of two photographs. Temperature
scaling of the network on the same validation images is the baseline that a posterior has to beat.
"""
# ruff: noqa: T201

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from sklearn.datasets import load_digits, load_sample_images
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from laplace import Laplace
from laplace.evaluation import accuracy, auroc, ece, nll

NOISE, TRAIN, VALIDATION = 0.3, 700, 200
Predict = Callable[[Tensor], tuple[Tensor, Tensor]]  # inputs -> probabilities (N, C), a score of uncertainty (N,)


def digits() -> tuple[Tensor, Tensor]:
    """Return all 1,797 images, (N, 1, 8, 8) with pixels in 0..1, and their digits, (N,)."""
    pixels, labels = load_digits(return_X_y=True)
    return torch.tensor(pixels / 16, dtype=torch.float32).reshape(-1, 1, 8, 8), torch.tensor(labels)


def photographs() -> Tensor:
    """Return 8x8 patches of two photographs, averaged over 4x4 pixels, (M, 1, 8, 8)."""
    grey = [torch.tensor(image, dtype=torch.float32).mean(-1) / 255 for image in load_sample_images().images]
    small = [nn.functional.avg_pool2d(image[None], 4)[0] for image in grey]
    return torch.cat([image.unfold(0, 8, 8).unfold(1, 8, 8).reshape(-1, 1, 8, 8) for image in small])


def trained(x: Tensor, y: Tensor) -> nn.Module:
    """Return a network of 38,000 weights, after 60 epochs of Adam."""
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1, stride=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(512, 64),
        nn.ReLU(),
        nn.Linear(64, 8),
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3, weight_decay=1e-4)
    for _ in range(60):
        for inputs, labels in DataLoader(TensorDataset(x, y), batch_size=64, shuffle=True):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
    return model


def alone(model: nn.Module, temperature: float = 1.0) -> Predict:
    """Predict by the network alone; its score of uncertainty is the entropy."""

    def predict(x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            probs = (model(x) / temperature).softmax(-1)
        return probs, torch.special.entr(probs).sum(-1)

    return predict


def scaled(model: nn.Module, x: Tensor, y: Tensor) -> Predict:
    """Predict by the network with the temperature that is best on validation images."""
    with torch.no_grad():
        logits = model(x)
    temperatures = torch.logspace(-1, 1.5, 200).tolist()
    return alone(model, min(temperatures, key=lambda t: nn.functional.cross_entropy(logits / t, y).item()))


def posterior(la: Laplace) -> Predict:
    """Predict by a posterior; its score of uncertainty is the epistemic one."""

    def predict(x: Tensor) -> tuple[Tensor, Tensor]:
        found = la.predict(x, n_samples=300, generator=torch.Generator().manual_seed(0))
        return found.mean, found.epistemic

    return predict


def run(seed: int) -> dict[str, list[float]]:
    """Return the scores of every method on one split of the data."""
    torch.manual_seed(seed)
    images, labels = digits()
    x, photos = images + NOISE * torch.randn(images.shape), photographs()
    photos = photos + NOISE * torch.randn(photos.shape)
    known = (labels < 8).nonzero().squeeze(-1)
    known = known[torch.randperm(len(known))]
    train, val, test = known[:TRAIN], known[TRAIN : TRAIN + VALIDATION], known[TRAIN + VALIDATION :]
    model = trained(x[train], labels[train])
    train_loader = DataLoader(TensorDataset(x[train], labels[train]), batch_size=100)
    val_loader = DataLoader(TensorDataset(x[val], labels[val]), batch_size=100)

    def scores(predict: Predict) -> list[float]:
        (inside, doubt), *outside = (predict(inputs) for inputs in (x[test], x[labels >= 8], photos))
        y = labels[test]
        found = [accuracy(inside, y), nll(inside, y), ece(inside, y)]
        for probs, far_doubt in outside:
            found += [auroc(-inside.amax(-1), -probs.amax(-1)), auroc(doubt, far_doubt)]
        return found

    rows = {"network": scores(alone(model)), "network, scaled": scores(scaled(model, x[val], labels[val]))}
    for weights in ("last_layer", "all"):
        for method in ("evidence", "tuned", "calibrated"):
            la = Laplace(model, "classification", weights).fit(train_loader)
            if method == "calibrated":
                la.calibrate(val_loader)
            else:
                la.tune(method="auto" if method == "tuned" else "evidence")
            rows[f"{weights}, {method}"] = scores(posterior(la))
    return rows


def main() -> None:
    """Print the mean of every score over the seeds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    seeds = parser.parse_args().seeds
    torch.set_num_threads(1)
    runs = [run(seed) for seed in range(seeds)]
    print("accuracy, NLL, ECE; AUROC of 8 and 9 by confidence and by uncertainty; the same of photographs")
    for name in runs[0]:
        values = torch.tensor([one[name] for one in runs])
        low, high = values.amin(0), values.amax(0)
        print(f"{name:24}" + "  ".join(f"{value:.3f}" for value in values.mean(0)))
        print(f"{'':24}" + "  ".join(f"{a:.2f}-{b:.2f}" for a, b in zip(low, high, strict=True)))


if __name__ == "__main__":
    main()
