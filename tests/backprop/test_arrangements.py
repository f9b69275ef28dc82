"""Where the examples are in a layer's tensors: first, second, or flattened with the positions, in any number of each.

The sum over the batch is the same whichever rows are taken for an example's, so that only per-example numbers tell.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import oracle
from exact import assert_close, assert_exact, assert_predicts_exactly, close_in_blocks, labels
from laplace import Laplace
from networks import cut

ARRANGEMENTS = ["(N, T, .)", "(N*T, .)", "(T*N, .)", "(T, N, .)"]
POOLS = ["all", "first", "two"]
KINDS = ["linear", "layernorm", "batchnorm", "own"]


class Scaled(nn.Module):
    """A layer with a parameter of its own, which no rule knows."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


def layer(kind: str, width: int) -> nn.Module:
    norm = nn.BatchNorm1d(width)
    nn.init.normal_(norm.weight)
    norm.running_mean.normal_()
    return {
        "linear": nn.Linear(width, width),
        "layernorm": nn.LayerNorm(width),
        "batchnorm": norm,
        "own": Scaled(width),
    }[kind]


class Arranged(nn.Module):
    """Sequences (N, T, 3) through a layer in one arrangement; the output depends on some positions, or on all."""

    def __init__(self, arrangement: str, kind: str = "linear", pool: str = "all") -> None:
        super().__init__()
        self.arrangement, self.pool = arrangement, pool
        self.layer = layer(kind, 3)
        self.head = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        n, t = x.shape[:2]
        flat = isinstance(self.layer, nn.BatchNorm1d) and "N*" not in self.arrangement and "*N" not in self.arrangement
        if self.arrangement.startswith("(T"):
            x = x.transpose(0, 1)
        if "*" in self.arrangement:
            x = x.flatten(0, 1)
        h = torch.tanh(self.layer(x.movedim(-1, -2)).movedim(-1, -2) if flat and x.dim() == 3 else self.layer(x))
        if "*" in self.arrangement:
            h = h.unflatten(0, (n, t) if self.arrangement == "(N*T, .)" else (t, n))
        if self.arrangement.startswith("(T"):
            h = h.transpose(0, 1)
        pooled = {"all": h.sum(1), "first": h[:, 0], "two": h[:, :2].sum(1)}[self.pool]
        return self.head(pooled)


def arranged(*options: str) -> nn.Module:
    torch.manual_seed(0)
    return Arranged(*options).double()


def sequences(n: int, t: int) -> Tensor:
    torch.manual_seed(1)
    return torch.randn(n, t, 3, dtype=torch.float64)


# BatchNorm1d takes (N, C, T): with the time first it would mix examples, and is left out.
CASES = [(a, k) for a in ARRANGEMENTS for k in KINDS if (a, k) != ("(T, N, .)", "batchnorm")]


@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("positions", [1, 3, 5, 6])
@pytest.mark.parametrize("arrangement", ARRANGEMENTS)
def test_rows_belong_to_their_example(arrangement, positions, pool):
    """The audit sees five examples: five positions could be mistaken for them."""
    model, rules = arranged(arrangement, "linear", pool), {"layer": "linear", "head": "linear"}
    assert_exact(model, sequences(8, positions), sizes=(6, 2), kinds=("ggn",), rules=rules)


@pytest.mark.parametrize("pool", ["all", "first"])
@pytest.mark.parametrize("positions", [3, 5])
@pytest.mark.parametrize(("arrangement", "kind"), [case for case in CASES if case[1] != "linear"])
def test_rows_of_every_kind_of_layer_belong_to_their_example(arrangement, kind, positions, pool):
    assert_exact(arranged(arrangement, kind, pool), sequences(8, positions), sizes=(6, 2), kinds=("ggn",))


@pytest.mark.parametrize("sizes", [(1,), (1, 7), (2, 6), (5, 3), (7, 1)])
@pytest.mark.parametrize("positions", [2, 5])
@pytest.mark.parametrize("arrangement", ARRANGEMENTS)
def test_the_sizes_of_the_batches_do_not_matter(arrangement, positions, sizes):
    assert_exact(arranged(arrangement), sequences(8, positions), sizes=sizes, kinds=("ggn",))


@pytest.mark.parametrize("lengths", [(1, 3), (3, 1), (2, 3), (4, 6, 5)], ids=str)
@pytest.mark.parametrize(("arrangement", "kind"), CASES)
def test_batches_may_have_sequences_of_different_lengths(arrangement, kind, lengths):
    """A plan is made on the first batch; what it says of rows must hold for longer and shorter ones."""
    model = arranged(arrangement, kind)
    model.eval()
    parts = [sequences(6, t) for t in lengths]
    y = labels("regression", 6, 2)
    names = [k for k, _ in model.named_parameters()]
    la = Laplace(model, "regression", "all", "full").fit([(x, y) for x in parts])
    expected = sum(oracle.curvature_all(model, names, x, y, "regression")[1] for x in parts)
    close_in_blocks(la.H, expected, la.posterior.fit.layout.sizes)
    for x in parts:
        assert_predicts_exactly(la, model, x)


