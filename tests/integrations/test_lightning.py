"""Lightning: the callback gives what fit, tune and calibrate give by hand; Trainer.predict takes a posterior."""

from __future__ import annotations

import warnings

import pytest
import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from laplace import Laplace, Prediction
from laplace.errors import InputError, MissingKeyError, ModelError, NotFittedError, OptionError, UnsupportedError
from laplace.integrations.lightning import LaplaceCallback, LaplaceModule

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")


def data(n=60):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, 3, generator=generator)
    return x, (x.sum(1) + torch.randn(n, generator=generator) > 0).long()


class Classifier(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, _):
        x, y = (batch["x"], batch["labels"]) if isinstance(batch, dict) else batch
        return nn.functional.cross_entropy(self(x), y)

    def validation_step(self, batch, _):
        self.training_step(batch, _)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Headless(Classifier):
    forward = LightningModule.forward

    def training_step(self, batch, _):
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])


class Dicts(torch.utils.data.Dataset):
    def __len__(self):
        return 40

    def __getitem__(self, i):
        x, y = data()
        return {"x": x[i], "labels": y[i]}


class Data(LightningDataModule):
    def __init__(self, several=False, dicts=False) -> None:
        super().__init__()
        self.several, self.dicts, self.stages = several, dicts, []

    def setup(self, stage):
        self.stages.append(stage)
        x, y = data()
        self.parts = TensorDataset(x[:40], y[:40]), TensorDataset(x[40:], y[40:])

    def train_dataloader(self):
        loader = DataLoader(Dicts() if self.dicts else self.parts[0], 16)
        return [loader, loader] if self.several else loader

    def val_dataloader(self):
        return DataLoader(self.parts[1], batch_size=16)

    def predict_dataloader(self):
        return DataLoader(self.parts[1], batch_size=7)


def trainer(tmp_path, *callbacks, **options):
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return Trainer(
        max_epochs=2, accelerator="cpu", callbacks=[*callbacks], default_root_dir=tmp_path, **quiet, **options
    )


class Unvalidated(Classifier):
    validation_step = LightningModule.validation_step


@pytest.mark.parametrize(("kind", "module"), [(Classifier, None), (Classifier, "net"), (Unvalidated, "net")])
def test_the_callback_gives_what_the_calls_give(kind, module, tmp_path):
    callback = LaplaceCallback("classification", module=module, path=tmp_path / "la.safetensors")
    lit, datamodule = kind(), Data()
    with pytest.raises(NotFittedError, match="when training ends"):
        _ = callback.laplace
    trainer(tmp_path, callback).fit(lit, datamodule=datamodule)
    x, y = data()
    la = Laplace(lit.net, "classification").fit([(x[:40], y[:40])])
    la.tune()
    la.calibrate((x[40:], y[40:]))
    torch.testing.assert_close(callback.laplace(x), la(x), rtol=1e-4, atol=1e-5)
    assert callback.tuned is not None
    assert callback.calibrated is not None
    again = Laplace.load(tmp_path / "la.safetensors", lit if module is None else lit.net)
    torch.testing.assert_close(again(x), callback.laplace(x))


class NoValidation(Data):
    def val_dataloader(self):
        return []


def test_an_empty_list_of_validation_loaders_means_none(tmp_path):
    callback, lit = LaplaceCallback("classification", module="net"), Classifier()
    trainer(tmp_path, callback).fit(lit, datamodule=NoValidation())
    x, y = data()
    la = Laplace(lit.net, "classification").fit([(x[:40], y[:40])])
    la.tune()
    torch.testing.assert_close(callback.laplace(x), la(x), rtol=1e-4, atol=1e-5)
    assert callback.calibrated is None


def test_a_network_that_is_not_there_is_refused_before_training(tmp_path):
    lit = Classifier()
    before = lit.net[0].weight.clone()
    with pytest.raises(OptionError, match="which has: net"):
        trainer(tmp_path, LaplaceCallback("classification", module="zz")).fit(lit, datamodule=Data())
    assert torch.equal(lit.net[0].weight, before)


def test_without_validation_data_or_tuning_the_prior_stays(tmp_path):
    x, y = data()
    callback = LaplaceCallback("classification", tune=None, hessian_structure="diag", prior_precision=3.0)
    trainer(tmp_path, callback, limit_val_batches=0).fit(Classifier(), DataLoader(TensorDataset(x, y), 16))
    assert (callback.tuned, callback.calibrated) == (None, None)
    assert float(callback.laplace.prior_precision) == 3
    assert callback.laplace.n_data == 60


def test_several_processes_are_refused_and_told_what_to_write(tmp_path):
    callback, two = LaplaceCallback("classification"), trainer(tmp_path, devices=2, strategy="ddp")
    with pytest.raises(UnsupportedError, match=r"this Trainer has 2.*write la.fit\(loader, group="):
        callback.on_train_end(two, Classifier())


def test_trainer_predict_gives_what_predict_gives(tmp_path):
    la = Laplace(Classifier(), "classification").fit([data()])
    datamodule = Data()
    parts = trainer(tmp_path).predict(LaplaceModule(la, link_approx="mc"), datamodule=datamodule)
    assert [len(part) for part in parts] == [7, 7, 6]
    found, expected = Prediction.cat(parts), la.predict(data()[0][40:], link_approx="mc")
    torch.testing.assert_close(found.epistemic, expected.epistemic, atol=0.02, rtol=0)
    torch.testing.assert_close(la.predict(datamodule).mean, la.predict(data()[0][40:]).mean)


