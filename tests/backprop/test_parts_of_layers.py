"""Some parameters of a layer uncertain and others not: the curvature is that block of the whole one."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from torch import Tensor, nn

import oracle
from exact import assert_close, labels
from laplace import Laplace
from laplace.errors import ModelError
from networks import cut


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase], **options: object) -> None:
        super().__init__()
        self.layer = kind(3, 4, batch_first=True, **options)
        self.head = nn.Linear(4 * (1 + self.layer.bidirectional), 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x)[0].mean(1))


class Attention(nn.Module):
    def __init__(self, **options: int) -> None:
        super().__init__()
        self.layer = nn.MultiheadAttention(4, 2, batch_first=True, **options)
        self.q, self.k, self.v = (nn.Linear(3, options.get(key, 4)) for key in ("embed_dim", "kdim", "vdim"))
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(self.q(x), self.k(x), self.v(x))[0].mean(1))


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(3, 4), nn.Linear(4, 2)
        self.layer = nn.TransformerEncoderLayer(4, 2, 5, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(self.first(x)).mean(1))


class Products(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.act, self.norm = nn.Bilinear(3, 3, 4), nn.PReLU(), nn.LayerNorm(4)
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.act(self.layer(x[:, 0], x[:, 1]))))


class Beside(nn.Module):
    """A layer that also returns what depends on no weight."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(3))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return x.abs(), x * self.scale, torch.ones(x.shape[1])


class Several(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = Beside(), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        size, scaled, ones = self.layer(x)
        return self.head((size * scaled * ones.unsqueeze(1)).tanh().mean(1))


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.places, self.head = nn.Embedding(5, 4), nn.Embedding(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        ids = (2 * x[..., 0].abs()).long().clamp(max=4)
        return self.head((self.layer(ids) + self.places(torch.arange(4))).tanh().mean(1))


NETWORKS = {
    "rnn": lambda: Recurrent(nn.RNN),
    "gru, both directions": lambda: Recurrent(nn.GRU, bidirectional=True),
    "lstm, two layers": lambda: Recurrent(nn.LSTM, num_layers=2),
    "attention": Attention,
    "attention, separate projections": lambda: Attention(kdim=5, vdim=3),
    "encoder": Encoder,
    "bilinear": Products,
    "constant outputs": Several,
    "embeddings": Words,
}


def made(case: str) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    model = NETWORKS[case]().double().eval()
    return model, torch.randn(7, 4, 3, dtype=torch.float64), labels("regression", 7, 2)


@pytest.mark.parametrize("case", NETWORKS)
def test_curvature_of_some_parameters_is_their_block_of_the_whole(case):
    """Each alone, all biases, and all weights of the layer but the first; by name and by requires_grad."""
    model, x, y = made(case)
    names = [name for name, _ in model.named_parameters()]
    sizes = [p.numel() for p in model.parameters()]
    ends = dict(zip(names, zip(sizes, itertools.accumulate(sizes), strict=True), strict=True))
    _, whole = oracle.curvature_all(model, names, x, y, "regression", "ggn")
    subsets = [[name] for name in names if "layer" in name]
    subsets += [[n for n in names if "bias" in n], [n for n in names if "layer" in n][1:]]
    for i, subset in enumerate(filter(None, subsets)):
        index = torch.cat([torch.arange(ends[n][1] - ends[n][0], ends[n][1]) for n in subset])
        chosen = copy.deepcopy(model)
        for name, p in chosen.named_parameters():
            p.requires_grad_(name in subset)
        by_name = {"model": model, "subset_of_weights": subset}
        by_flag = {"model": chosen, "subset_of_weights": "all"}
        la = Laplace(likelihood="regression", hessian_structure="full", **(by_name if i % 2 else by_flag))
        assert_close(la.fit(cut(x, y, [4, 1, 2])).H, whole[index][:, index])
        assert not {row.rule for row in la.coverage().rows} & {"unused"}


@pytest.mark.parametrize("case", ["rnn", "attention", "attention, separate projections"])
def test_hessian_and_predictions_of_one_parameter_alone(case):
    model, x, y = made(case)
    name = {"rnn": "layer.weight_hh_l0", "attention": "layer.out_proj.weight"}.get(case, "layer.k_proj_weight")
    p = dict(model.named_parameters())[name]

    def loss(value: Tensor) -> Tensor:
        return (torch.func.functional_call(model, {name: value}, x) - y).pow(2).sum() / 2

    expected = torch.autograd.functional.hessian(loss, p.detach()).reshape(p.numel(), p.numel())
    la = Laplace(model, "regression", [name], "full", curvature="hessian", prior_precision=50.0).fit([(x, y)])
    assert_close(la.H, expected)
    jac = torch.autograd.functional.jacobian(lambda t: torch.func.functional_call(model, {name: t}, x), p.detach())
    jac = jac.flatten(2)  # (N, C, p)
    covariance = torch.linalg.inv(expected + 50 * torch.eye(p.numel(), dtype=torch.float64))
    assert_close(la(x)[1], torch.einsum("ncp,pq,ndq->ncd", jac, covariance, jac))


def test_bias_that_no_softmax_sees_has_no_curvature():
    model, x, y = made("attention")
    for curvature in ("ggn", "hessian"):
        la = Laplace(model, "regression", ["k.bias"], "full", curvature=curvature).fit([(x, y)])
        assert la.H.abs().max() < 1e-12


def test_layer_under_no_grad_is_still_refused():
    class Frozen(Recurrent):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                out = self.layer(x)[0]
            return self.head(out.mean(1))

    torch.manual_seed(0)
    model, x = Frozen(nn.GRU).double(), torch.randn(7, 4, 3, dtype=torch.float64)
    subset = ["layer.weight_hh_l0", "head.weight"]
    with pytest.raises(ModelError, match="no_grad"):
        Laplace(model, "regression", subset, "full").fit([(x, labels("regression", 7, 2))])
