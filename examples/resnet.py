"""A ResNet classifier: is it as sure as it should be, and does it notice what it has never seen?

Convolutions, BatchNorm and shortcuts, trained on noisy 8x8 digits, of which 8 and 9 are kept away. First the last
layer is made Bayesian, then all weights, each with prior precisions by evidence and by validation.

    python examples/resnet.py [--quick]
"""

from __future__ import annotations

import argparse
import warnings

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from laplace import Laplace
from laplace.evaluation import accuracy, auroc, confidence, ece, nll


class Block(nn.Module):
    """Two convolutions and a way around them."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.around = nn.Sequential()
        if stride != 1 or inputs != outputs:
            self.around = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.bn1(self.conv1(x)))
        return torch.relu(self.bn2(self.conv2(h)) + self.around(x))


class ResNet(nn.Module):
    """A stem, three blocks, and a linear layer on the mean over the image."""

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
        self.blocks = nn.Sequential(Block(width, width, 1), Block(width, 2 * width, 2), Block(2 * width, 4 * width, 2))
        self.head = nn.Linear(4 * width, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


def digits(noise: float = 0.5) -> tuple[TensorDataset, TensorDataset, TensorDataset, Tensor]:
    """Noisy images of 0 to 7 to train, to tune and to test on, and those of 8 and 9."""
    data = load_digits()
    x = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16
    x, y = x + noise * torch.randn_like(x), torch.tensor(data.target)
    order = torch.randperm(len(x))
    x, y = x[order], y[order]
    known = y < 8
    sizes = (700, 200, int(known.sum()) - 900)
    parts = zip(x[known].split(sizes), y[known].split(sizes), strict=True)
    train_data, val_data, test_data = (TensorDataset(*part) for part in parts)
    return train_data, val_data, test_data, x[~known]


def train(model: nn.Module, data: TensorDataset, epochs: int) -> None:
    """Adam, in mini-batches."""
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(epochs):
        for x, y in DataLoader(data, batch_size=64, shuffle=True):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    model.eval()


def scores(p: Tensor, y: Tensor, p_unseen: Tensor) -> dict[str, float]:
    """Of the probabilities of the test images and of the images of unseen digits."""
    return {
        "accuracy": accuracy(p, y),
        "confidence": confidence(p),
        "nll": nll(p, y),
        "ece": ece(p, y),
        "unseen": confidence(p_unseen),
        "auroc": auroc(-p.amax(1), -p_unseen.amax(1)),
    }


def main(quick: bool = False) -> dict[str, dict[str, float]]:
    """Scores of the network, and of its last layer and all its weights with precisions found in three ways."""
    torch.manual_seed(0)
    train_data, val_data, test_data, x_unseen = digits()
    x, y = test_data.tensors
    if quick:
        x, y, x_unseen, val_data = x[:200], y[:200], x_unseen[:100], TensorDataset(*val_data[:100])
    print("Is a classifier as sure as it should be, and does it notice what it has never seen?")
    print(
        f"{len(train_data)} noisy images of 0 to 7 to train on, {len(val_data)} to tune on, {len(y)} to test on;"
        f" {len(x_unseen)} of 8 and 9.\n"
    )
    model = ResNet(width=4 if quick else 8, classes=8)
    train(model, train_data, epochs=20 if quick else 30)
    with torch.no_grad():
        rows = {"network": scores(model(x).softmax(1), y, model(x_unseen).softmax(1))}

    train_loader = DataLoader(train_data, batch_size=128)  # what the network was trained on, in any order
    val_loader = DataLoader(val_data, batch_size=100)
    last = Laplace(model, "classification").fit(train_loader)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "kron keeps")  # BatchNorm has no Kronecker form: see every.coverage()
        every = Laplace(model, "classification", subset_of_weights="all").fit(train_loader)

    tunings = {
        "evidence": lambda la: la.tune(method="evidence"),
        "evidence, per tensor": lambda la: la.tune(method="evidence", prior_structure="layerwise"),
        "validation": lambda la: la.tune(method="validation", val_loader=val_loader, link_approx="mc"),
    }
    for which, la in {"last layer": last, "all weights": every}.items():
        for how, tune in tunings.items():
            tune(la)
            rows[f"{which}, {how}"] = scores(la(x, link_approx="mc"), y, la(x_unseen, link_approx="mc"))

    print(
        f"{'':33} {'accuracy':>8} {'confidence':>10} {'NLL':>6} {'ECE':>6} | 8 and 9: {'confidence':>10} {'AUROC':>6}"
    )
    for name, s in rows.items():
        print(
            f"{name:33} {s['accuracy']:8.1%} {s['confidence']:10.1%} {s['nll']:6.3f} {s['ece']:6.3f}"
            f" |          {s['unseen']:10.1%} {s['auroc']:6.3f}"
        )
    print(f"\nUncertain weights: {last.n_params:,} in the last layer, {every.n_params:,} in all.")
    print("ECE: mean distance between confidence and accuracy. AUROC: how well a low confidence tells 8 and 9 from")
    print("digits that were learned (0.5 is guessing).")
    best = min(rows, key=lambda name: rows[name]["nll"])
    print(f"The lowest NLL: {best}, {rows[best]['nll']:.3f}; the network alone has {rows['network']['nll']:.3f}.")
    return rows


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a smaller network, trained for less long")
    main(parser.parse_args().quick)
