"""Small float64 networks and data made on the spot, shared by the tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from laplace.structures import STRUCTURES


class Wrapped(nn.Module):
    """A network inside a network inside a network, whose output comes in a mapping."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        body = nn.Sequential(nn.Linear(4, 6), nn.Tanh())
        self.inner = nn.ModuleDict({"body": body, "head": nn.Sequential(nn.Dropout(0.5), nn.Linear(6, outputs))})

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"hidden": x, "logits": self.inner["head"](self.inner["body"](x))}


class Residual(nn.Module):
    """A residual network with BatchNorm and in-place ReLU, its head declared first."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.classifier = nn.Linear(5, outputs, bias=False)
        self.stem = nn.Linear(4, 5)
        self.block = nn.Sequential(nn.BatchNorm1d(5), nn.ReLU(inplace=True), nn.Linear(5, 5))

    def forward(self, x: Tensor) -> Tensor:
        h = self.stem(x)
        return self.classifier(h + self.block(h))


class Convolutional(nn.Module):
    """Two convolutions and a linear layer on 6x6 images."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Conv2d(3, 2, 2), nn.Tanh(), nn.Flatten())
        self.fc = nn.Linear(18, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.features(x.reshape(-1, 1, 6, 6)))


def mlp(outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 7), nn.Tanh(), nn.Linear(7, outputs))


NETWORKS: dict[str, tuple[Callable[[int], nn.Module], int]] = {
    "mlp": (mlp, 4),
    "wrapped": (Wrapped, 4),
    "residual": (Residual, 4),
    "conv": (Convolutional, 36),
}
TASKS = {"classification": 3, "regression": 2}
CLOSED = [name for name, made in STRUCTURES.items() if not made.rereads]  # structures that answer in closed form


class LogitsOnly(nn.Module):
    """The tensor out of a network that returns a mapping, so that autograd sees a plain function."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        out = self.net(x)
        return out["logits"] if isinstance(out, dict) else out


def make(network: str, task: str, seed: int = 0, n: int = 23) -> tuple[nn.Module, Tensor, Tensor]:
    """A network in eval mode with random weights, and n examples."""
    torch.manual_seed(seed)
    build, width = NETWORKS[network]
    model = build(TASKS[task]).double()
    x = torch.randn(n, width, dtype=torch.float64)
    model.train()
    model(x)  # moves the running statistics of BatchNorm away from their initial values
    model.eval()
    y = torch.randint(3, (n,)) if task == "classification" else torch.randn(n, 2, dtype=torch.float64)
    return model, x, y


def head_names(model: nn.Module) -> list[str]:
    """The parameters of the last layer of the networks above."""
    prefixes = ("2.", "inner.head.1.", "classifier.", "fc.")
    names = [k for k, _ in model.named_parameters()]
    prefix = next(p for p in prefixes if any(k.startswith(p) for k in names))
    return [k for k in names if k.startswith(prefix)]


def cut(x: Tensor, y: Tensor, sizes: list[int] | int) -> list[tuple[Tensor, Tensor]]:
    """Batches of the given sizes; the last size repeats."""
    sizes = [sizes] if isinstance(sizes, int) else list(sizes)

    def bounds() -> Iterator[tuple[int, int]]:
        start, i = 0, 0
        while start < len(x):
            stop = start + sizes[min(i, len(sizes) - 1)]
            yield start, min(stop, len(x))
            start, i = stop, i + 1

    return [(x[a:b], y[a:b]) for a, b in bounds()]


def split_task(task: str, seed: int = 0) -> tuple[nn.Module, list[tuple[Tensor, Tensor]], list[tuple[Tensor, Tensor]]]:
    """A network, training and validation batches, such that the best prior mostly lies inside a grid."""
    model, x, y = make("mlp", task, seed=seed, n=60)
    if task == "classification":  # an overconfident network
        y = torch.distributions.Categorical(logits=2 * model(x).detach()).sample()
        with torch.no_grad():
            model[2].weight.mul_(5)
    else:
        y = model(x).detach() + 0.9 * y
    return model, cut(x[:30], y[:30], 8), cut(x[30:], y[30:], 7)


class Tagger(nn.Module):
    """Labels each token from what came before it, so that padding behind a sequence changes nothing."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(3, 4), nn.Linear(4, outputs)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x).tanh()
        return self.head(h + h.cumsum(1) / torch.arange(1, x.shape[1] + 1).unsqueeze(1))
