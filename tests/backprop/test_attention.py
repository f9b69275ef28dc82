"""Attention: its projections are linear layers, seen through the fused module, and every number is the oracle's."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import oracle
from exact import assert_close, assert_exact, assert_predicts_exactly, labels
from laplace import Laplace
from networks import cut

pytestmark = pytest.mark.filterwarnings(r"ignore:\w+ keeps:laplace.errors.LaplaceWarning")


class Attended(nn.Module):
    """Sequences (N, 4, 6) that attend to themselves, or to a shorter memory that is made of them."""

    def __init__(self, how: str = "self", batch_first: bool = True, **options: object) -> None:
        super().__init__()
        self.how, self.batch_first = how, batch_first
        self.attention = nn.MultiheadAttention(6, 2, batch_first=batch_first, **options)
        self.head = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        hidden = x[:, :, 0] > 1.0
        x = x if self.batch_first else x.transpose(0, 1)
        memory = x[:, :3] if self.batch_first else x[:3]
        causal = torch.ones(4, 4, dtype=torch.bool).triu(1)
        if self.how == "self":
            h = self.attention(x, x, x)[0]
        elif self.how == "cross":
            h = self.attention(x, memory.tanh(), memory, need_weights=False)[0]
        elif self.how == "cross, other widths":
            h = self.attention(x, memory[..., :3], memory[..., :5])[0]
        elif self.how == "padding":
            hidden[:, 0] = False
            h = self.attention(x, x, x, key_padding_mask=hidden)[0]
        elif self.how == "causal":
            h = self.attention(x, x, x, attn_mask=causal, is_causal=True, need_weights=False)[0]
        elif self.how == "both masks":
            hidden[:, 0] = False
            h = self.attention(x, x, x, hidden, False, causal)[0]
        elif self.how == "mask per head":
            mask = torch.zeros(len(hidden) * 2, 4, 4, dtype=torch.float64) - causal.double()
            h = self.attention(x, x, x, attn_mask=mask)[0]
        elif self.how == "weights":
            h, weights = self.attention(x, x, x, average_attn_weights=False)
            weights = weights.sum((1, 3)).unsqueeze(2)
            h = h * (weights if self.batch_first else weights.transpose(0, 1))
        else:
            h = self.attention(x, x, x)[0] + self.attention(x, x.tanh(), x)[0]
        return self.head(torch.tanh(h).mean(1 if self.batch_first else 0))


HOWS = ["self", "cross", "padding", "causal", "both masks", "mask per head", "weights", "both ways"]


def network(how, **options):
    torch.manual_seed(0)
    model = Attended(how, **options).double()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.3 * torch.randn_like(p))
    return model, torch.randn(8, 4, 6, dtype=torch.float64)


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("how", HOWS)
def test_curvature_is_exact(how, batch_first):
    model, x = network(how, batch_first=batch_first)
    task = "classification" if how == "self" else "regression"
    assert_exact(model, x, task, sizes=(5, 1, 2), kinds=("ggn",), rules=dict.fromkeys(RULED, "attention"))


RULED = ("attention", "attention.out_proj")


def test_without_biases_and_with_other_widths():
    model, x = network("self", bias=False)
    assert_exact(model, x, kinds=("ggn",), rules=dict.fromkeys(RULED, "attention"))
    model, x = network("cross, other widths", kdim=3, vdim=5)
    assert_exact(model, x, kinds=("ggn",), rules=dict.fromkeys(RULED, "attention"))


@pytest.mark.parametrize("options", [{"add_bias_kv": True}, {"add_zero_attn": True}])
def test_what_is_not_opened_is_exact_by_the_generic_rule(options):
    model, x = network("self", **options)
    assert_exact(model, x, kinds=("ggn",), rules={"attention": "generic in 'attention'"})


class Written(nn.Module):
    """The same self- or cross-attention in Linear modules."""

    def __init__(self, model: Attended) -> None:
        super().__init__()
        w, b = model.attention.in_proj_weight.detach(), model.attention.in_proj_bias.detach()
        self.how = model.how
        sizes = [18] if self.how == "self" else [6, 6, 6]
        self.inner = nn.ModuleList([nn.Linear(6, size).double() for size in sizes])
        for layer, wi, bi in zip(self.inner, w.split(sizes), b.split(sizes), strict=True):
            layer.weight, layer.bias = nn.Parameter(wi), nn.Parameter(bi)
        self.out, self.head = nn.Linear(6, 6).double(), copy.deepcopy(model.head)
        self.out.load_state_dict(model.attention.out_proj.state_dict())

    def forward(self, x: Tensor) -> Tensor:
        read = (x,) if self.how == "self" else (x, x[:, :3].tanh(), x[:, :3])
        parts = [layer(t) for layer, t in zip(self.inner, read, strict=True)]
        parts = parts[0].chunk(3, -1) if self.how == "self" else parts
        q, k, v = (t.unflatten(2, (2, 3)).transpose(1, 2) for t in parts)
        h = (q @ k.mT / 3**0.5).softmax(-1) @ v
        return self.head(torch.tanh(self.out(h.transpose(1, 2).flatten(2))).mean(1))


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize("how", ["self", "cross"])
def test_kronecker_factors_are_those_of_linear_layers(how, sharing):
    model, x = network(how)
    written = Written(model)
    assert_close(written(x), model(x))
    y, names = labels("regression", len(x), 2), [k for k, _ in written.named_parameters()]
    la = Laplace(model, "regression", "all", "kron", weight_sharing=sharing).fit(cut(x, y, [5, 1]))
    lam = torch.eye(2, dtype=torch.float64).expand(len(x), 2, 2)
    blocks = oracle.kron_all(written, names, x, lam, sharing)
    weights = [blocks[f"inner.{i}.weight"] for i in range(len(written.inner))]
    got = la.H.to_matrix()
    assert_close(got[:108, :108], torch.block_diag(*weights))
    assert_close(got[126:162, 126:162], blocks["out.weight"])
    assert_close(got[162:168, 162:168], blocks["out.bias"])
    _, h = oracle.curvature_all(model, ["attention.in_proj_bias"], x, y, "regression")
    assert_close(got[108:126, 108:126], h)
    assert la.coverage().rows[0].kept == ("kron 18 x 6" if how == "self" else "3 groups of kron 6 x 6")


@pytest.mark.parametrize("structure", ["kron", "ekfac", "inf", "diag"])
def test_every_structures_gaussian_gives_its_own_variances(structure):
    model, x = network("cross")
    la = Laplace(model, "regression", "all", structure).fit(cut(x, labels("regression", len(x), 2), 5))
    assert_predicts_exactly(la, copy.deepcopy(model).eval(), x)
    jac = oracle.jacobian_loop(model, list(la.posterior.fit.layout.names), x[:3]).flatten(0, 1)
    assert_close(la(x[:3], joint=True)[1], jac @ la.posterior_covariance @ jac.T)


def test_some_weights_of_a_fused_projection_alone():
    model, x = network("cross")
    y, names = labels("regression", len(x), 2), [k for k, _ in model.named_parameters()]
    index = torch.tensor([0, 5, 40, 90, 107, 110, 130, 165])
    la = Laplace(model, "regression", "subnetwork", "full", subnetwork_indices=index).fit(cut(x, y, 5))
    _, h = oracle.curvature_all(model, names, x, y, "regression")
    assert_close(la.H, h[index][:, index])


class Encoded(nn.Module):
    def __init__(self, decoder: bool, batch_first: bool) -> None:
        super().__init__()
        self.batch_first = batch_first
        make = nn.TransformerDecoderLayer if decoder else nn.TransformerEncoderLayer
        self.layer, self.head = make(6, 2, 5, batch_first=batch_first), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.batch_first else x.transpose(0, 1)
        h = self.layer(x, x.tanh()) if isinstance(self.layer, nn.TransformerDecoderLayer) else self.layer(x)
        return self.head(h.mean(1 if self.batch_first else 0))


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("decoder", [False, True])
def test_layers_of_a_transformer_are_seen_through(decoder, batch_first):
    torch.manual_seed(0)
    x = torch.randn(6, 4, 6, dtype=torch.float64)
    la = assert_exact(Encoded(decoder, batch_first).double().eval(), x, sizes=(4, 2), kinds=("ggn",))
    assert {row.rule for row in la.coverage()} == {"attention", "linear", "norm"}


def test_a_call_that_cannot_be_opened_in_a_later_batch_goes_the_generic_way():
    class Late(Attended):
        def forward(self, x: Tensor) -> Tensor:
            if len(x) == 1:  # unbatched
                return self.head(torch.tanh(self.attention(x[0], x[0], x[0])[0]).mean(0, keepdim=True))
            return super().forward(x)

    torch.manual_seed(0)
    model, x = Late().double(), torch.randn(8, 4, 6, dtype=torch.float64)
    assert_exact(model, x, sizes=(5, 2, 1), kinds=("ggn",))


def test_a_replaced_forward_is_not_opened():
    model, x = network("self")
    inner = model.attention.forward
    model.attention.forward = lambda q, k, v: (2 * inner(q, k, v)[0], None)
    names = [k for k, _ in model.named_parameters()]
    y = labels("regression", len(x), 2)
    _, h = oracle.curvature_all(model, names, x, y, "regression")
    la = Laplace(model, "regression", "all", "diag").fit(cut(x, y, 5))
    assert_close(la.H, h.diagonal())
    assert "attention" not in {row.rule for row in la.coverage()}
