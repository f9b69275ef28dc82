"""`marglik_training`: what it minimises, what it tunes, and that an interruption changes nothing."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, TensorDataset

from exact import assert_close
from laplace import Laplace, marglik_training
from laplace.checkpoints import container
from laplace.errors import (
    CheckpointError,
    InputError,
    LaplaceWarning,
    NumericalError,
    OptionError,
    UnsupportedError,
)
from networks import cut, make

NOISE = 0.3


def wave(n: int = 120, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(n, 1, generator=generator, dtype=torch.float64) * 6 - 3
    return x, 2 * x.sin() + NOISE * torch.randn(n, 1, generator=generator, dtype=torch.float64)


def small(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(1, 20), nn.Tanh(), nn.Linear(20, 1)).double()


pytestmark = pytest.mark.filterwarnings("ignore:kron keeps:laplace.errors.LaplaceWarning")


def loader(seed: int = 3, size: int = 40) -> DataLoader:
    generator = torch.Generator().manual_seed(seed)
    return DataLoader(TensorDataset(*wave()), batch_size=size, shuffle=True, generator=generator)


FAST = {"optimizer_kwargs": {"lr": 3e-2}, "marglik_frequency": 10}


@pytest.mark.parametrize("structure", ["kron", "full"])
def test_it_finds_the_noise_and_raises_the_evidence(structure):
    la, model, margliks, losses = marglik_training(small(), loader(), "regression", structure, n_epochs=150, **FAST)
    assert float(la.sigma_noise) == pytest.approx(NOISE, rel=0.15)
    assert margliks[-1] > margliks[0]
    assert losses[-1] < losses[0]
    assert (len(margliks), len(losses)) == (15, 150)
    assert la.prior_precision.shape == (4,)
    assert la.model is model
    assert float(la.log_marginal_likelihood()) == pytest.approx(margliks[-1])


@pytest.mark.parametrize("temperature", [1.0, 0.5])
@pytest.mark.parametrize("prior_structure", ["scalar", "layerwise"])
@pytest.mark.parametrize("task", ["classification", "regression"])
def test_it_descends_the_tempered_negative_log_joint(task, prior_structure, temperature):
    model, x, y = make("mlp", task)
    options = {"temperature": temperature, "prior_structure": prior_structure, "fix_sigma_noise": True}
    sigma = 0.5 if task == "regression" else 1.0
    optimizer = {"optimizer_cls": torch.optim.SGD, "optimizer_kwargs": {"lr": 0.0}}
    la, _, margliks, losses = marglik_training(
        model, [(x, y)], task, "diag", sigma_noise_init=sigma, n_epochs=1, n_epochs_burnin=1, prior_prec_init=0.8,
        **options, **optimizer,
    )  # fmt: skip
    slopes, f = [p.grad for p in model.parameters()], model(x)
    joint = la.likelihood.log_prob(f, y, sigma).sum() / temperature
    theta = torch.cat([p.flatten() for p in model.parameters()])
    joint = joint - 0.5 * 0.8 * theta.square().sum()
    expected = torch.autograd.grad(-joint, list(model.parameters()))
    unit = sigma**-2 / temperature * len(x)  # by which the loss is divided, so that a step size means the same
    assert margliks == []
    assert losses[0] == pytest.approx(-float(joint.detach()) / len(x))
    for slope, other in zip(slopes, expected, strict=True):
        assert_close(slope * unit, other)


def test_each_call_moves_the_hyperparameters_no_further_than_the_gradient_steps_would():
    model = small()
    la, *_ = marglik_training(model, loader(), "regression", n_epochs=1, lr_hyp=0.02, n_hypersteps=5)
    moved = torch.cat([la.prior_precision.log(), la.sigma_noise.log().reshape(1)]).abs()
    assert float(moved.max()) == pytest.approx(0.1)
    la, *_ = marglik_training(small(), loader(), "regression", n_epochs=2, n_epochs_burnin=2, prior_prec_init=3.0)
    assert float(la.prior_precision) == 3
    assert float(la.sigma_noise) == 1


@pytest.mark.parametrize(
    ("structure", "curvature", "prior_structure", "subset"),
    [
        ("kron", "ef", "scalar", "all"),
        ("diag", "sketch", "diag", "all"),
        ("full", "ggn", "diag", "last_layer"),
        ("kron", "sketch", "layerwise", "last_layer"),
    ],
)
def test_structures_curvatures_and_priors_combine(structure, curvature, prior_structure, subset):
    model, x, y = make("mlp", "classification", n=60)
    options = {"curvature": curvature, "subset_of_weights": subset, "prior_structure": prior_structure}
    la, *_ = marglik_training(model, cut(x, y, 20), hessian_structure=structure, n_epochs=4, **options)
    expected = {"scalar": 1, "layerwise": la.n_layers, "diag": la.n_params}[prior_structure]
    assert la.prior_precision.numel() == expected
    assert_close(la(x).sum(1), torch.ones(60, dtype=torch.float64))


def test_the_best_by_evidence_is_kept_on_request():
    la, _, margliks, _ = marglik_training(
        small(), loader(), "regression", n_epochs=40, keep_best=True, optimizer_kwargs={"lr": 0.3},
        marglik_frequency=1, scheduler_cls=Rising,
    )  # fmt: skip
    assert max(margliks) > margliks[-1]
    assert float(la.log_marginal_likelihood()) == pytest.approx(max(margliks))


class Rising(torch.optim.lr_scheduler.LambdaLR):
    """Ends with steps that are too long."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(optimizer, lambda step: 0.1 if step < 60 else 3.0)