def test_a_datamodule_is_taken_where_loaders_are():
    x, y = data()
    datamodule, model = Data(), Classifier().net
    la = Laplace(model, "classification").fit(datamodule)
    assert datamodule.stages == ["fit"]
    expected = Laplace(model, "classification").fit([(x[:40], y[:40])])
    torch.testing.assert_close(la.posterior_variance, expected.posterior_variance, rtol=1e-4, atol=0)
    la.calibrate(datamodule)
    expected.calibrate((x[40:], y[40:]))
    torch.testing.assert_close(la.prior_precision, expected.prior_precision)


def test_batches_may_be_mappings(tmp_path):
    callback = LaplaceCallback("classification", module="net", tune=None)

    class Named(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.net = Reads()

        def training_step(self, batch, _):
            return nn.functional.cross_entropy(self.net(batch["x"]), batch["labels"])

    trainer(tmp_path, callback, limit_val_batches=0).fit(Named(), datamodule=Data(dicts=True))
    assert callback.laplace.n_data == 40


class Pictures(torch.utils.data.Dataset):
    def __len__(self):
        return 40

    def __getitem__(self, i):
        x, y = data()
        return {"image": x[i], "label": y[i]}


def test_batches_of_any_form_are_unpacked(tmp_path):
    def pair(batch):
        return batch["image"], batch["label"]

    class Named(Classifier):
        def training_step(self, batch, _):
            return nn.functional.cross_entropy(self(batch["image"]), batch["label"])

    loader, callback = DataLoader(Pictures(), 16), LaplaceCallback("classification", unpack=pair)
    trainer(tmp_path, callback).fit(Named(), loader, loader)
    x, y = data()
    la = Laplace(callback.laplace.model, "classification").fit([(x[:40], y[:40])])
    la.tune()
    la.calibrate((x[:40], y[:40]))
    torch.testing.assert_close(callback.laplace(x), la(x), rtol=1e-4, atol=1e-5)
    with pytest.raises(MissingKeyError, match=r"'labels'.*unpack=lambda batch"):
        trainer(tmp_path, LaplaceCallback("classification")).fit(Named(), loader)
    with pytest.raises(ModelError, match=r"unpack=lambda batch"):
        trainer(tmp_path).predict(LaplaceModule(callback.laplace), loader)
    parts = trainer(tmp_path).predict(LaplaceModule(callback.laplace, unpack=pair), loader)
    torch.testing.assert_close(Prediction.cat(parts).mean, callback.laplace.predict(x[:40]).mean)
    with pytest.raises(OptionError, match=r"unpack='image' must be a function of a batch that returns \(x, y\)"):
        LaplaceCallback("classification", unpack="image")


def test_weights_may_be_named_before_the_network_is_known(tmp_path):
    callback = LaplaceCallback("classification", subset_of_weights=["net.0"], tune=None)
    trainer(tmp_path, callback, limit_val_batches=0).fit(Classifier(), datamodule=Data())
    assert callback.laplace.n_params == 3 * 8 + 8


class Reads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x):
        return self.layer(x)


def test_the_network_and_its_trainer_are_left_alone(tmp_path):
    callback, lit = LaplaceCallback("classification", tune=None), Classifier()
    run = trainer(tmp_path, callback)
    run.fit(lit, datamodule=Data())
    assert lit.trainer is run
    assert callback.laplace.model.net is lit.net
    assert callback.laplace.model._trainer is None


def test_several_validation_loaders_are_refused_before_training(tmp_path):
    class Twice(Classifier):
        def validation_step(self, batch, _, dataloader_idx=0):
            self.training_step(batch, _)

    model, loader = Twice(), DataLoader(TensorDataset(*data()), 16)
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(InputError, match=r"several validation loaders.*\.fit\(loader\)\.calibrate"):
        trainer(tmp_path, LaplaceCallback("classification")).fit(model, loader, [loader, loader])
    assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))
    callback = LaplaceCallback("classification", calibrate=False)
    trainer(tmp_path, callback).fit(model, loader, [loader, loader])
    assert callback.laplace.n_data == 60


def test_bad_use_is_said(tmp_path):
    with pytest.raises(OptionError, match="'krom' is not an option"):
        LaplaceCallback("classification", hessian_structure="krom")
    with pytest.raises(OptionError, match="must be the name of an attribute"):
        LaplaceCallback("classification", module=nn.Linear(2, 2))
    with pytest.raises(OptionError, match=r"'nett' is no module of Classifier, which has: net"):
        trainer(tmp_path, LaplaceCallback("classification", module="nett")).fit(Classifier(), datamodule=Data())
    with pytest.raises(OptionError, match=r"Headless has no forward\(x\).*module='net'"):
        trainer(tmp_path, LaplaceCallback("classification"), limit_val_batches=0).fit(Headless(), datamodule=Data())
    with pytest.raises(NotFittedError, match="needs a fitted Laplace"):
        LaplaceModule(Laplace(nn.Linear(3, 2), "classification"))
    with pytest.raises(InputError, match=r"train_dataloader\(\) gives list of several loaders"):
        Laplace(Classifier().net, "classification").fit(Data(several=True))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(InputError, match=r"LightningDataModule.train_dataloader\(\) failed"):
            Laplace(Classifier().net, "classification").fit(LightningDataModule())
