"""Use a network with its posterior as a model of transformers: called by keywords, with `config` and `device`."""

from __future__ import annotations

import copy
import os
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils import ModelOutput

from laplace.integrations.huggingface import folder as folders
from laplace.integrations.huggingface.likelihood import PROBLEMS
from laplace.laplace import Laplace
from laplace.likelihoods.bernoulli import Multilabel


@dataclass
class UncertainOutput(ModelOutput):
    """Holds the outputs of a `BayesianModel`.

    Attributes:
        logits: the link's inverse of the predictive: its softmax (sigmoid for 'binary' and 'multilabel') is the
            predicted probability. The predictive mean for a regression. (N, C).
        epistemic: the uncertainty that more data would reduce: in nats, or a variance for a regression.
        aleatoric: the rest of the uncertainty.
    """

    logits: Tensor | None = None
    epistemic: Tensor | None = None
    aleatoric: Tensor | None = None


class BayesianModel(nn.Module):
    """Wraps a fitted posterior to be called like a model of transformers: `model(**tokens).logits`.

    `pipeline("text-classification", model=BayesianModel(la), tokenizer=tokenizer)` gives the scores of the predictive.
    With `pipeline_class=UncertainTextClassification` the answers hold the epistemic uncertainty, too.

    `config` is the network's, with the kind of problem that the likelihood stands for: by it, pipelines choose between
    softmax and sigmoid.

    Args:
        la: a fitted posterior of a model of transformers.
        n_samples: the number of draws for epistemic and aleatoric uncertainty.
        seed: the seed of these draws, so that the same inputs get the same answer.

    Raises:
        NotFittedError: the posterior is not fitted.
    """

    def __init__(self, la: Laplace, n_samples: int = 100, seed: int = 0) -> None:
        super().__init__()
        _ = la.posterior  # refuses what is not fitted
        self.la, self.model, self.n_samples, self.seed = la, la.model, n_samples, seed
        self.config = _config_of(la)
        self.eval()

    @property
    def device(self) -> torch.device:
        """Return the device of the network."""
        return next(self.model.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of the network's parameters."""
        return next(self.model.parameters()).dtype

    def can_generate(self) -> bool:
        """Return False: this model predicts, and does not generate text."""
        return False

    def to(self, *args: Any, **kwargs: Any) -> BayesianModel:  # type: ignore[override]
        """Move the network and its posterior.

        Args:
            *args: as `torch.nn.Module.to` takes them.
            **kwargs: as `torch.nn.Module.to` takes them.
        """
        super().to(*args, **kwargs)
        self.la.to(self.device)
        return self

    def forward(self, **inputs: Any) -> UncertainOutput:
        """Return the predictive at a batch.

        Args:
            **inputs: what the network takes by name. Labels are not used.
        """
        generator = torch.Generator().manual_seed(self.seed)
        found = self.la.predict(inputs, n_samples=self.n_samples, generator=generator)
        p, links = found.mean, self.la.likelihood.links
        if isinstance(self.la.likelihood, Multilabel):
            p = p.clamp(torch.finfo(p.dtype).tiny, 1 - torch.finfo(p.dtype).eps).logit()
        elif links:
            p = p.clamp(min=torch.finfo(p.dtype).tiny).log()
        return UncertainOutput(logits=p, epistemic=found.epistemic, aleatoric=found.aleatoric)

    def save_pretrained(
        self, folder: str | os.PathLike[str], *, tokenizer: Any = None, with_network: bool = True
    ) -> None:
        """Write the network and its posterior to a folder of safetensors and JSON, ready to be uploaded to a hub.

        Args:
            folder: the folder, created if it is missing. Existing files with these names are replaced.
            tokenizer: a tokenizer to save in the same folder.
            with_network: whether to save the network as well. Otherwise pass it to `from_pretrained`.

        Raises:
            OptionError: the network has no `save_pretrained` of its own.
            UnsupportedError: the network's weights have changed since the fit.
        """
        folders.save(self.la, folder, tokenizer, with_network)

    @classmethod
    def from_pretrained(cls, folder: str | os.PathLike[str], model: nn.Module | None = None) -> BayesianModel:
        """Return what `save_pretrained` wrote. Nothing in the folder is run as code.

        Args:
            folder: a local folder; `huggingface_hub.snapshot_download` brings one from a hub.
            model: the network, with its adapters; made from the folder by default.

        Raises:
            CheckpointError: a file is missing or damaged, or the network is another one.
        """
        return cls(folders.load(folder, model))


def _config_of(la: Laplace) -> Any:
    """Return a copy of the network's configuration, with the kind of problem that the likelihood stands for."""
    config = copy.copy(getattr(la.model, "config", None))
    meant = {likelihood: problem for problem, likelihood in PROBLEMS.items()}.get(la.likelihood.name)
    if config is not None and meant is not None:
        config.problem_type = meant
    return config
