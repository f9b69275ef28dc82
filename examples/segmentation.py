"""Segmentation: at which pixels is the network unsure, and is it so for lack of data or because of the noise?

Images of discs and squares in noise are made here, with a class for each pixel: background, disc or square. Some pixels
were not labelled. A fully convolutional network gives outputs (N, C, H, W).

    python examples/segmentation.py [--quick]
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from laplace import Categorical, Laplace
from laplace.evaluation import accuracy, confidence, ece, nll

SIDE, CLASSES, UNLABELLED = 24, 3, 255


def images(n: int) -> tuple[Tensor, Tensor]:
    """n images with a disc and a square each, (n, 1, H, W), and the classes of their pixels, (n, H, W)."""
    row, column = torch.meshgrid(torch.arange(SIDE), torch.arange(SIDE), indexing="ij")
    centre, half = torch.randint(5, SIDE - 5, (2, n, 2, 1, 1)), torch.randint(3, 6, (2, n, 1, 1))
    down, right = (row - centre[:, :, 0]).abs(), (column - centre[:, :, 1]).abs()  # (2, n, H, W)
    classes = torch.zeros(n, SIDE, SIDE, dtype=torch.long)
    classes[(torch.maximum(down, right) <= half)[0]] = 2
    classes[(down.square() + right.square() <= half.square())[1]] = 1
    brightness = torch.tensor([0.0, 1.0, -1.0])[classes]
    return (brightness + 0.7 * torch.randn(n, SIDE, SIDE)).unsqueeze(1), classes


def at_borders(classes: Tensor) -> Tensor:  # (N, H, W) -> (N, H, W)
    """Where one of the 3x3 pixels around is of another class."""
    level = classes.float().unsqueeze(1)
    most, least = (nn.functional.max_pool2d(sign * level, 3, 1, 1) * sign for sign in (1, -1))
    return (most != least).squeeze(1)


def network(width: int) -> nn.Module:
    """Convolutions that see 9x9 pixels, and a linear layer at each pixel."""
    hidden = [layer for _ in range(3) for layer in (nn.Conv2d(width, width, 3, padding=1), nn.ReLU())]
    return nn.Sequential(nn.Conv2d(1, width, 3, padding=1), nn.ReLU(), *hidden, nn.Conv2d(width, CLASSES, 1))


def train(model: nn.Module, data: TensorDataset, steps: int) -> None:
    """Adam, in mini-batches; pixels without a label are left out of the loss."""
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    batches = DataLoader(data, batch_size=10, shuffle=True)
    for _ in range(steps // len(batches)):
        for x, y in batches:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y, ignore_index=UNLABELLED).backward()
            optimizer.step()


def picture(values: Tensor, top: float) -> list[str]:  # (H, W)
    """A line of characters for each row of pixels, darker for larger values."""
    shades = " .:-=+*#%@"
    levels = (values / top * len(shades)).long().clamp(0, len(shades) - 1)
    return ["".join(2 * shades[level] for level in row) for row in levels.tolist()]


def main(quick: bool = False) -> dict[str, dict[str, float]]:
    """Scores before and after, and mean uncertainties at the borders of shapes, inside of them, and elsewhere."""
    torch.manual_seed(0)
    x, y = images(10)
    y[torch.rand(y.shape) < 0.2] = UNLABELLED
    data = TensorDataset(x, y)
    model = network(width=8 if quick else 16)
    print("At which pixels is a segmentation unsure?")
    print(
        f"{len(x)} images of {SIDE}x{SIDE} pixels to train on; {(y != UNLABELLED).float().mean():.0%} are labelled.\n"
    )
    train(model, data, steps=300 if quick else 400)

    la = Laplace(model, Categorical(ignore_index=UNLABELLED), class_dim=1)
    la.fit(DataLoader(data, batch_size=10))
    la.tune(method="evidence")

    x_new, y_new = images(10 if quick else 100)
    with torch.no_grad():
        probabilities = {"network": model(x_new).softmax(1)}  # (N, C, H, W)
    probabilities["evidence"] = la(x_new, link_approx="mc")
    la.tune("temperature", method="validation", val_loader=[images(10)], link_approx="mc")
    prediction = la.predict(x_new, link_approx="mc")
    probabilities["validation"] = prediction.mean

    rows: dict[str, dict[str, float]] = {}
    print(f"{'new images':10} {'accuracy':>8} {'confidence':>10} {'NLL':>6} {'ECE':>6}")
    labels = y_new.flatten()
    for name, p in probabilities.items():
        p = p.movedim(1, -1).flatten(0, -2)  # every pixel is a row
        row = {
            "accuracy": accuracy(p, labels),
            "confidence": confidence(p),
            "nll": nll(p, labels),
            "ece": ece(p, labels),
        }
        print(f"{name:10} {row['accuracy']:8.1%} {row['confidence']:10.1%} {row['nll']:6.3f} {row['ece']:6.3f}")
        rows[name] = row
    print(
        f"Prior precision by evidence {float(la.prior_precision):.3g}, temperature by validation {la.temperature:.3g}."
    )

    border = at_borders(y_new)
    wrong = prediction.mean.argmax(1) != y_new
    places = {"borders": border, "inside": (y_new > 0) & ~border, "background": (y_new == 0) & ~border}
    print(f"\n{'pixels':10} {'share':>8} {'wrong':>8} {'epistemic':>10} {'aleatoric':>10}")
    for name, place in places.items():
        row = {
            "share": float(place.float().mean()),
            "wrong": float(wrong[place].float().mean()),
            "epistemic": float(prediction.epistemic[place].mean()),
            "aleatoric": float(prediction.aleatoric[place].mean()),
        }
        print(f"{name:10} {row['share']:8.1%} {row['wrong']:8.1%} {row['epistemic']:10.4f} {row['aleatoric']:10.4f}")
        rows[name] = row

    print("\nOne new image: its classes (o disc, # square), and its total uncertainty.\n")
    drawn = ["".join(2 * " o#"[label] for label in line) for line in y_new[0].tolist()]
    for left, right in zip(drawn, picture(prediction.total[0], float(prediction.total[0].max())), strict=True):
        print(f"|{left}|{right}|")
    times = rows["borders"]["epistemic"] / rows["inside"]["epistemic"]
    print(f"\nEpistemic uncertainty at borders is {times:.1f} times that inside of the shapes.")
    return rows


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a smaller network, less training, fewer images")
    main(parser.parse_args().quick)
