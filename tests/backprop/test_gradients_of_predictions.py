"""enable_backprop: predictions of networks with attention and normed weights are differentiable in their inputs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import gradcheck
from torch.nn import functional as F
from torch.nn.utils.parametrizations import weight_norm

from exact import labels
from laplace import Laplace


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 2)
        self.layer = nn.TransformerEncoderLayer(4, 2, 5, batch_first=True, activation="gelu")

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.layer(self.first(x)).mean(1))


class OwnAttention(nn.Module):
    """A weight that no module owns, so that the network is run again for its gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 2)
        self.query = nn.Parameter(torch.randn(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).unsqueeze(1)
        return self.last(F.scaled_dot_product_attention(h @ self.query, h, h).mean((1, 2)))


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = weight_norm(nn.Linear(3, 4)), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).tanh().mean(1))


def fitted(kind: type[nn.Module], task: str, subset: str, structure: str) -> tuple[Laplace, Tensor]:
    torch.manual_seed(0)
    x = torch.randn(7, 3, 3, dtype=torch.float64)
    la = Laplace(kind().double(), task, subset, structure, enable_backprop=True)
    return la.fit([(x, labels(task, 7, 2))]), x[:2].clone().requires_grad_()


CASES = [("all", "diag"), ("all", "kron"), ("all", "gp"), ("last_layer", "kron")]


@pytest.mark.parametrize("kind", [Encoder, OwnAttention, Normed])
@pytest.mark.parametrize(("subset", "structure"), CASES)
def test_variances_are_differentiable(kind, subset, structure):
    la, x = fitted(kind, "regression", subset, structure)
    assert gradcheck(lambda t: la(t)[1].diagonal(dim1=1, dim2=2), (x,), atol=1e-6)


@pytest.mark.parametrize("kind", [Encoder, OwnAttention])
def test_probabilities_and_draws_are_differentiable(kind):
    la, x = fitted(kind, "classification", "all", "diag")
    assert gradcheck(la, (x,), atol=1e-6)

    def drawn(t: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(0)
        return la.predictive_samples(t, pred_type="nn", n_samples=2, generator=generator)

    assert gradcheck(drawn, (x,), atol=1e-6)
