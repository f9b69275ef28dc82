"""What a network writes to in eval mode, and tensors that torch treats in a way of its own."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from laplace import Laplace, marglik_training
from laplace.errors import InputError, LaplaceWarning, ModelError
from networks import cut
from test_replica import State


class Bag(nn.Module):
    """Token ids to outputs; rows of the table are shortened where they are looked up."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        table = nn.EmbeddingBag if kind == "bag" else nn.Embedding
        self.table = table(7, 4, max_norm=None if kind == "functional" else 0.8)
        self.out = nn.Linear(4, 2)

    def forward(self, ids: Tensor) -> Tensor:
        if self.kind == "functional":
            return self.out(nn.functional.embedding(ids, self.table.weight, max_norm=0.8).mean(1))
        h = self.table(ids)
        return self.out(h if self.kind == "bag" else h.mean(1))


def bag(kind: str) -> tuple[Bag, Tensor, Tensor]:
    torch.manual_seed(0)
    return Bag(kind).double(), torch.randint(7, (9, 3)), torch.randn(9, 2).double()


@pytest.mark.parametrize("subset", ["last_layer", "all"])
@pytest.mark.parametrize("kind", ["embedding", "bag", "functional"])
def test_tables_with_max_norm_are_not_written_to(kind, subset):
    model, x, y = bag(kind)
    before = State(model)
    la = Laplace(model, "regression", subset, "full", prior_precision=0.5).fit(cut(x, y, 4))
    before.assert_unchanged()
    mean = la(x)[0]
    la(x, pred_type="nn", n_samples=2)
    la.tune()
    la.optimize_prior_precision(method="gridsearch", val_loader=cut(x, y, 4), grid_size=3)
    la.fit(cut(x, y, 4), override=False)
    state = la.state_dict()
    other = Laplace(model, "regression", subset, "full")
    other.load_state_dict(state)
    other(x)
    before.assert_unchanged()
    torch.testing.assert_close(mean, model(x))  # which shortens its rows


@pytest.mark.parametrize("kind", ["embedding", "bag", "functional"])
def test_curvature_of_a_table_with_max_norm_is_that_of_its_shortened_rows(kind):
    model, x, y = bag(kind)
    la = Laplace(model, "regression", "all", "full", prior_precision=0.5).fit(cut(x, y, 4))
    named = [dict(model.named_parameters())[name] for name in la.posterior.fit.layout.names]
    rows = [torch.cat([g.flatten() for g in torch.autograd.grad(f, named, retain_graph=True)])
            for f in model(x).flatten()]  # fmt: skip
    jac = torch.stack(rows)
    torch.testing.assert_close(la.posterior_precision, jac.T @ jac + 0.5 * torch.eye(jac.shape[1]).double())


def test_a_loaded_posterior_does_not_write_to_the_table_either(tmp_path):
    model, x, y = bag("embedding")
    Laplace(model, "regression").fit(cut(x, y, 4)).save(tmp_path / "la")
    again, _, _ = bag("embedding")
    before = State(again)
    Laplace.load(tmp_path / "la", again)(x)
    before.assert_unchanged()


