"""laplace-torch's small functions do what their names say."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, SubsetRandomSampler, TensorDataset

from laplace import Laplace, utils
from laplace.errors import InputError, OptionError
from laplace.utils.subnetmask import ScoreBasedSubnetMask

torch.manual_seed(0)


def test_linear_algebra():
    root = torch.randn(5, 7).double()
    M = root @ root.T
    S = utils.invsqrt_precision(M)
    torch.testing.assert_close(S @ S.T, torch.linalg.inv(M))
    assert torch.equal(S, S.tril())
    torch.testing.assert_close(utils.diagonal_add_scalar(M, 2.0), M + 2 * torch.eye(5))
    values, vectors = utils.symeig(root.T @ root)
    assert (values >= 0).all()
    torch.testing.assert_close((vectors * values) @ vectors.T, root.T @ root)
    torch.testing.assert_close(utils.kron(M, root), torch.kron(M, root))
    torch.testing.assert_close(utils.block_diag([M, M]), torch.block_diag(M, M))


def test_prior_precisions():
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    assert utils.parameters_per_layer(model) == [6, 3, 3, 1]
    assert utils.expand_prior_precision(torch.tensor(2.0), model).tolist() == [2.0] * 13
    layers = utils.expand_prior_precision(torch.arange(4.0), model)
    assert layers.tolist() == [0.0] * 6 + [1.0] * 3 + [2.0] * 3 + [3.0]
    assert torch.equal(utils.expand_prior_precision(torch.arange(13.0), model), torch.arange(13.0))
    with pytest.raises(OptionError, match=r"1, 4 \(one per tensor\)"):
        utils.expand_prior_precision(torch.ones(5), model)
    shapes = [utils.fix_prior_prec_structure(2.0, s, 4, 13, "cpu", torch.float64) for s in utils.PriorStructure]
    assert sorted(len(t) for t in shapes) == [1, 4, 13]
    with pytest.raises(OptionError, match="layerwise"):
        utils.fix_prior_prec_structure(2.0, "other", 4, 13, "cpu", torch.float64)


def test_draws_have_the_given_moments():
    mean, root = torch.randn(3, 2).double(), torch.randn(3, 2, 2).double()
    covariance = root @ root.mT
    for draw in (utils.normal_samples, utils.draw_gaussian):
        samples = draw(mean, covariance, 20000, torch.Generator().manual_seed(0))
        torch.testing.assert_close(samples.mean(0), mean, atol=0.1, rtol=0)
        centred = samples - mean
        torch.testing.assert_close(torch.einsum("sni,snj->nij", centred, centred) / 20000, covariance, atol=0.2, rtol=0)
    singular = torch.ones(2, 2).double()
    samples = utils.draw_gaussian(mean[0], singular, 50, torch.Generator().manual_seed(0)) - mean[0]
    torch.testing.assert_close(samples[:, 0], samples[:, 1])
    assert utils.normal_samples(mean, mean**2, 4).shape == (4, 3, 2)
    with pytest.raises(OptionError, match=r"\(N, C\)"):
        utils.normal_samples(mean, covariance[:2], 3)


def test_targets():
    assert utils.classification_targets(torch.tensor([[2], [0]])).tolist() == [2, 0]
    assert utils.classification_targets(torch.tensor([[0, 0, 1], [1, 0, 0]])).tolist() == [2, 0]
    assert utils.regression_targets(torch.ones(3), torch.zeros(3, 1)).shape == (3, 1)
    with pytest.raises(InputError, match="targets have shape"):
        utils.regression_targets(torch.ones(3), torch.zeros(3, 2))
    with pytest.raises(InputError, match="one-hot"):
        utils.classification_targets(torch.ones(2, 3))


def test_batches():
    batch = {"input_ids": torch.arange(6).reshape(3, 2), "labels": torch.ones(3), "name": "a", "rows": ["a", "b", "c"]}
    inputs, y = utils.split_batch(batch, "labels")
    assert inputs is batch
    assert y is batch["labels"]
    assert utils.batch_size(batch, "input_ids") == 3
    part = utils.select_rows(batch, torch.tensor([2, 0]), 3)
    assert (part["input_ids"][:, 0].tolist(), part["name"], part["rows"]) == ([4, 0], "a", ["c", "a"])
    whole = utils.concatenate_rows([part, part])
    assert (len(whole["labels"]), whole["rows"]) == (4, ["c", "a", "c", "a"])
    with pytest.raises(InputError, match="different keys"):
        utils.concatenate_rows([{"a": 1}, {"b": 1}])
    moved = utils.to_device(batch, torch.device("cpu"), torch.float64)
    assert (moved["labels"].dtype, moved["input_ids"].dtype) == (torch.float64, torch.int64)
    assert utils.same_configuration(batch, dict(batch))
    assert not utils.same_configuration(batch, batch | {"labels": torch.zeros(3)})


def test_loaders():
    data = TensorDataset(torch.arange(10.0))
    shuffled = DataLoader(data, batch_size=3, shuffle=True)
    assert sorted(utils.training_indices(shuffled).tolist()) == list(range(10))
    some = DataLoader(data, batch_size=3, sampler=SubsetRandomSampler([4, 2]))
    assert utils.training_indices(some).tolist() == [4, 2]
    subset = utils.subset_loader(shuffled, torch.tensor([7, 1, 3, 5]))
    assert [batch[0].tolist() for batch in subset] == [[7.0, 1.0, 3.0], [5.0]]
    sampler = utils.SoDSampler(10, 4, seed=1)
    assert list(sampler) == list(sampler)
    assert len(set(sampler)) == len(sampler) == 4


def test_gradients_are_put_back():
    class Holder:
        model = nn.Linear(2, 1)

        @utils.preserve_model_gradients
        def run(self):
            self.model(torch.ones(1, 2)).sum().backward()

    Holder.model.bias.grad = torch.full((1,), 7.0)
    Holder().run()
    assert Holder.model.weight.grad is None
    assert Holder.model.bias.grad.item() == 7.0


def test_scores_are_averages_over_examples():
    torch.manual_seed(0)
    x, y = torch.randn(10, 3), torch.randint(2, (10,))
    la = Laplace(nn.Linear(3, 2), "classification").fit([(x, y)])
    loader = [(x[:7], y[:7]), (x[7:], y[7:])]
    expected = pytest.approx(float(utils.get_nll(la(x), y)))
    metric = utils.RunningNLLMetric()
    assert utils.validate(la, loader, utils.get_nll) == expected
    assert utils.validate(la, loader, metric) == expected
    assert utils.validate(la, loader, metric) == expected  # the metric is reset
    metric = utils.RunningNLLMetric(ignore_index=0)
    metric.update(la(x), y)
    assert float(metric.compute()) == pytest.approx(float(utils.get_nll(la(x)[y == 1], y[y == 1])))
    assert float(metric(la(x), y)) == pytest.approx(float(metric.compute()))
    la.optimize_prior_precision(method="gridsearch", val_loader=loader, loss=utils.RunningNLLMetric(), grid_size=5)
    regression = Laplace(nn.Linear(3, 1), "regression").fit([(x, x[:, :1])])
    square = utils.validate(regression, [(x, x[:, :1])], lambda mean, variance, y: (mean - y).square().mean())
    assert square == pytest.approx(float((regression(x)[0] - x[:, :1]).square().mean()))


def test_swag_variances():
    model = nn.Linear(3, 1)
    before = model.weight.clone()
    x = torch.randn(10, 3)
    variance = utils.fit_diagonal_swag_var(model, [(x, x[:, :1])], nn.MSELoss(), n_snapshots_total=4)
    assert variance.shape == (4,)
    assert (variance > 0).all()
    assert torch.equal(model.weight, before)


def test_swag_variances_are_those_of_torchs_sgd():
    torch.manual_seed(0)
    model, x = nn.Linear(3, 1).double(), torch.randn(10, 3).double()
    copied = copy.deepcopy(model)
    sgd = torch.optim.SGD(copied.parameters(), lr=0.05, momentum=0.8, weight_decay=0.1)
    seen = []
    for _ in range(6):
        sgd.zero_grad()
        (0.5 * (copied(x) - x[:, :1]).square().sum(1).mean()).backward()
        sgd.step()
        seen.append(nn.utils.parameters_to_vector(copied.parameters()).detach())
    found = utils.fit_diagonal_swag_var(model, [(x, x[:, :1])], nn.MSELoss(), 6, 1, 0.05, 0.8, 0.1, 1e-30)
    torch.testing.assert_close(found, torch.stack(seen).var(0, correction=0))


def test_selectors_of_laplace_torchs_users_select():
    class Small(ScoreBasedSubnetMask):
        def compute_param_scores(self, train_loader):
            return -self.parameter_vector.abs()

    class Even(utils.SubnetMask):
        def get_subnet_mask(self, train_loader):
            return (torch.arange(len(self.parameter_vector)) % 2 == 0).long()

    model = nn.Linear(3, 2)
    weights = nn.utils.parameters_to_vector(model.parameters()).detach()
    assert torch.equal(Small(model, 3).select(), weights.abs().topk(3, largest=False).indices.sort().values)
    assert Even(model).select().tolist() == [0, 2, 4, 6]
    mask = utils.LargestMagnitudeSubnetMask(model, 2).get_subnet_mask(None)
    assert mask.nonzero().flatten().tolist() == weights.abs().topk(2).indices.sort().values.tolist()
    with pytest.raises(ValueError, match=r"shape \(8,\)"):
        Even(model).convert_subnet_mask_to_indices(torch.ones(5, dtype=torch.bool))
    with pytest.raises(ValueError, match="integers 0 and 1"):
        Even(model).convert_subnet_mask_to_indices(torch.full((8,), 0.5))
