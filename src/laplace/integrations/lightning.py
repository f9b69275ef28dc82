"""Lightning: a callback that makes the network Bayesian when training ends, and a module for `Trainer.predict`.

callback = LaplaceCallback("classification", path="posterior.safetensors")
Trainer(callbacks=[callback]).fit(lit_module, datamodule=data)
predictions = Trainer().predict(LaplaceModule(callback.laplace), datamodule=data)
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import nn

from laplace.checks import flag, path_of, shown
from laplace.errors import InputError, MissingKeyError, ModelError, NotFittedError, OptionError, UnsupportedError
from laplace.integrations.options import require_options
from laplace.laplace import Laplace
from laplace.likelihoods import Likelihood

if TYPE_CHECKING:
    from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer

    from laplace.predictive.prediction import Prediction
    from laplace.predictive.reshape import PredictionAtPositions
    from laplace.tuning import Tuned
else:
    try:  # the two packages have classes of their own, which do not mix: take the one that is in use
        if "pytorch_lightning" in sys.modules and "lightning" not in sys.modules:
            from pytorch_lightning import Callback, LightningDataModule, LightningModule, Trainer
        else:
            from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
    except ImportError as error:
        raise ImportError(
            "laplace.integrations.lightning needs Lightning: pip install 'laplace-redux[lightning]'"
        ) from error

__all__ = ["LaplaceCallback", "LaplaceModule"]


class LaplaceCallback(Callback):
    """Fit a posterior when training ends, tune it, calibrate it on the validation data, and save it.

    It reads the Trainer's own training and validation data, and the weights that the network has at the end.

    Args:
        likelihood: As `Laplace` takes it.
        module: The name of the attribute of the LightningModule that is the network, such as 'net' or 'model.backbone'.
            By default the LightningModule itself, with its `forward`.
        tune: A method of `la.tune`; None leaves the prior as it is.
        calibrate: Whether to call `la.calibrate` on the validation data, if there is any.
        path: A file to which the posterior is saved.
        unpack: A function that makes (x, y) of a batch, as `training_step` does: lambda batch: (batch["image"],
            batch["label"]). By default batches are read as `Laplace.fit` reads them.
        **laplace_options: Further options of `Laplace`.

    Attributes:
        laplace: The fitted `Laplace`.
        tuned: The result of `la.tune`; None if it was not called.
        calibrated: The result of `la.calibrate`; None if it was not called.
    """

    def __init__(
        self,
        likelihood: Likelihood | str,
        *,
        module: str | None = None,
        tune: str | None = "auto",
        calibrate: bool = True,
        path: str | os.PathLike[str] | None = None,
        unpack: Callable[[Any], tuple[Any, Any]] | None = None,
        **laplace_options: Any,
    ) -> None:
        if module is not None and not isinstance(module, str):
            raise OptionError(f"module={shown(module)} must be the name of an attribute, as in module='net'.")
        self.likelihood, self.module, self.tune = likelihood, module, tune
        self.calibrate = flag(calibrate, "calibrate")
        self.path = None if path is None else path_of(path, "path")
        self.laplace_options = laplace_options
        self.unpack = _function_or_none(unpack)
        require_options(likelihood, laplace_options)
        self.tuned: Tuned | None = None
        self.calibrated: Any = None
        self._laplace: Laplace | None = None

    @property
    def laplace(self) -> Laplace:
        """Return the fitted posterior.

        Raises:
            NotFittedError: training has not ended yet.
        """
        if self._laplace is None:
            raise NotFittedError("LaplaceCallback fits its posterior when training ends. Call Trainer.fit first.")
        return self._laplace

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Refuse, before training begins, what could not be fitted at its end. Lightning calls it.

        Args:
            trainer: The Trainer.
            pl_module: The LightningModule.
        """
        _require_one_process(trainer)
        self._network(pl_module)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Refuse several loaders before the first batch. Lightning calls it.

        Args:
            trainer: The Trainer, whose loaders are there now.
            pl_module: Not used.
        """
        _one(trainer.train_dataloader, "training")
        if self.calibrate and not _is_none(trainer.val_dataloaders):
            _one(trainer.val_dataloaders, "validation")

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Fit, tune, calibrate and save. Lightning calls it.

        Args:
            trainer: The Trainer, whose data is read.
            pl_module: The trained LightningModule.
        """
        _require_one_process(trainer)
        la = Laplace(self._network(pl_module), self.likelihood, **self.laplace_options)
        with _told_of_unpack(self.unpack):
            la.fit(_unpacked(_one(trainer.train_dataloader, "training"), self.unpack))
        if self.tune is not None:
            self.tuned = la.tune(method=self.tune)
        validation = _validation_data(trainer) if self.calibrate else None
        if validation is not None:
            self.calibrated = la.calibrate(_unpacked(_one(validation, "validation"), self.unpack))
        if self.path is not None and trainer.is_global_zero:
            la.save(self.path)
        self._laplace = la

    def _network(self, pl_module: LightningModule) -> nn.Module:
        """Return the network: a part of the LightningModule, or all of it without its Trainer."""
        if self.module is None:
            if type(pl_module).forward in (LightningModule.forward, nn.Module.forward):
                raise OptionError(
                    f"{type(pl_module).__name__} has no forward(x). Write one, or name the network: "
                    "LaplaceCallback(..., module='net')."
                )
            return _without_trainer(pl_module)
        found: Any = pl_module
        for name in self.module.split("."):
            found = getattr(found, name, None)
        if not isinstance(found, nn.Module):
            there = ", ".join(name for name, _ in pl_module.named_children())
            raise OptionError(f"module={self.module!r} is no module of {type(pl_module).__name__}, which has: {there}.")
        return found


