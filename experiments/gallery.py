"""The reports of the documentation's gallery, on real data: FashionMNIST, and the power plant of the UCI sets.

    python experiments/gallery.py --data FOLDER [--out docs/gallery] [--only fashion_mnist power_plant] [--cache FOLDER]
    python experiments/gallery.py --picture docs/figures/report.png      # the top of the first page, by Chromium

FOLDER holds fashion_mnist.npz (x_train, y_train, x_test, y_test; uint8 images), mnist.npz, kmnist.npz and notmnist.npz
(x_test), and uci/power.npz (X, y, train_idx, test_idx). A few minutes of CPU time on one thread.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from data import arrays
from laplace import Laplace, report

CLOTHES = ["T-shirt", "trousers", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot"]
FEATURES = ["temperature", "vacuum", "pressure", "humidity"]  # in standard deviations
UNKNOWN = {"notMNIST": "notmnist", "MNIST": "mnist", "Kuzushiji-MNIST": "kmnist"}
VALIDATION, OUTSIDE = 2000, 2000
HOTTEST = 30.0  # degrees; hotter days are not trained on


def fashion_mnist(folder: str | None, out: Path, cache: Path | None) -> None:
    """A convolutional network, its last layer calibrated on 2,000 images; other images of the same size are unknown."""
    raw = arrays("fashion_mnist", folder)
    order = torch.randperm(len(raw["y_test"]), generator=torch.Generator().manual_seed(42))
    val, test = order[:VALIDATION], order[VALIDATION:]
    x, y = pixels(raw["x_test"]), torch.from_numpy(raw["y_test"]).long()
    train = DataLoader(
        TensorDataset(pixels(raw["x_train"]), torch.from_numpy(raw["y_train"]).long()),
        batch_size=128,
        shuffle=True,
        generator=torch.Generator().manual_seed(0),
    )
    model = nn.Sequential(
        nn.Conv2d(1, 24, 5, stride=2),
        nn.ReLU(),
        nn.Conv2d(24, 48, 3, stride=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(48 * 5 * 5, 96),
        nn.ReLU(),
        nn.Linear(96, 10),
    )
    trained(model, train, cache)
    la = Laplace(model, "classification").fit(train)
    print(la.calibrate([(x[val], y[val])]))
    noise = {
        sd: x[test] + sd * torch.randn(x[test].shape, generator=torch.Generator().manual_seed(1)) for sd in (0.1, 0.3)
    }
    found = report(
        la,
        (x[test], y[test]),
        ood={name: some(pixels(arrays(file, folder)["x_test"])) for name, file in UNKNOWN.items()},
        val_loader=[(x[val], y[val])],
        train_loader=train,
        shifts={"pixel noise, sd": {sd: (noisy, y[test]) for sd, noisy in noise.items()}},
        class_names=CLOTHES,
        title="FashionMNIST: how far can this network be trusted?",
        out=out / "fashion_mnist.html",
    )
    print(found)


def power_plant(folder: str | None, out: Path, cache: Path | None) -> None:
    """The output of a power plant on days below 30 degrees; hotter days are the unknown kind."""
    raw = arrays("uci/power", folder)
    x, y = (torch.from_numpy(raw[key]).float() for key in ("X", "y"))
    cool = x[:, FEATURES.index("temperature")] <= HOTTEST
    train, test = (torch.from_numpy(raw[key][0]).long() for key in ("train_idx", "test_idx"))
    train, test = train[cool[train]], test[cool[test]]
    train, val = train[: 9 * len(train) // 10], train[9 * len(train) // 10 :]
    centre, scale = x[train].mean(0), x[train].std(0)
    inputs, y = (x - centre) / scale, y.unsqueeze(1)
    model = nn.Sequential(nn.Linear(4, 50), nn.Tanh(), nn.Linear(50, 1), Scaled(y[train]))
    loader = DataLoader(
        TensorDataset(inputs[train], y[train]), 128, shuffle=True, generator=torch.Generator().manual_seed(0)
    )
    fit(model, loader, nn.functional.mse_loss, epochs=60)
    la = Laplace(model, "regression", "all", "full").fit(loader)
    print(la.calibrate([(inputs[val], y[val])]))
    hot = inputs[~cool], y[~cool]
    found = report(
        la,
        (inputs[test], y[test]),
        ood={"hotter than 30 degrees": hot[0]},
        val_loader=[(inputs[val], y[val])],
        train_loader=loader,
        shifts={"hotter than 30 degrees": hot},
        feature_names=FEATURES,
        class_names=["output in MW"],
        title="A power plant's output: how far can this network be trusted?",
        out=out / "power_plant.html",
    )
    print(found)


class Scaled(nn.Module):
    """Gives outputs the mean and spread of the targets."""

    def __init__(self, y: Tensor) -> None:
        super().__init__()
        self.register_buffer("centre", y.mean())
        self.register_buffer("scale", y.std())

    def forward(self, f: Tensor) -> Tensor:
        return self.centre + self.scale * f


def trained(model: nn.Module, loader: DataLoader, cache: Path | None) -> None:
    """Train the classifier, or load its weights if they were kept."""
    path = None if cache is None else cache / "gallery_fashion_mnist.safetensors"
    if path is not None and path.exists():
        model.load_state_dict(load_file(path))
        model.eval()
        return
    fit(model, loader, nn.functional.cross_entropy, epochs=12)
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(model.state_dict(), path)


def fit(model: nn.Module, loader: DataLoader, loss: object, epochs: int) -> None:
    """Train in place with Adam and a cosine schedule."""
    torch.manual_seed(0)
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    optimizer = torch.optim.Adam(model.parameters(), 2e-3, weight_decay=1e-5)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
    for epoch in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            value = loss(model(x), y)
            value.backward()
            optimizer.step()
        schedule.step()
        if epoch % max(1, epochs // 6) == 0:
            print(f"epoch {epoch + 1} of {epochs}: loss {value.item():.4f}", flush=True)
    model.eval()


def pixels(images: np.ndarray) -> Tensor:  # (N, 28, 28) -> (N, 1, 28, 28)
    return torch.from_numpy(images).float().div(255).unsqueeze(1)


def some(x: Tensor) -> Tensor:
    return x[torch.randperm(len(x), generator=torch.Generator().manual_seed(42))[:OUTSIDE]]


def picture(page: Path, out: Path) -> None:
    """Draw the top of a page, as a reader on a desktop sees it."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        tab = browser.new_page(viewport={"width": 1160, "height": 1000})
        tab.goto(page.resolve().as_uri())
        tab.screenshot(path=out)
        browser.close()


GALLERY = {"fashion_mnist": fashion_mnist, "power_plant": power_plant}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="the folder of the data")
    parser.add_argument("--out", type=Path, default=Path("docs/gallery"), help="where the pages go")
    parser.add_argument("--cache", type=Path, help="where the trained classifier is kept, to be read the next time")
    parser.add_argument("--only", nargs="*", choices=GALLERY, default=list(GALLERY))
    parser.add_argument("--picture", type=Path, help="draws the page of FashionMNIST that is there, and does no more")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.picture is not None:
        picture(arguments.out / "fashion_mnist.html", arguments.picture)
        arguments.only = []
    for name in arguments.only:
        GALLERY[name](arguments.data, arguments.out, arguments.cache)