class Interrupted:
    """A loader that is stopped by the user in its k-th run (0: never)."""

    def __init__(self, inner: DataLoader, k: int) -> None:
        self.inner, self.k, self.generator = inner, k, inner.generator

    def __iter__(self):
        self.k -= 1
        for number, batch in enumerate(self.inner):
            if self.k == 0 and number == 1:
                raise KeyboardInterrupt
            yield batch


class Noisy(nn.Module):
    """A network that draws random numbers while it is trained."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(1, 12), nn.BatchNorm1d(12), nn.Dropout(0.2), nn.Tanh(), nn.Linear(12, 1))
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)


@pytest.mark.parametrize("k", [3, 9, 14])
def test_an_interrupted_training_goes_on_to_the_same_end(k, tmp_path):
    def call(loader, file, **options):
        torch.manual_seed(5)
        generator = torch.Generator().manual_seed(1)
        return marglik_training(
            Noisy(), loader, "regression", curvature="sketch", n_epochs=10, marglik_frequency=2, keep_best=True,
            scheduler_cls=CosineAnnealingLR, scheduler_kwargs={"T_max": 30}, checkpoint=file, generator=generator,
            optimizer_kwargs={"lr": 1e-2}, **options,
        )  # fmt: skip

    expected = call(Interrupted(loader(), 0), None)
    file = tmp_path / "deep" / "state.safetensors"
    with pytest.raises(KeyboardInterrupt):
        call(Interrupted(loader(), k), file)
    found = call(Interrupted(loader(), 0), file)
    again = call(Interrupted(loader(), 0), file)
    for other in (found, again):
        assert other[2:] == expected[2:]
        for name, value in expected[1].state_dict().items():
            assert torch.equal(other[1].state_dict()[name], value)
        assert torch.equal(other[0].prior_precision, expected[0].prior_precision)
        assert torch.equal(other[0].posterior_covariance, expected[0].posterior_covariance)
    assert [path.name for path in file.parent.iterdir()] == ["state.safetensors"]
    assert set(container.read(file, "state of marglik_training")) >= {"model", "optimizer", "random", "settings"}
    with pytest.raises(CheckpointError, match=r"another training: temperature \(1.0 there, 2.0 here\)"):
        call(loader(), file, temperature=2.0)
    file.write_bytes(b"no checkpoint")
    with pytest.raises(CheckpointError, match=r"state\.safetensors' is not a safetensors file"):
        call(loader(), file)


def test_a_next_task_is_trained_towards_the_earlier_ones_and_retunes_delta():
    model, x, y = make("mlp", "classification", n=60)
    la, *_ = marglik_training(model, cut(x, y, 20), n_epochs=20, **FAST)
    before, prior, other = la.mean, la.as_prior(), torch.roll(x, 1, 1)
    far, near = copy.deepcopy(model), copy.deepcopy(model)
    marglik_training(far, cut(other, y, 20), n_epochs=20, n_epochs_burnin=20, prior_prec_init=1e-3, **FAST)
    la, *_ = marglik_training(near, cut(other, y, 20), n_epochs=20, prior=prior, **FAST)
    distance = [float(-2 * prior.log_prob(m, normalized=False).detach()) for m in (near, far)]
    assert distance[0] < 0.5 * distance[1]
    assert not torch.equal(la.prior_precision, prior.precision)
    assert_close(la.prior_mean, before)
    assert la.as_prior().n_data == 120


def test_the_network_comes_back_in_its_mode_and_bad_input_is_refused():
    model = small()
    data = cut(*wave(), 40)
    model.eval()
    marglik_training(model, data, "regression", n_epochs=1)
    assert not model.training
    with pytest.warns(LaplaceWarning, match="weight_decay is left out"):
        marglik_training(model, data, "regression", n_epochs=1, optimizer_kwargs={"weight_decay": 1.0})
    with pytest.raises(InputError, match="can be read only once"):
        marglik_training(model, iter(data), "regression", n_epochs=1)
    with pytest.raises(InputError, match="gave no example"):
        marglik_training(model, [], "regression", n_epochs=1)
    with pytest.raises(UnsupportedError, match=r"kron cannot use prior_structure='diag'.*'full', 'diag', 'block'"):
        marglik_training(model, data, "regression", n_epochs=1, prior_structure="diag")
    with pytest.raises(InputError, match="epoch 1, batch 1: the labels hold NaN"):
        marglik_training(model, [data[0], (data[1][0], data[1][1] * float("nan"))], "regression", n_epochs=1)
    prior = Laplace(model, "regression", "all").fit(data).as_prior()
    with pytest.raises(OptionError, match=r"leave prior_precision \(prior_prec_init\)"):
        marglik_training(model, data, "regression", n_epochs=1, prior=prior, prior_prec_init=2.0)
    with pytest.raises(OptionError, match=r"ReduceLROnPlateau needs a loss.*CosineAnnealingLR"):
        marglik_training(
            model, data, "regression", n_epochs=1, scheduler_cls=torch.optim.lr_scheduler.ReduceLROnPlateau
        )
    with pytest.warns(LaplaceWarning, match=r"never computed: 3 epochs with n_epochs_burnin=3.*stay where they start"):
        marglik_training(model, data, "regression", n_epochs=3, n_epochs_burnin=3)


def test_training_that_diverges_says_so():
    with pytest.raises((InputError, NumericalError), match=r"epoch \d+.*: .*Take a smaller learning rate"):
        marglik_training(
            small(),
            cut(*wave(), 40),
            "regression",
            n_epochs=200,
            optimizer_cls=torch.optim.SGD,
            optimizer_kwargs={"lr": 100.0},
        )


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"optimizer_kwargs": {"lr": 1e-4}}, r"lr of the optimizer \(0\.01 there, 0\.0001 here\)"),
        ({"prior_prec_init": 2.0}, r"prior_prec_init \(1\.0 there, 2\.0 here\)"),
        ({"sigma_noise_init": 0.5}, "sigma_noise_init"),
        ({"n_hypersteps": 3}, "n_hypersteps"),
        ({"n_epochs": 1}, r"already has 2 epochs; n_epochs=1 is fewer"),
    ],
)
def test_a_training_goes_on_with_the_same_settings_only(changed, words, tmp_path):
    data, path = cut(*wave(), 40), tmp_path / "training"
    options = {"n_epochs": 2, "checkpoint": path, "optimizer_kwargs": {"lr": 1e-2}}
    marglik_training(small(), data, "regression", **options)
    with pytest.raises(CheckpointError, match=words):
        marglik_training(small(), data, "regression", **options | {"n_epochs": 4} | changed)
    *_, losses = marglik_training(small(), data, "regression", **options | {"n_epochs": 4})
    assert len(losses) == 4
