"""Deep ensembles (Lakshminarayanan et al. 2017): the mean of the predictions of several networks.

One network alone is a source, too: with `calibrate`, temperature scaling (Guo et al. 2017).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from laplace.checks import shown
from laplace.errors import OptionError
from laplace.keywords import checked_before
from laplace.likelihoods import Likelihood
from laplace.network.inputs import Inputs
from laplace.network.replica import replicate, require_values
from laplace.rivals.base import Options
from laplace.rivals.members import Members


class Ensemble(Members):
    """Averages the predictions of several trained networks, of any architectures.

    Classes and labels: p(y) = sum_k w_k softmax(f_k / T). The epistemic part is the mutual information of y and the
    network. Regression: the normal with the mean sum_k w_k f_k, and with the variance between the networks plus the
    noise. The networks run in eval mode, on replicas, and are never changed.

    Args:
        models: at least one network; all map the same inputs to outputs of one shape.
        likelihood: what the outputs mean, as in `Laplace`.
        weights: the probability of each network, up to a factor; equal by default.
        sigma_noise: the standard deviation of the observation noise of a regression.
        softmax_temperature: T, by which all logits are divided. `calibrate` finds it.
        dict_key_x: for batches that are mappings, the key of the main input.
        dict_key_y: for batches that are mappings, the key of the labels.
        class_dim: which dimension of the outputs has the classes, as in `Laplace`.
        memory_budget: the number of bytes that may be used. By default the free memory.

    Attributes:
        models: the networks.
        weights: their probabilities, (K,).

    Raises:
        OptionError: there is no network, or an option is out of range.
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        likelihood: Likelihood | str,
        weights: Sequence[float] | Tensor | None = None,
        *,
        sigma_noise: float | Tensor = 1.0,
        softmax_temperature: float = 1.0,
        dict_key_x: str = "input_ids",
        dict_key_y: str = "labels",
        class_dim: int | None = -1,
        memory_budget: int | None = None,
    ) -> None:
        if isinstance(models, nn.Module) and not isinstance(models, nn.ModuleList):
            raise OptionError("models is one network; write Ensemble([model], ...).")
        self.models = list(models)
        if not self.models or not all(isinstance(model, nn.Module) for model in self.models):
            came = ", ".join(sorted({type(model).__name__ for model in self.models})) or "an empty list"
            raise OptionError(f"models is {came}; a list of at least one torch.nn.Module is needed.")
        for model in self.models:
            require_values(model)
        options = Options.of(likelihood, dict_key_x, dict_key_y, class_dim, memory_budget)
        checked = weights_of(weights, len(self.models))
        super().__init__(options, checked, sigma_noise, softmax_temperature)

    if not TYPE_CHECKING:
        __new__ = checked_before(__init__)

    @property
    def model(self) -> nn.Module:
        """Return the first network."""
        return self.models[0]

    def _call(self, member: int, inputs: Inputs) -> Tensor:
        with torch.inference_mode(False), torch.no_grad():
            return inputs.map(torch.clone).call(replicate(self.models[member]))

    def __repr__(self) -> str:
        return f"Ensemble of {len(self.models)}, {self.likelihood.described}"


def weights_of(weights: Any, count: int) -> Tensor:  # (K,)
    """Return the probabilities of K members, which sum to 1, in float64."""
    if weights is None:
        return torch.full((count,), 1 / count, dtype=torch.float64)
    try:
        found = torch.as_tensor(weights, dtype=torch.float64).detach().clone()
    except (TypeError, ValueError, RuntimeError):
        found = torch.empty(0)
    if found.shape != (count,) or not found.isfinite().all() or (found < 0).any() or not found.sum() > 0:
        raise OptionError(
            f"weights={shown(weights)}: one number from 0 on for each of the {count} members is needed, not all 0."
        )
    return found / found.sum()
