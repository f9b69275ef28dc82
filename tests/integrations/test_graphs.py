"""Graphs of PyTorch Geometric: a last layer over graphs or nodes is that of its features."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch_geometric.data import Batch, Data
from torch_geometric.loader import DataLoader
from torch_geometric.nn import GCN, GCNConv, global_mean_pool

from laplace import Laplace
from laplace.errors import InputError, LaplaceError, ModelError

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")


def graphs(n=13, seed=0):
    generator = torch.Generator().manual_seed(seed)
    made = []
    for i in range(n):
        nodes = 3 + i % 4
        edges = torch.randint(nodes, (2, 2 * nodes), generator=generator)
        x = torch.randn(nodes, 3, generator=generator)
        made.append(Data(x=x, edge_index=edges, y=torch.tensor([i % 2])))
    return made


class OfGraphs(nn.Module):
    def __init__(self, writes=False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.head, self.writes = GCNConv(3, 6), nn.Linear(6, 2), writes

    def features(self, x, edge_index, batch):
        return global_mean_pool(self.conv(x, edge_index).tanh(), batch)

    def forward(self, data):
        h = self.features(data.x, data.edge_index, data.batch)
        if self.writes:
            data.x = data.x + 1
        return self.head(h)


class ByName(OfGraphs):
    def forward(self, x, edge_index, batch):
        return self.head(self.features(x, edge_index, batch))


class OfNodes(OfGraphs):
    def forward(self, x, edge_index):
        return self.head(self.conv(x, edge_index).tanh())


@pytest.mark.parametrize("kind", [OfGraphs, ByName, lambda: OfGraphs(writes=True)])
@pytest.mark.parametrize("structure", ["kron", "full", "diag"])
def test_the_last_layer_over_graphs_is_that_of_their_features(kind, structure):
    model, data = kind(), graphs()
    la = Laplace(model, "classification", hessian_structure=structure).fit(DataLoader(data, batch_size=5))
    whole = Batch.from_data_list(data)
    features = model.features(whole.x, whole.edge_index, whole.batch).detach()
    plain = Laplace(model.head, "classification", hessian_structure=structure).fit([(features, whole.y)])
    torch.testing.assert_close(la.posterior_variance, plain.posterior_variance, rtol=1e-4, atol=0)
    torch.testing.assert_close(la(whole), plain(features), rtol=1e-4, atol=1e-5)
    before = whole.x.clone()
    by_loader = la.predict(DataLoader(data, batch_size=4))
    torch.testing.assert_close(by_loader.mean, la.predict(whole).mean, rtol=1e-4, atol=1e-5)
    assert torch.equal(whole.x, before)
    la.tune()
    la.calibrate(DataLoader(graphs(seed=1), batch_size=6))


def test_nodes_are_examples_where_outputs_are_of_nodes_and_the_mask_says_which_count():
    (data,) = graphs(1)
    model = OfNodes()
    data.y, data.mask = torch.tensor([0, 1, 1]), torch.tensor([True, False, True])
    la = Laplace(model, "classification", hessian_structure="full").fit([data])
    features = model.conv(data.x, data.edge_index).tanh().detach()
    plain = Laplace(model.head, "classification", hessian_structure="full")
    plain.fit([(features[data.mask], data.y[data.mask])])
    torch.testing.assert_close(la.posterior_variance, plain.posterior_variance, rtol=1e-4, atol=0)
    torch.testing.assert_close(la.predict(data).mean, plain.predict(features).mean, rtol=1e-4, atol=1e-5)
    alone = Laplace(model, "classification").fit(data)  # a graph is a batch
    same = Laplace(model.head, "classification").fit([(features[data.mask], data.y[data.mask])])
    torch.testing.assert_close(alone.posterior_variance, same.posterior_variance, rtol=1e-4, atol=0)
    assert alone.calibrate(data).n_data == alone.conformal(data, level=0.5).n_calibration == 2


def test_a_network_of_the_library_itself_works():
    torch.manual_seed(0)
    (data,) = graphs(1)
    data.y = torch.randn(3, 2)
    model = _WithHead(GCN(3, 8, 2, 4))
    la = Laplace(model, "regression").fit([data])
    assert la.predict(data).mean.shape == (3, 2)


class _WithHead(nn.Module):
    def __init__(self, body) -> None:
        super().__init__()
        self.body, self.head = body, nn.Linear(4, 2)

    def forward(self, x, edge_index):
        return self.head(self.body(x, edge_index))


def test_bad_graphs_are_said():
    model, data = OfGraphs(), graphs()
    la = Laplace(model, "classification")
    unlabelled = [Data(x=g.x, edge_index=g.edge_index) for g in data]
    with pytest.raises(InputError, match=r"without labels: write batch.y"):
        la.fit(DataLoader(unlabelled, batch_size=4))
    with pytest.raises(InputError, match="class labels have shape"):
        la.fit(DataLoader([Data(x=g.x, edge_index=g.edge_index, y=torch.zeros(2).long()) for g in data], batch_size=4))
    one = data[0].clone()
    one.train_mask = torch.ones(3).bool()
    with pytest.raises(InputError, match=r"data.mask = data.train_mask"):
        Laplace(OfNodes(), "classification").fit([one])
    sampled = Data(x=one.x, edge_index=one.edge_index, y=torch.zeros(3).long(), n_id=torch.arange(3), batch_size=2)
    with pytest.raises(InputError, match=r"first 2 nodes are meant.*batch.mask"):
        Laplace(OfNodes(), "classification").fit([sampled])
    with pytest.raises(ModelError, match=r"forward takes `batch`.*Batch\.from_data_list"):
        Laplace(ByName(), "classification").fit(data)
    la = Laplace(ByName(), "classification").fit(DataLoader(data, batch_size=4))
    with pytest.raises(ModelError, match=r"forward takes `batch`.*Batch\.from_data_list"):
        la.predict(data[0])
    nan = [Data(x=g.x * torch.nan, edge_index=g.edge_index, y=g.y) for g in data]
    with pytest.raises(InputError, match="NaN or infinite"):
        la.fit(DataLoader(nan, batch_size=4))
    with pytest.raises(LaplaceError):
        Laplace(OfGraphs(), "classification", "all", "diag").fit(DataLoader(data, batch_size=5))


def test_all_weights_of_graphs_are_refused_with_the_last_layer_as_a_way_out():
    with pytest.raises(ModelError, match=r"graphs in one batch.*subset_of_weights='last_layer'"):
        Laplace(OfGraphs(), "classification", "all").fit(DataLoader(graphs(), batch_size=5))