@pytest.mark.parametrize("dead", [0, 4])
@pytest.mark.parametrize("positions", [3, 5])
@pytest.mark.parametrize("arrangement", ARRANGEMENTS)
def test_an_example_without_a_gradient_misleads_nobody(arrangement, positions, dead):
    """Where an example's units are all dead, no gradient shows where its rows are."""

    class Dead(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = arranged(arrangement)

        def forward(self, x: Tensor) -> Tensor:
            alive = (x[:, :1, 0] < 50).to(x)  # (N, 1)
            return self.inner(x) * alive

    x = sequences(7, positions)
    x[dead] = 100.0
    assert_exact(Dead().double(), x, sizes=(6, 1), kinds=("ggn",))


@pytest.mark.parametrize("positions", [2, 5])
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("pool", ["all", "first"])
def test_attention_with_either_dimension_first(batch_first, pool, positions):
    class Attended(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.TransformerEncoderLayer(4, 2, 5, dropout=0.1, batch_first=batch_first)
            self.head = nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            h = self.layer(x if batch_first else x.transpose(0, 1))
            h = h if batch_first else h.transpose(0, 1)
            return self.head(h.sum(1) if pool == "all" else h[:, 0])

    torch.manual_seed(0)
    x = torch.randn(7, positions, 4, dtype=torch.float64)
    assert_exact(Attended().double(), x, sizes=(5, 2), kinds=("ggn",))


@pytest.mark.parametrize("recurrent", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("positions", [2, 5])
def test_recurrent_networks_with_either_dimension_first(recurrent, batch_first, positions):
    class Read(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inp = nn.Linear(3, 3)
            self.rnn = recurrent(3, 3, batch_first=batch_first)
            self.out = nn.Linear(3, 3)
            self.head = nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            h = self.inp(x if batch_first else x.transpose(0, 1))
            h = self.out(self.rnn(h)[0])
            return self.head(h[:, -1] if batch_first else h[-1])

    torch.manual_seed(0)
    assert_exact(Read().double(), sequences(7, positions), sizes=(5, 2), kinds=("ggn",))


@pytest.mark.parametrize("how", ["embedding", "linear", "parameter", "layernorm"])
@pytest.mark.parametrize("positions", [2, 5])
@pytest.mark.parametrize("leading", [True, False])
def test_what_is_computed_once_for_the_batch_counts_for_each_example(how, positions, leading):
    """A position embedding is (1, T, .) or (T, .); every example's gradient goes through it."""

    class Positions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inp = nn.Linear(3, 3)
            made = {
                "embedding": lambda: nn.Embedding(7, 3),
                "linear": lambda: nn.Linear(3, 3),
                "layernorm": lambda: nn.LayerNorm(3),
            }
            self.position = nn.Parameter(torch.randn(7, 3)) if how == "parameter" else made[how]()
            self.mix = nn.Linear(3, 3)
            self.head = nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            t = torch.arange(x.shape[1])
            t = t if how in ("embedding", "parameter") else torch.stack([t.to(x).sin(), t.to(x).cos(), t.to(x)], 1)
            t = t.unsqueeze(0) if leading else t
            p = self.position[t] if how == "parameter" else self.position(t)
            return self.head(torch.tanh(self.mix(torch.tanh(self.inp(x) + p))).sum(1))

    torch.manual_seed(0)
    model = Positions().double()
    assert_exact(model, sequences(7, positions), sizes=(5, 2), kinds=("ggn",))
    assert_exact(model, sequences(7, positions), sizes=(1, 6), kinds=("ggn",))
    if how == "linear" and leading:  # and it keeps its Kronecker form
        x, names = sequences(7, positions), [k for k, _ in model.named_parameters()]
        la = Laplace(model, "regression", "all", "kron").fit(cut(x, labels("regression", 7, 2), 5))
        blocks = oracle.kron_all(model, names, x, torch.eye(2, dtype=torch.float64).expand(7, 2, 2))
        assert_close(la.H.to_matrix(), torch.block_diag(*[blocks[k] for k in names]))


def test_kronecker_factors_follow_the_arrangement():
    """expand counts every position, whichever way the rows lie: the four arrangements are one network."""
    x, y = sequences(8, 5), labels("regression", 8, 2)
    models = [arranged(a) for a in ARRANGEMENTS]
    fits = [Laplace(m, "regression", "all", "kron").fit(cut(x, y, 6)) for m in models]
    lam = torch.eye(2, dtype=torch.float64).expand(8, 2, 2)
    expected = oracle.kron_all(models[0], ["layer.weight", "layer.bias", "head.weight", "head.bias"], x, lam)
    for la in fits:
        assert_close(la.H.to_matrix(), torch.block_diag(*expected.values()))
