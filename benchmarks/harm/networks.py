"""The networks and how they are trained: each has a last linear layer and gives that layer's features."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Protocol

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.functional import avg_pool2d, cross_entropy, mse_loss, pad, relu


class Headed(Protocol):
    """A network with a last linear layer."""

    head: nn.Linear

    def features(self, x: Tensor) -> Tensor: ...
    def __call__(self, x: Tensor) -> Tensor: ...


class Network(nn.Module):
    """A body and a linear head."""

    def __init__(self, body: nn.Module, head: nn.Linear) -> None:
        super().__init__()
        self.body, self.head = body, head

    def features(self, x: Tensor) -> Tensor:  # (N, H)
        return self.body(x)

    def forward(self, x: Tensor) -> Tensor:  # (N, C)
        return self.head(self.features(x))


def lenet() -> Network:
    """LeNet-5 with ReLU and max pooling: 61,706 weights."""
    body = nn.Sequential(
        nn.Conv2d(1, 6, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(),
    )  # fmt: skip
    return Network(body, nn.Linear(84, 10))


def small_cnn() -> Network:
    """Two strided convolutions and one hidden layer: 105,866 weights."""
    body = nn.Sequential(
        nn.Conv2d(1, 16, 3, stride=2, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.ReLU(),
        nn.Flatten(), nn.Linear(1568, 64), nn.ReLU(),
    )  # fmt: skip
    return Network(body, nn.Linear(64, 10))


def perceptron(inputs: int, hidden: tuple[int, ...], outputs: int) -> Network:
    """Hidden layers with ReLU."""
    sizes, layers = (inputs, *hidden), []
    for before, after in pairwise(sizes):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return Network(nn.Sequential(*layers), nn.Linear(sizes[-1], outputs))


class Block(nn.Module):
    """Two convolutions around which the input is carried, subsampled and padded with zero channels where needed."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(after)
        self.conv2 = nn.Conv2d(after, after, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(after)
        self.stride, self.more = stride, (after - before) // 2

    def forward(self, x: Tensor) -> Tensor:
        carried = x
        if self.more or self.stride > 1:
            carried = pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, self.more, self.more))
        return relu(self.bn2(self.conv2(relu(self.bn1(self.conv1(x))))) + carried)


class ResNet(nn.Module):
    """He's residual network for 32 x 32 images: 6 n + 2 layers."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16)
        self.layer1 = nn.Sequential(*(Block(16, 16, 1) for _ in range(n)))
        self.layer2 = nn.Sequential(*(Block(32 if i else 16, 32, 1 if i else 2) for i in range(n)))
        self.layer3 = nn.Sequential(*(Block(64 if i else 32, 64, 1 if i else 2) for i in range(n)))
        self.linear = nn.Linear(64, 10)

    @property
    def head(self) -> nn.Linear:
        return self.linear

    def features(self, x: Tensor) -> Tensor:  # (N, 64)
        x = self.layer3(self.layer2(self.layer1(relu(self.bn1(self.conv1(x))))))
        return avg_pool2d(x, 8).flatten(1)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.features(x))


def trained_resnet(layers: int, file: Path) -> ResNet:
    """Return the residual network of a file of weights, ready to predict."""
    net = ResNet((layers - 2) // 6)
    net.load_state_dict(load_file(file), strict=False)  # files may lack the counters of BatchNorm
    return net.eval()


def train(
    net: nn.Module,
    x: Tensor,
    y: Tensor,
    *,
    steps: int,
    seed: int,
    lr: float = 1e-3,
    decay: float = 0.0,
    batch: int = 64,
) -> None:
    """Run Adam for `steps` batches with a learning rate that goes to 0 as a cosine; `decay` is L2 on all weights."""
    loss = mse_loss if y.is_floating_point() else cross_entropy
    optimizer = torch.optim.Adam(net.parameters(), lr=lr, weight_decay=decay)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    order, batch, left = torch.Generator().manual_seed(seed), min(batch, len(x)), torch.empty(0, dtype=torch.long)
    net.train()
    for _ in range(steps):
        if len(left) < batch:
            left = torch.randperm(len(x), generator=order)
        chosen, left = left[:batch], left[batch:]
        optimizer.zero_grad()
        loss(net(x[chosen]), y[chosen]).backward()
        optimizer.step()
        schedule.step()
    net.eval()


@torch.no_grad()
def features(net: Headed, x: Tensor, batch: int = 500) -> Tensor:
    """Return what the last layer sees, (N, H)."""
    return torch.cat([net.features(part) for part in x.split(batch)])
