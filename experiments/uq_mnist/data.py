"""Digits, rotated digits and images that are no digits of MNIST."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from benchmarks.harm.data import Folder
from torch import Tensor
from torch.nn.functional import affine_grid, grid_sample

CENTRE, SCALE = 0.1307, 0.3081
ANGLES = tuple(range(0, 181, 15))
VALIDATION = 2000  # digits of the test set, drawn with seed 42
OUTSIDE = {"emnist": "femnist_digits", "fmnist": "fashion_mnist", "kmnist": "kmnist"}


@dataclass(frozen=True)
class Digits:
    """Digits to train on, to validate and to test with, and inputs of other kinds."""

    train: tuple[Tensor, Tensor]
    validation: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    outside: dict[str, Tensor]

    def rotated(self, degrees: int) -> Tensor:
        """Return the test digits, rotated anticlockwise. Outside of the image is background."""
        return rotated(self.test[0], degrees)


def digits(folder: Folder, n_train: int | None = None, n_test: int | None = None) -> Digits:
    """Read the data; the first `n_train` and `n_test` of each set."""
    raw = folder.arrays("mnist")
    y = {part: torch.from_numpy(raw[f"y_{part}"]).long() for part in ("train", "test")}
    order = torch.randperm(len(y["test"]), generator=torch.Generator().manual_seed(42))
    validation, test = order[: min(VALIDATION, len(order) // 2)], order[min(VALIDATION, len(order) // 2) :][:n_test]
    x = pixels(raw["x_test"])
    outside = {name: pixels(_some(folder.arrays(file)["x_test"], n_test)) for name, file in OUTSIDE.items()}
    return Digits(
        (pixels(raw["x_train"][:n_train]), y["train"][:n_train]),
        (x[validation], y["test"][validation]),
        (x[test], y["test"][test]),
        outside,
    )


def pixels(x: np.ndarray) -> Tensor:  # (N, 28, 28) -> (N, 1, 28, 28)
    """Return images as the networks see them: all sets with the constants of MNIST."""
    return ((torch.from_numpy(x).float() / 255 - CENTRE) / SCALE).unsqueeze(1)


def rotated(x: Tensor, degrees: int) -> Tensor:  # (N, 1, 28, 28)
    """Rotate images around their centre with bilinear interpolation."""
    if not degrees:
        return x
    c, s = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    grid = affine_grid(torch.tensor([[[c, s, 0.0], [-s, c, 0.0]]]), [1, *x.shape[1:]], align_corners=False)
    ink = x * SCALE + CENTRE  # 0 is background
    turned = grid_sample(ink, grid.expand(len(x), -1, -1, -1), align_corners=False)
    return (turned - CENTRE) / SCALE


def _some(x: np.ndarray, n: int | None) -> np.ndarray:
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(42))
    return x[order[:n].numpy()]