class LaplaceModule(LightningModule):
    """Wraps a fitted posterior as a LightningModule, for `Trainer.predict`.

    The batches may have labels, which are not used. `Prediction.cat(trainer.predict(...))` joins what comes back.

    Args:
        la: A fitted `Laplace`.
        unpack: A function that makes (x, y) of a batch, as that of `LaplaceCallback`; y is not used.
        **options: Options of `la.predict`, such as link_approx or n_samples.
    """

    def __init__(self, la: Laplace, unpack: Callable[[Any], tuple[Any, Any]] | None = None, **options: Any) -> None:
        super().__init__()
        if not isinstance(la, Laplace) or not la.is_fitted:
            raise NotFittedError(f"LaplaceModule needs a fitted Laplace; got {shown(la)}. Call la.fit(...) first.")
        self.la, self.unpack, self.options = la, _function_or_none(unpack), options
        self.network = la.model  # so that the Trainer moves it

    def forward(self, x: Any) -> Prediction | PredictionAtPositions:
        """Return `la.predict(x)`.

        Args:
            x: The inputs.
        """
        return self.la.predict(x, **self.options)

    def on_predict_start(self) -> None:
        """Move the posterior to where the Trainer has moved the network."""
        self.la.to(self.device)

    def predict_step(self, batch: Any, batch_idx: int = 0, dataloader_idx: int = 0) -> Any:
        """Return the prediction of a batch of a loader.

        Args:
            batch: Inputs, a pair (x, y), or a mapping.
            batch_idx: Not used.
            dataloader_idx: Not used.
        """
        if self.unpack is not None:
            return self.la.predict(self.unpack(batch)[0], **self.options)
        with _told_of_unpack(None):
            return self.la.predict([batch], **self.options)


class _Unpacked:
    """Yields the batches of a loader, each unpacked into (x, y)."""

    def __init__(self, loader: Any, unpack: Callable[[Any], tuple[Any, Any]]) -> None:
        self.loader, self.unpack = loader, unpack

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        return map(self.unpack, self.loader)

    def __len__(self) -> int:
        return len(self.loader)


@contextmanager
def _told_of_unpack(unpack: Any) -> Iterator[None]:
    """Add to errors about batches that `unpack` takes them apart, if it was not given."""
    try:
        yield
    except (InputError, MissingKeyError, ModelError) as error:
        if unpack is not None or type(error) not in (InputError, MissingKeyError, ModelError):
            raise
        raise type(error)(
            f"{error} If training_step takes its batches apart, say how: unpack=lambda batch: (batch['image'], "
            "batch['label']). The network itself keeps its trained weights."
        ) from error.__cause__


def _unpacked(loader: Any, unpack: Callable[[Any], tuple[Any, Any]] | None) -> Any:
    return loader if unpack is None else _Unpacked(loader, unpack)


def _function_or_none(unpack: Any) -> Callable[[Any], Any] | None:
    if unpack is not None and not callable(unpack):
        raise OptionError(f"unpack={shown(unpack)} must be a function of a batch that returns (x, y).")
    return unpack


def _validation_data(trainer: Trainer) -> Any:
    """Return the Trainer's validation data, or None. A DataModule's is read even if there is no validation_step."""
    if trainer.limit_val_batches == 0:
        return None
    if not _is_none(trainer.val_dataloaders):
        return trainer.val_dataloaders
    data: Any = getattr(trainer, "datamodule", None)
    if getattr(type(data), "val_dataloader", None) in (None, LightningDataModule.val_dataloader):
        return None
    found = data.val_dataloader()
    return None if _is_none(found) else found


def _is_none(loaders: Any) -> bool:
    """Return whether there is no loader: None, or an empty collection, which Lightning takes for none."""
    return loaders is None or (isinstance(loaders, (list, tuple, Mapping)) and not loaders)


def _require_one_process(trainer: Trainer) -> None:
    if trainer.world_size > 1:
        raise UnsupportedError(
            f"LaplaceCallback fits in one process, and this Trainer has {trainer.world_size}, each with its own "
            "part of the data. Leave the callback out, and after training write la.fit(loader, "
            "group=torch.distributed.group.WORLD) in all of them."
        )


def _one(loader: Any, what: str) -> Any:
    """Return the only loader of a Trainer. Refuse several."""
    if isinstance(loader, (list, tuple)) and len(loader) == 1:
        return loader[0]
    if loader is None or isinstance(loader, (list, tuple, Mapping)):
        came, then = "no" if loader is None else "several", ".calibrate(loader)" if what == "validation" else ""
        raise InputError(
            f"the Trainer has {came} {what} loaders; LaplaceCallback needs one. Leave the callback out, and after "
            f"training write Laplace(model, ...).fit(loader){then} with the one that is meant."
        )
    return loader


def _without_trainer(pl_module: LightningModule) -> LightningModule:
    """Return a view of a LightningModule that shares its modules but not its Trainer, which nothing here may copy."""
    same = object.__new__(type(pl_module))
    same.__dict__.update(pl_module.__dict__)
    same.__dict__.update({name: None for name in ("_trainer", "_fabric") if name in pl_module.__dict__})
    return same