class Counts(nn.Module):
    """Counts its calls and keeps the last mean, in eval mode too."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.out = nn.Linear(4, 5), nn.Linear(5, 2)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("last", torch.zeros(2, 5))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        h = torch.tanh(self.hidden(x))
        self.last[0] = h.detach().mean(0)
        return self.out(h)


@pytest.mark.parametrize("subset", ["last_layer", "all"])
def test_buffers_that_are_written_to_in_eval_mode_stay_as_they_were(subset):
    torch.manual_seed(0)
    model = Counts()
    x, y = torch.randn(9, 4), torch.randn(9, 2)
    model(x)
    before = State(model)
    la = Laplace(model, "regression", subset, "diag").fit(cut(x, y, 4))
    la(x)
    la(x, pred_type="nn", n_samples=2)
    before.assert_unchanged()


@pytest.mark.parametrize("subset", ["all", ["hidden"], lambda name, p: name == "hidden.weight", "hidden.*"])
def test_complex_weights_are_refused_by_name(subset):
    class Complex(nn.Module):
        def __init__(self):
            super().__init__()
            self.hidden, self.out = nn.Linear(4, 5, dtype=torch.cfloat), nn.Linear(5, 2)

        def forward(self, x):
            return self.out(self.hidden(x.cfloat()).abs())

    model, x, y = Complex(), torch.randn(6, 4), torch.randn(6, 2)
    with pytest.raises(ModelError, match=r"'hidden\.weight'.*complex64.*view_as_complex"):
        Laplace(model, "regression", subset, "diag").fit([(x, y)])
    Laplace(model, "regression", "last_layer").fit([(x, y)])(x)  # certain, they may be anything
    Laplace(model, "regression", ["out"]).fit([(x, y)])(x)


def test_complex_outputs_are_refused():
    model = nn.Linear(4, 2, dtype=torch.cfloat)
    x, y = torch.randn(6, 4, dtype=torch.cfloat), torch.randn(6, 2)
    for subset in ("last_layer", "all"):
        with pytest.raises(ModelError, match="complex64"):
            Laplace(model, "regression", subset).fit([(x, y)])


class Unregistered(nn.Module):
    def __init__(self):
        super().__init__()
        self.ws, self.out = (nn.Parameter(torch.randn(4, 5)), nn.Parameter(torch.randn(5))), nn.Linear(5, 2)

    def forward(self, x):
        return self.out(torch.tanh(x @ self.ws[0] + self.ws[1]))


def test_trainable_parameters_that_the_network_does_not_register_are_warned_of():
    model, x, y = Unregistered(), torch.randn(6, 4), torch.randn(6, 2)
    la = Laplace(model, "regression", "all", "diag")
    with pytest.warns(LaplaceWarning, match=r"\(4, 5\) and 1 more.*nn\.ParameterList"):
        la.fit([(x, y)])
    assert list(la.posterior.fit.layout.names) == ["out.weight", "out.bias"]


def test_networks_on_the_meta_device_are_refused():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))
    with pytest.raises(ModelError, match=r"'0\.weight' and 3 more .*'meta'.*to_empty"):
        Laplace(model, "regression")
    with pytest.raises(ModelError, match="'meta'"):
        marglik_training(model, [(torch.randn(6, 4), torch.randn(6, 2))], "regression", n_epochs=1)


@pytest.mark.parametrize("subset", ["last_layer", "all"])
def test_networks_made_in_inference_mode_work(subset):
    def make():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 2))

    with torch.inference_mode():
        model = make()
    torch.manual_seed(1)
    x, y = torch.randn(9, 4), torch.randn(9, 2)
    la, plain = (Laplace(m, "regression", subset, "full").fit(cut(x, y, 4)) for m in (model, make()))
    torch.testing.assert_close(la.posterior_precision, plain.posterior_precision)
    torch.testing.assert_close(la(x), plain(x))
    torch.testing.assert_close(la.predict(x).mean, plain.predict(x).mean)
    assert all(p.is_inference() for p in model.parameters())


@pytest.mark.parametrize("subset", ["last_layer", "all"])
@pytest.mark.parametrize("sparse", [Tensor.to_sparse, Tensor.to_sparse_csr], ids=["coo", "csr"])
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
def test_sparse_inputs_are_refused_with_what_to_write(sparse, subset):
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))
    x, y = torch.randn(6, 4).relu(), torch.randn(6, 2)
    la = Laplace(model, "regression", subset)
    for batch in ((sparse(x), y), ((x, sparse(x)), y), ({"input": sparse(x), "labels": y})):
        with pytest.raises(InputError, match=r"sparse.*to_dense"):
            la.fit([batch])
    la.fit([(x, y)])
    with pytest.raises(InputError, match=r"sparse.*to_dense"):
        la(sparse(x))
