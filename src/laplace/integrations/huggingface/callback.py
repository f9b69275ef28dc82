"""Provide a callback of `transformers.Trainer` that leaves a posterior at the end of training."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Final

from transformers import TrainerCallback

from laplace.checks import choice
from laplace.errors import InputError
from laplace.integrations.huggingface.likelihood import likelihood_of
from laplace.integrations.huggingface.model import BayesianModel
from laplace.integrations.options import require_options
from laplace.laplace import Laplace
from laplace.likelihoods import Likelihood
from laplace.network.datasets import in_order, loader_of
from laplace.tuning import Tuned
from laplace.tuning.calibrated import Calibrated

_TUNING: Final = ("auto", "calibrate", "evidence", "none")


class LaplaceCallback(TrainerCallback):
    """Fits a posterior when training ends, tunes it, and saves it.

    It uses the network that the trainer ends with (the best one, with `load_best_model_at_end`), and the training data
    in its order, with the trainer's collator.

    Args:
        likelihood: what the outputs mean; read from the model by default.
        tune: 'calibrate' sets prior precision and softmax temperature by the evaluation data; 'evidence' sets the prior
            precision by the training data; 'none' leaves both; 'auto' calibrates if there is evaluation data, and
            otherwise calls `la.tune()`.
        eval_dataset: the data to calibrate on. By default that of the trainer's last evaluation.
        folder: where to save, as `BayesianModel.save_pretrained` does. By default the folder 'laplace' in the trainer's
            output_dir; False saves nothing.
        **options: options of `Laplace`, such as subset_of_weights='all'.

    Attributes:
        la: the posterior; None until training has ended.
        result: the result of tuning or calibration.

    Raises:
        OptionError: `tune` is unknown, or an option is wrong.
        ArgumentError: `Laplace` has no such option.
    """

    def __init__(
        self,
        likelihood: Likelihood | str | None = None,
        *,
        tune: str = "auto",
        eval_dataset: Any = None,
        folder: str | os.PathLike[str] | bool | None = None,
        **options: Any,
    ) -> None:
        self.likelihood, self.options = likelihood, options
        self.tune, self.eval_dataset, self.folder = choice(tune, _TUNING, "tune"), eval_dataset, folder
        require_options("classification" if likelihood is None else likelihood, options)
        self.la: Laplace | None = None
        self.result: Tuned | Calibrated | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Refuse, before training, options that do not fit the network.

        Args:
            args: not used.
            state: not used.
            control: not used.
            **kwargs: what the trainer has: the model is used.
        """
        self._made(kwargs["model"])

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Fit, tune and save.

        Args:
            args: the arguments of the training; `output_dir` is used.
            state: its state; one process of several saves.
            control: not used.
            **kwargs: what the trainer has: the model, its data loaders and its tokenizer are used.
        """
        train = kwargs["train_dataloader"]
        la = self._made(kwargs["model"]).fit(in_order(train))
        held_out = kwargs.get("eval_dataloader")
        if self.eval_dataset is not None:
            held_out = loader_of(self.eval_dataset, train.collate_fn)
        if self.tune == "calibrate" and held_out is None:
            raise InputError(
                "tune='calibrate' needs evaluation data: evaluate during training (eval_strategy='epoch'), or write "
                "LaplaceCallback(eval_dataset=...)."
            )
        if self.tune in ("auto", "calibrate") and held_out is not None:
            self.result = la.calibrate(in_order(held_out))
        elif self.tune != "none":
            self.result = la.tune(method=self.tune)
        self.la = la
        if self.folder is not False and state.is_world_process_zero:
            asked = self.folder if isinstance(self.folder, (str, os.PathLike)) else Path(args.output_dir) / "laplace"
            BayesianModel(la).save_pretrained(asked, tokenizer=kwargs.get("processing_class"))

    def _made(self, model: Any) -> Laplace:
        """Return the posterior of a model, before its fit."""
        return Laplace(model, likelihood_of(model) if self.likelihood is None else self.likelihood, **self.options)
