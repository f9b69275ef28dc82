"""The networks that are measured. Their weights are random: no time here depends on what was learnt."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F


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


def wide_mlp(outputs: int) -> nn.Sequential:
    """64-128-128-outputs, (N, 64) -> (N, outputs), in eval mode."""
    return _relu_mlp(64, 128, 128, outputs)


def digits_mlp() -> nn.Sequential:
    """784-100-100-10 for flattened 28x28 images, (N, 784) -> (N, 10), in eval mode."""
    return _relu_mlp(784, 100, 100, 10)


def tiny_mlp() -> nn.Sequential:
    """6-8-8-3, small enough for all its 155 weights together, (N, 6) -> (N, 3), in eval mode."""
    return _relu_mlp(6, 8, 8, 3)


def resnet20() -> nn.Sequential:
    """He's ResNet-20 for 32x32 images, (N, 3, 32, 32) -> (N, 10), in eval mode."""
    widths = [16, 16, 16, 16, 32, 32, 32, 64, 64, 64]
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        *(Residual(c, d) for c, d in pairwise(widths)),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, 10),
    ).eval()


class Residual(nn.Module):
    """Two convolutions around which the input is added, halved in size and padded with zero channels where wider."""

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        self.stride, self.wider = width // channels, width - channels
        self.conv1 = nn.Conv2d(channels, width, 3, stride=self.stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:  # (N, C, H, W) -> (N, D, H / stride, W / stride)
        out = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        shortcut = F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.wider))
        return F.relu(out + shortcut)


def _relu_mlp(*widths: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for i, o in pairwise(widths):
        layers += [nn.Linear(i, o), nn.ReLU()]
    return nn.Sequential(*layers[:-1]).eval()


def deep_resnet() -> nn.Module:
    """A ResNet of 24 blocks and 155 modules for 32x32 images, (N, 3, 32, 32) -> (N, 10), in eval mode."""
    return DeepResNet().eval()


class DeepResNet(nn.Module):
    """Blocks of two convolutions with BatchNorm, of 16, 32 and 64 channels."""

    def __init__(self) -> None:
        super().__init__()
        widths = [16] * 9 + [32] * 8 + [64] * 8
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU())
        self.body = nn.Sequential(*(ProjectedBlock(c, d) for c, d in pairwise(widths)))
        self.pool, self.flatten, self.fc = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.flatten(self.pool(self.body(self.stem(x)))))


class ProjectedBlock(nn.Module):
    """Two convolutions around which the input is added; a convolution of size 1 changes its width."""

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        stride = width // channels
        self.conv1 = nn.Conv2d(channels, width, 3, stride=stride, padding=1, bias=False)
        self.bn1, self.relu = nn.BatchNorm2d(width), nn.ReLU()
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.shortcut = nn.Conv2d(channels, width, 1, stride=stride, bias=False) if stride > 1 else None

    def forward(self, x: Tensor) -> Tensor:
        out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        return self.relu(out + (x if self.shortcut is None else self.shortcut(x)))


def small_transformer() -> nn.Module:
    """Two blocks of attention over 16 tokens of width 64, (N, 16, 64) -> (N, 10), in eval mode."""
    return SmallTransformer(64, 2).eval()


class SmallTransformer(nn.Module):
    """Attention with four heads and an MLP of four times the width, by linear layers alone; the mean of all tokens."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.heads = 4
        self.qkv = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(depth))
        self.out = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.up = nn.ModuleList(nn.Linear(width, 4 * width) for _ in range(depth))
        self.down = nn.ModuleList(nn.Linear(4 * width, width) for _ in range(depth))
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:  # (N, T, D) -> (N, 10)
        for qkv, out, up, down in zip(self.qkv, self.out, self.up, self.down, strict=True):
            q, k, v = qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
            x = x + out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
            x = x + down(F.gelu(up(x)))
        return self.head(x.mean(1))


def gpt(width: int = 768, depth: int = 6, outputs: int = 4, every: bool = False, vocabulary: int = 5000) -> nn.Module:
    """A GPT over up to 64 tokens, in eval mode: (N, T) -> (N, outputs) from the last token, or (N, T, outputs).

    46 million weights as it stands. The head is not tied to the embedding.
    """
    return GPT(width, depth, outputs, every, vocabulary).eval()


class GPT(nn.Module):
    """Blocks of causal attention and an MLP of four times the width, each after a LayerNorm and added to its input."""

    def __init__(self, width: int, depth: int, outputs: int, every: bool, vocabulary: int, length: int = 64) -> None:
        super().__init__()
        self.every = every  # whether all tokens have outputs, or only the last one
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(GPTBlock(width, width // 64) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, outputs, bias=False)

    def forward(self, ids: Tensor) -> Tensor:  # (N, T) -> (N, T, outputs) or (N, outputs)
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x if self.every else x[:, -1]))


class GPTBlock(nn.Module):
    """One block, with separate layers for queries, keys and values."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:  # (N, T, D) -> (N, T, D)
        h = self.norm1(x)
        q, k, v = (layer(h).unflatten(-1, (self.heads, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))
