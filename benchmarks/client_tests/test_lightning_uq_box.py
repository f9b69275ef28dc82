"""lightning-uq-box's modules are tested by Lightning: they construct a second Laplace object, fit, tune and predict."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from laplace import Laplace

wrapped = pytest.importorskip("lightning_uq_box.uq_methods.laplace_model")
lightning = pytest.importorskip("lightning")


class Rows(Dataset):
    """Pairs as mappings, as lightning-uq-box's data modules give them."""

    def __init__(self, classes: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(24, 4, generator=generator)
        self.y = torch.randint(classes, (24,), generator=generator) if classes else self.x[:, :1].sin()

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input": self.x[index], "target": self.y[index]}


class Data(lightning.LightningDataModule):
    """Training and test data are the same rows."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.classes = classes

    def train_dataloader(self) -> Any:
        """Return the training data."""
        return DataLoader(Rows(self.classes), batch_size=8)

    def test_dataloader(self) -> Any:
        """Return the test data."""
        return DataLoader(Rows(self.classes), batch_size=8)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Leave batches as they are."""
        return batch


def run_by_lightning(module: Any, classes: int, folder: Any) -> Any:
    trainer = lightning.Trainer(
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_checkpointing=False,
        default_root_dir=folder,
    )
    trainer.test(module, Data(classes), verbose=False)
    return module


def network(outputs: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, outputs))


@pytest.mark.parametrize(
    ("subset", "structure", "pred_type"), list(product(["last_layer", "all"], ["kron", "diag", "full"], ["glm", "nn"]))
)
def test_regression(subset, structure, pred_type, tmp_path):
    la = Laplace(network(1), "regression", subset, structure, sigma_noise=1.2, prior_precision=1.7)
    link = "mc" if pred_type == "nn" else "probit"
    module = wrapped.LaplaceRegression(la, pred_type, link, n_epochs_tuning=3)
    module = run_by_lightning(module, 0, tmp_path)
    assert module.laplace_model.sigma_noise.item() == pytest.approx(1.2)
    assert module.laplace_model.prior_precision.item() != pytest.approx(1.7)
    assert module.predict_step(torch.randn(5, 4))["pred"].shape[0] == 5


@pytest.mark.parametrize(("noise", "prior"), [(False, False), (True, False), (False, True), (True, True)])
def test_what_is_tuned_changes(noise, prior, tmp_path):
    la = Laplace(network(1), "regression", "all", "full", sigma_noise=1.2, prior_precision=1.7)
    module = wrapped.LaplaceRegression(la, tune_prior_precision=prior, tune_sigma_noise=noise, n_epochs_tuning=3)
    module = run_by_lightning(module, 0, tmp_path)
    assert (module.laplace_model.sigma_noise.item() != pytest.approx(1.2)) == noise
    assert (module.laplace_model.prior_precision.item() != pytest.approx(1.7)) == prior


def test_draws(tmp_path):
    la = Laplace(network(1), "regression", "all", "diag")
    module = run_by_lightning(wrapped.LaplaceRegression(la, num_samples=7, n_epochs_tuning=2), 0, tmp_path)
    assert module.predict_step(torch.randn(5, 4))["samples"].shape[-1] == 7


@pytest.mark.parametrize(("subset", "structure"), list(product(["last_layer", "all"], ["kron", "diag", "full"])))
def test_classification(subset, structure, tmp_path):
    la = Laplace(network(3), "classification", subset, structure)
    module = run_by_lightning(wrapped.LaplaceClassification(la), 3, tmp_path)
    assert module.predict_step(torch.randn(5, 4))["pred"].shape[0] == 5
