"""Recurrent layers: exact curvature, and the Kronecker factors of linear layers that are called at every step."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import oracle
from exact import assert_close, assert_exact, labels
from laplace import Laplace
from networks import cut

CASES = {
    "rnn": (nn.RNN, {}),
    "rnn, relu, no bias": (nn.RNN, {"nonlinearity": "relu", "bias": False}),
    "lstm": (nn.LSTM, {"batch_first": True}),
    "lstm, two layers, both directions": (nn.LSTM, {"num_layers": 2, "bidirectional": True}),
    "gru": (nn.GRU, {}),
    "gru, two layers, both directions": (nn.GRU, {"num_layers": 2, "bidirectional": True, "batch_first": True}),
}


class Read(nn.Module):
    """Sequences (N, 4, 3); reads all outputs, or the last state, from zero or from a given start."""

    def __init__(self, kind: type[nn.Module], how: str = "outputs", **options: object) -> None:
        super().__init__()
        self.how, self.rnn = how, kind(3, 4, **options)
        self.head = nn.Linear(4 * (1 + self.rnn.bidirectional), 2)

    def forward(self, x: Tensor) -> Tensor:
        n = len(x)
        start = None
        if self.how == "start":
            count = self.rnn.num_layers * (1 + self.rnn.bidirectional)
            start = x[:, 0, 0].sin().expand(count, 4, n).transpose(1, 2).contiguous()
            start = (start, start.cos()) if isinstance(self.rnn, nn.LSTM) else start
        out, last = self.rnn(x if self.rnn.batch_first else x.transpose(0, 1).contiguous(), start)
        if self.how == "states":
            last = last[0] + last[1] if isinstance(last, tuple) else last
            out = last[-2:] if self.rnn.bidirectional else last[-1:]
            return self.head(out.transpose(0, 1).flatten(1))
        return self.head((out if self.rnn.batch_first else out.transpose(0, 1)).mean(1))


def network(case, how="outputs"):
    torch.manual_seed(0)
    kind, options = CASES[case]
    return Read(kind, how, **options).double(), torch.randn(7, 4, 3, dtype=torch.float64)


@pytest.mark.parametrize("how", ["outputs", "states", "start"])
@pytest.mark.parametrize("case", CASES)
def test_curvature_is_exact(case, how):
    model, x = network(case, how)
    task = "classification" if how == "outputs" else "regression"
    assert_exact(model, x, task, sizes=(4, 1, 2), kinds=("ggn",), rules={"rnn": "recurrent"})


class Steps(nn.Module):
    """One layer in one direction, in Linear modules that are called at every step."""

    def __init__(self, model: Read) -> None:
        super().__init__()
        gates = model.rnn.weight_ih_l0.shape[0]
        self.kind = type(model.rnn)
        self.ih, self.hh, self.head = nn.Linear(3, gates), nn.Linear(4, gates), nn.Linear(4, 2)
        self.double()
        for name, layer in (("ih", self.ih), ("hh", self.hh)):
            layer.weight.data, layer.bias.data = (
                getattr(model.rnn, f"weight_{name}_l0"),
                getattr(model.rnn, f"bias_{name}_l0"),
            )
        self.head.load_state_dict(model.head.state_dict())

    def forward(self, x: Tensor) -> Tensor:
        h = c = torch.zeros(len(x), 4, dtype=x.dtype)
        outs = []
        for t in range(x.shape[1]):
            a, b = self.ih(x[:, t]), self.hh(h)
            if self.kind is nn.RNN:
                h = torch.tanh(a + b)
            elif self.kind is nn.LSTM:
                i, f, g, o = (a + b).chunk(4, 1)
                c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
                h = torch.sigmoid(o) * torch.tanh(c)
            else:
                (ar, az, an), (br, bz, bn) = a.chunk(3, 1), b.chunk(3, 1)
                z = torch.sigmoid(az + bz)
                h = (1 - z) * torch.tanh(an + torch.sigmoid(ar + br) * bn) + z * h
            outs.append(h)
        return self.head(torch.stack(outs, 1).mean(1))


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize("case", ["rnn", "lstm", "gru"])
def test_kronecker_factors_are_those_of_linear_layers_at_every_step(case, sharing):
    model, x = network(case)
    steps = Steps(model)
    assert_close(steps(x), model(x))
    y, names = labels("regression", len(x), 2), [k for k, _ in steps.named_parameters()]
    la = Laplace(model, "regression", "all", "kron", weight_sharing=sharing).fit(cut(x, y, [4, 1]))
    lam = torch.eye(2, dtype=torch.float64).expand(len(x), 2, 2)
    blocks = oracle.kron_all(steps, names, x, lam, sharing)
    order = ["ih.weight", "hh.weight", "ih.bias", "hh.bias"]
    got, start = la.H.to_matrix(), 0
    for name, size in zip(order, la.posterior.fit.layout.sizes, strict=False):
        assert_close(got[start : start + size, start : start + size], blocks[name])
        start += size


def test_one_step_is_the_cells_and_lengths_may_differ_between_batches():
    model, x = network("lstm")
    y = labels("regression", 7, 2)
    batches = [(x[:4], y[:4]), (x[4:, :2], y[4:]), (x[:2, :1], y[:2])]
    la = Laplace(model, "regression", "all", "diag").fit(batches)
    names = [k for k, _ in model.named_parameters()]
    expected = sum(oracle.curvature_all(model, names, a, b, "regression")[1].diagonal() for a, b in batches)
    assert_close(la.H, expected)


def test_projected_states_go_the_generic_way():
    torch.manual_seed(0)

    class Projected(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn, self.head = nn.LSTM(3, 4, proj_size=2, batch_first=True), nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.rnn(x)[0].mean(1))

    la = assert_exact(Projected().double(), torch.randn(6, 3, 3, dtype=torch.float64), sizes=(4, 2), kinds=("ggn",))
    assert "recurrent" not in {row.rule for row in la.coverage()}


def test_predictions_are_differentiable_in_the_inputs():
    model, x = network("gru, two layers, both directions")
    la = Laplace(model, "regression", "all", "diag", enable_backprop=True).fit([(x, labels("regression", 7, 2))])
    new = x[:2, :2].clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda t: la(t)[1].diagonal(dim1=1, dim2=2), (new,), atol=1e-6)
