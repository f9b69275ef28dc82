"""Small float64 networks with every trap that an engine for all weights has to survive."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn


class GroupedConv(nn.Module):
    """Strided, dilated, padded and grouped convolutions, circular padding, a frozen bias."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.a = nn.Conv2d(2, 4, 3, stride=2, padding=1)
        self.b = nn.Conv2d(4, 6, (2, 3), padding=(1, 2), dilation=(1, 2), groups=2, padding_mode="circular")
        self.c = nn.Conv2d(6, 3, 1, bias=False)
        self.fc = nn.Linear(3, outputs)
        self.a.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu_(self.a(x.reshape(-1, 2, 6, 5)))
        h = torch.tanh(self.b(h))
        return self.fc(self.c(h).mean((2, 3)))


class ResidualNorms(nn.Module):
    """BatchNorm, GroupNorm, LayerNorm, in-place ReLU and in-place addition, a layer called twice."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.conv = nn.Conv1d(1, 4, 3, padding=1)
        self.bn = nn.BatchNorm1d(4)
        self.block = nn.Conv1d(4, 4, 3, padding=1)
        self.gn = nn.GroupNorm(2, 4)
        self.ln = nn.LayerNorm(8)
        self.twice = nn.Linear(8, 8)
        self.out = nn.Linear(8, outputs)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu_(self.bn(self.conv(x.unsqueeze(1))))
        h = self.gn(self.block(h)) + h
        h += 1.0
        h = self.ln(h).mean(1)
        h = torch.tanh(self.twice(h))
        return self.out(torch.tanh(self.twice(h)))


class Transformer(nn.Module):
    """Embeddings, a position embedding looked up once for the batch, attention, a raw parameter."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.token = nn.Embedding(11, 6)
        self.position = nn.Embedding(5, 6)
        self.cls = nn.Parameter(torch.randn(1, 1, 6))
        self.layer = nn.TransformerEncoderLayer(6, 2, 8, dropout=0.1, batch_first=True)
        self.head = nn.Linear(6, outputs)

    def forward(self, x: Tensor) -> Tensor:
        ids = x.long() % 11
        h = self.token(ids) + self.position(torch.arange(ids.shape[1]).unsqueeze(0))
        h = torch.cat([self.cls.expand(len(h), -1, -1), h], 1)
        return self.head(self.layer(h)[:, 0])


class Tied(nn.Module):
    """One tensor in two linear layers, and another in an embedding and the head."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(outputs, 4)
        self.up, self.down = nn.Linear(4, 4), nn.Linear(4, 4)
        self.down.weight = self.up.weight
        self.head = nn.Linear(4, outputs, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x.long() % self.embed.num_embeddings).sum(1)
        return self.head(torch.tanh(self.down(torch.tanh(self.up(h)))))


class Recurrent(nn.Module):
    """An LSTM with time first, and inputs flattened to (N*T, .) on the way."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.inp = nn.Linear(2, 3)
        self.lstm = nn.LSTM(3, 4)
        self.head = nn.Linear(4, outputs)

    def forward(self, x: Tensor) -> Tensor:
        n = len(x)
        h = torch.tanh(self.inp(x.reshape(n * 3, 2))).reshape(n, 3, 3).transpose(0, 1)
        return self.head(self.lstm(h)[0][-1])


class Functional(nn.Module):
    """Weights used without calling their module, PReLU, a bilinear form, an unused layer."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 5), nn.Linear(5, 5)
        self.act, self.bi = nn.PReLU(), nn.Bilinear(5, 5, 3)
        self.unused = nn.Linear(2, 2)
        self.head = nn.Linear(3, outputs)

    def forward(self, x: Tensor) -> Tensor:
        h = self.act(nn.functional.linear(x, self.a.weight, self.a.bias))
        return self.head(self.bi(h, torch.tanh(self.b(h))))


def mlp(outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 5), nn.ReLU(inplace=True), nn.Linear(5, outputs))


ZOO: dict[str, tuple[Callable[[int], nn.Module], Callable[[int], Tensor]]] = {
    "mlp": (mlp, lambda n: torch.randn(n, 4)),
    "conv": (GroupedConv, lambda n: torch.randn(n, 60)),
    "residual": (ResidualNorms, lambda n: torch.randn(n, 8)),
    "transformer": (Transformer, lambda n: torch.randint(11, (n, 4)).float()),
    "tied": (Tied, lambda n: torch.randint(9, (n, 3)).float()),
    "recurrent": (Recurrent, lambda n: torch.randn(n, 6)),
    "functional": (Functional, lambda n: torch.randn(n, 4)),
}


def build(network: str, task: str, n: int = 11, seed: int = 0) -> tuple[nn.Module, Tensor, Tensor, list[str]]:
    """A network in eval mode, n examples, and the names of the parameters that require grad."""
    torch.manual_seed(seed)
    outputs = {"classification": 3, "regression": 2}[task]
    make, data = ZOO[network]
    model = make(outputs).double()
    x = data(n).double()
    model.train()
    model(x)
    model.eval()
    y = torch.randint(outputs, (n,)) if task == "classification" else torch.randn(n, outputs, dtype=torch.float64)
    return model, x, y, [k for k, p in model.named_parameters() if p.requires_grad]
