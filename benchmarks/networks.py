"""The networks that are measured. Their weights are random: no time here depends on what was learnt."""

from __future__ import annotations

from torch import nn


def lenet() -> nn.Sequential:
    """LeNet for 28x28 images, (N, 1, 28, 28) -> (N, 10), in eval mode."""
    return nn.Sequential(
        nn.Conv2d(1, 6, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(16 * 4 * 4, 120),
        nn.ReLU(),
        nn.Linear(120, 84),
        nn.ReLU(),
        nn.Linear(84, 10),
    ).eval()


def mlp() -> nn.Sequential:
    """512-512-1000: one hidden layer and a thousand outputs, (N, 512) -> (N, 1000), in eval mode."""
    return nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 1000)).eval()
