"""Scripts as laplace-torch's users write them run unchanged. They are written here in our own words."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from laplace import (
    BaseLaplace,
    HessianStructure,
    Laplace,
    LinkApprox,
    PredType,
    PriorStructure,
    SubsetOfWeights,
    marglik_training,
)
from laplace.baselaplace import DiagLaplace, FunctionalLaplace, KronLaplace, VaLLA
from laplace.curvature import AsdlGGN, BackPackGGN, CurvatureInterface, CurvlinopsGGN
from laplace.lllaplace import FunctionalLLLaplace, KronLLLaplace
from laplace.marglik_training import marglik_training as from_its_module
from laplace.subnetlaplace import FullSubnetLaplace
from laplace.utils.enums import Likelihood
from laplace.utils.metrics import RunningNLLMetric
from laplace.utils.subnetmask import LargestVarianceDiagLaplaceSubnetMask, ModuleNameSubnetMask, RandomSubnetMask


@pytest.fixture
def images():
    torch.manual_seed(0)
    x, y = torch.randn(24, 1, 6, 6), torch.randint(3, (24,))
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(32, 3))
    return model, DataLoader(TensorDataset(x, y), batch_size=10), x, y


@pytest.fixture
def sine():
    torch.manual_seed(0)
    x = torch.rand(30, 1) * 8
    y = x.sin() + 0.3 * torch.randn(30, 1)
    model = nn.Sequential(nn.Linear(1, 10), nn.Tanh(), nn.Linear(10, 1))
    return model, DataLoader(TensorDataset(x, y), batch_size=30), x, y


def test_a_last_layer_of_a_classifier_tuned_and_calibrated(images):
    model, loader, x, y = images
    la = Laplace(
        model,
        Likelihood.CLASSIFICATION,
        subset_of_weights=SubsetOfWeights.LAST_LAYER,
        hessian_structure=HessianStructure.KRON,
        backend=AsdlGGN,
    )
    assert isinstance(la, KronLLLaplace)
    la.fit(loader)
    la.optimize_prior_precision(
        method="gridsearch", pred_type=PredType.GLM, link_approx=LinkApprox.PROBIT, val_loader=loader, grid_size=5
    )
    probabilities = la(x, pred_type=PredType.GLM, link_approx=LinkApprox.PROBIT)
    assert probabilities.shape == (24, 3)
    assert float(la.prior_precision.item()) > 0
    accuracy = (probabilities.argmax(-1) == y).float().mean()
    assert 0 <= float(accuracy) <= 1


def test_evidence_of_prior_and_noise_by_hand(sine):
    model, loader, x, _ = sine
    la = Laplace(model, "regression", subset_of_weights="all", hessian_structure="full")
    la.fit(loader)
    log_prior, log_sigma = torch.ones(1, requires_grad=True), torch.ones(1, requires_grad=True)
    optimizer = torch.optim.Adam([log_prior, log_sigma], lr=1e-1)
    values = []
    for _ in range(30):
        optimizer.zero_grad()
        loss = -la.log_marginal_likelihood(log_prior.exp(), log_sigma.exp())
        loss.backward()
        optimizer.step()
        values.append(loss.item())
    assert values[-1] < values[0]
    f_mu, f_var = la(x)
    f_sigma = f_var.squeeze().detach().sqrt()
    assert torch.sqrt(f_sigma**2 + la.sigma_noise.item() ** 2).shape == (30,)
    assert f_mu.squeeze().shape == (30,)


def test_training_by_evidence(sine):
    model, loader, _, _ = sine
    assert from_its_module is marglik_training
    la, model, margliks, losses = marglik_training(
        model=model,
        train_loader=loader,
        likelihood="regression",
        hessian_structure="full",
        backend=BackPackGGN,
        n_epochs=4,
        optimizer_kwargs={"lr": 1e-2},
        prior_structure=PriorStructure.SCALAR,
    )
    assert isinstance(la, BaseLaplace)
    assert len(losses) == 4
    assert all(math.isfinite(value) for value in margliks)


def test_subnetworks(images):
    model, loader, x, _ = images
    for mask in (
        RandomSubnetMask(model, n_params_subnet=20),
        ModuleNameSubnetMask(model, module_names=["3"]),
        LargestVarianceDiagLaplaceSubnetMask(model, 20, DiagLaplace(model, "classification")),
    ):
        indices = mask.select(loader)
        la = Laplace(
            model,
            "classification",
            subset_of_weights="subnetwork",
            hessian_structure="full",
            subnetwork_indices=indices,
        )
        la.fit(loader)
        assert isinstance(la, FullSubnetLaplace)
        assert la.n_params_subnet == len(indices)
        assert la(x, pred_type="nn", link_approx="mc", n_samples=5).shape == (24, 3)


def test_gaussian_processes(sine, images):
    model, loader, x, _ = sine
    la = FunctionalLaplace(model, "regression", n_subset=30, prior_precision=2.0)
    la.fit(loader)
    la.optimize_prior_precision()
    mean, variance = la(x)
    assert mean.shape == (30, 1)
    assert variance.shape == (30, 1, 1)
    model, loader, x, _ = images
    la = FunctionalLLLaplace(model, "classification", n_subset=10, independent_outputs=True, backend=BackPackGGN)
    la.fit(loader)
    assert la(x).shape == (24, 3)


def test_mappings_as_batches():
    class Tokens(Dataset):
        def __len__(self):
            return 12

        def __getitem__(self, index):
            generator = torch.Generator().manual_seed(index)
            ids = torch.randint(9, (5,), generator=generator)
            return {"input_ids": ids, "attention_mask": torch.ones(5), "labels": ids.sum() % 2}

    class Classifier(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.head = nn.Embedding(9, 6), nn.Linear(6, 2)

        def forward(self, data):
            hidden = self.embedding(data["input_ids"]) * data["attention_mask"].unsqueeze(-1)
            return self.head(hidden.mean(1))

    torch.manual_seed(0)
    loader = DataLoader(Tokens(), batch_size=4)
    model = Classifier()
    la = Laplace(model, "classification", subset_of_weights="last_layer", hessian_structure="full")
    la.fit(loader)
    la.optimize_prior_precision()
    assert la(next(iter(loader))).shape == (4, 2)
    for p in model.embedding.parameters():
        p.requires_grad = False
    la = KronLaplace(model, "classification")
    la.fit(loader)
    assert la(next(iter(loader))).shape == (4, 2)


def test_a_reward_model():
    class Reward(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 1))

        def forward(self, x):
            out = self.net(x)
            return out.squeeze(-1) if x.dim() == 3 else out

    torch.manual_seed(0)
    pairs, preferred = torch.randn(16, 2, 3), torch.randint(2, (16,))
    la = Laplace(Reward(), "reward_modeling", subset_of_weights="all", hessian_structure="kron")
    la.fit(DataLoader(TensorDataset(pairs, preferred), batch_size=6))
    la.optimize_prior_precision()
    mean, variance = la(torch.randn(5, 3))
    assert mean.shape == (5, 1)
    assert variance.shape == (5, 1, 1)


def test_a_surrogate_with_gradients(sine):
    model, loader, _, _ = sine

    def surrogate(backend: type[CurvatureInterface] = CurvlinopsGGN) -> BaseLaplace:
        la = Laplace(model, "regression", "all", "kron", enable_backprop=True, backend=backend)
        la.fit(loader)
        return la

    x = torch.rand(4, 1, requires_grad=True)
    mean, covariance = surrogate()(x, joint=True)
    assert covariance.shape == (4, 4)
    improvement = (mean + covariance.diagonal().sqrt()).sum()
    assert torch.autograd.grad(improvement, x)[0].abs().max() > 0


def test_draws_from_the_posterior(images):
    model, loader, x, _ = images
    la = DiagLaplace(model, "classification", prior_precision=10.0)
    la.fit(loader)
    samples = la.sample(7)
    assert samples.shape == (7, la.n_params)
    assert la.predictive_samples(x, pred_type="glm", n_samples=7).shape == (7, 24, 3)
    with torch.no_grad():
        nn.utils.vector_to_parameters(samples[0], model.parameters())
        model(x)
        nn.utils.vector_to_parameters(la.mean, model.parameters())


def test_a_state_is_saved_and_loaded(images, tmp_path):
    model, loader, x, _ = images
    la = Laplace(model, "classification", subset_of_weights="all", hessian_structure="diag")
    la.fit(loader)
    la.optimize_prior_precision(method="marglik")
    torch.save(la.state_dict(), tmp_path / "state_dict.bin")
    la2 = Laplace(model, "classification", subset_of_weights="all", hessian_structure="diag")
    la2.load_state_dict(torch.load(tmp_path / "state_dict.bin"))
    assert torch.allclose(la(x), la2(x))
    assert la.prior_precision[0] == la2.prior_precision[0]


def test_one_task_after_another(images):
    """The posterior of a task, by its diagonal, is the prior of the next."""
    model, loader, x, y = images
    prior_mean, prior_precision = torch.zeros(()), torch.tensor(1.0)
    for task in range(3):
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        for images_, labels in loader:
            optimizer.zero_grad()
            weights = nn.utils.parameters_to_vector(model.parameters())
            penalty = 0.5 * (prior_precision * (weights - prior_mean) ** 2).sum() / len(y)
            (nn.functional.cross_entropy(model(images_), labels) + penalty).backward()
            optimizer.step()
        la = DiagLaplace(model, "classification", prior_mean=prior_mean, prior_precision=prior_precision)
        la.fit(loader)
        before = prior_precision
        prior_mean, prior_precision = la.mean.clone(), la.posterior_precision.clone()
        assert (prior_precision >= before).all(), task
    assert la(x).shape == (24, 3)


def test_online_updates(images):
    model, _, x, y = images
    la = Laplace(model, "classification", subset_of_weights="all", hessian_structure="kron")
    la.fit(DataLoader(TensorDataset(x[:12], y[:12]), batch_size=6))
    la.fit(DataLoader(TensorDataset(x[12:], y[12:]), batch_size=6), override=False)
    assert la.n_data == 24
    assert torch.isfinite(la.log_marginal_likelihood())


def test_unknown_inputs_are_less_certain(images):
    model, loader, _, _ = images
    la = Laplace(model, "classification", "last_layer", "kron", prior_precision=1e-2)
    la.fit(loader)
    la.optimize_prior_precision(method="gridsearch", val_loader=loader, grid_size=7)

    @torch.no_grad()
    def predict(loader, laplace=False):
        outputs = [la(x) if laplace else torch.softmax(model(x), dim=-1) for x, _ in loader]
        return torch.cat(outputs).cpu()

    far = DataLoader(TensorDataset(50 * torch.randn(24, 1, 6, 6), torch.zeros(24)), batch_size=10)
    confidence = {kind: predict(far, kind == "laplace").max(1).values.mean() for kind in ("map", "laplace")}
    assert confidence["laplace"] < confidence["map"]
    entropy = -(predict(far, laplace=True) * predict(far, laplace=True).clamp(min=1e-12).log()).sum(1)
    assert entropy.shape == (24,)


def test_adapters_of_a_frozen_network():
    """LoRA on a classifier of words that takes the mapping of a tokenizer: only the adapters are uncertain."""

    class LoRA(nn.Module):
        def __init__(self, base: nn.Linear, rank: int = 2) -> None:
            super().__init__()
            self.base = base.requires_grad_(False)
            self.lora_A = nn.Linear(base.in_features, rank, bias=False)
            self.lora_B = nn.Linear(rank, base.out_features, bias=False)

        def forward(self, x):
            return self.base(x) + self.lora_B(self.lora_A(x))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(11, 6).requires_grad_(False)
            self.query, self.head = LoRA(nn.Linear(6, 6)), nn.Linear(6, 2).requires_grad_(False)

        def forward(self, data):
            device = next(self.parameters()).device
            hidden = self.query(self.embedding(data["input_ids"].to(device))).tanh()
            return self.head(hidden.mean(1))

    torch.manual_seed(0)
    data = [{"input_ids": torch.randint(11, (4, 5)), "labels": torch.randint(2, (4,))} for _ in range(3)]
    la = Laplace(Model(), "classification", subset_of_weights="all", hessian_structure="kron", backend=CurvlinopsGGN)
    la.fit(data)
    assert la.n_params == 2 * 6 * 2
    la.optimize_prior_precision(method="marglik", prior_structure="layerwise")
    assert la(data[0], link_approx="mc", n_samples=5).shape == (4, 2)
    assert la.predictive_samples(data[0], n_samples=5).shape == (5, 4, 2)


def test_inducing_points(sine):
    model, loader, x, _ = sine
    la = Laplace(
        model,
        "regression",
        hessian_structure="gp",
        subset_of_weights="all",
        functional_approximation="variational",
        n_subset=8,
    )
    la.fit(loader)
    la.optimize_prior_precision()
    f_mu, f_var = la(x)
    assert f_mu.shape == (30, 1)
    assert (f_var > 0).all()
    valla = VaLLA(model, "regression", inducing_locations="kmeans", num_inducing=8)
    valla.fit(loader, iterations=10)
    assert valla(x)[1].shape == (30, 1, 1)


def test_grids_are_scored_by_a_metric_or_a_function(sine, images):
    model, loader, x, y = sine
    la = Laplace(model, "regression", subset_of_weights="last_layer", hessian_structure="full", sigma_noise=0.3)
    la.fit(loader)

    def nll(mean, variance, target):
        return -torch.distributions.Normal(mean, variance.squeeze(-1).sqrt()).log_prob(target).mean()

    la.optimize_prior_precision(method="gridsearch", val_loader=loader, grid_size=4, loss=nll)
    f_mu, f_var = la(x)
    pred_std = torch.sqrt(f_var.squeeze() + la.sigma_noise.item() ** 2)
    assert pred_std.shape == f_mu.squeeze().shape == y.squeeze().shape
    model, loader, x, y = images
    la = Laplace(model, "classification", "all", "diag")
    la.fit(loader)
    la.optimize_prior_precision(
        method="gridsearch", val_loader=loader, grid_size=4, pred_type="nn", n_samples=5, loss=RunningNLLMetric()
    )
    metric = RunningNLLMetric()
    metric.update(la(x), y)
    assert metric.compute() > 0
