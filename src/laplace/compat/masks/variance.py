"""Select the weights with the largest posterior variance under a cheap posterior over all weights."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from laplace.compat.masks.base import ScoreBasedSubnetMask
from laplace.errors import InputError, OptionError
from laplace.laplace import Laplace
from laplace.weights.selection import trainable_of


class LargestVarianceDiagLaplaceSubnetMask(ScoreBasedSubnetMask):
    """Selects the weights with the largest marginal variance under a diagonal posterior over all trainable weights.

    Args:
        model: The trained network.
        n_params_subnet: How many weights to select.
        diag_laplace_model: `Laplace(model, likelihood, 'all', 'diag')`. If it is not fitted yet, `select` fits it to
            its loader.
    """

    def __init__(self, model: nn.Module, n_params_subnet: int, diag_laplace_model: Laplace) -> None:
        super().__init__(model, n_params_subnet)
        if not isinstance(diag_laplace_model, Laplace):
            raise OptionError(
                f"diag_laplace_model is a {type(diag_laplace_model).__name__}; write Laplace(model, likelihood, 'all', "
                "'diag')."
            )
        kind = diag_laplace_model.structure.name
        if kind != "diag":
            raise OptionError(
                f"diag_laplace_model has hessian_structure={kind!r}; 'diag' is needed. Write "
                "Laplace(model, likelihood, 'all', 'diag')."
            )
        self.diag_laplace_model = diag_laplace_model

    def compute_param_scores(self, train_loader: Iterable[Any] | None) -> Tensor:
        la = self.diag_laplace_model
        if not la.is_fitted:
            if train_loader is None:
                raise InputError("diag_laplace_model has seen no data. Fit it, or write select(train_loader).")
            la.fit(train_loader)
        layout = la.posterior.fit.layout
        here = {name: tuple(p.shape) for name, p in trainable_of(self.model)}
        if dict(zip(layout.names, layout.shapes, strict=True)) != here:
            raise OptionError(
                f"diag_laplace_model is over {layout.n_params:,} weights of {len(layout.names)} tensors; it must be "
                f"over all {len(here)} trainable tensors of the network: Laplace(model, likelihood, 'all', 'diag')."
            )
        return la.posterior_variance.detach()
