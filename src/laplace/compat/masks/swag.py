"""Select the weights that move most when training continues.

SWAG's diagonal (Maddox et al. 2019): the variance of the iterates of SGD with a constant learning rate, started at the
trained weights. SGD runs on a copy of the weights; the network itself is never changed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

from torch import Tensor, nn

from laplace.checks import one_positive, whole_number
from laplace.compat.masks.base import ScoreBasedSubnetMask
from laplace.errors import InputError, NumericalError
from laplace.likelihoods import Likelihood, likelihood_named
from laplace.network.inputs import Keys
from laplace.rivals.iterates import SGD, Moments, iterates


class LargestVarianceSWAGSubnetMask(ScoreBasedSubnetMask):
    """Selects the weights with the largest variance over `swag_n_snapshots` iterates of SGD.

    The network runs in eval mode and draws no random numbers. The order of the data is the loader's.

    Args:
        model: The trained network.
        n_params_subnet: How many weights to select.
        likelihood: A likelihood object or name, as in `Laplace`.
        swag_n_snapshots: How many iterates the variance is taken over.
        swag_snapshot_freq: How many epochs lie between two iterates.
        swag_lr: The learning rate of SGD.
    """

    def __init__(
        self,
        model: nn.Module,
        n_params_subnet: int,
        likelihood: Likelihood | str = "classification",
        swag_n_snapshots: int = 40,
        swag_snapshot_freq: int = 1,
        swag_lr: float = 0.01,
    ) -> None:
        super().__init__(model, n_params_subnet)
        self.likelihood = likelihood_named(likelihood)
        self.n_snapshots = whole_number(swag_n_snapshots, "swag_n_snapshots", 2)
        self.epochs = whole_number(swag_snapshot_freq, "swag_snapshot_freq")
        self.lr = one_positive(swag_lr, "swag_lr")

    def compute_param_scores(self, train_loader: Iterable[Any] | None) -> Tensor:
        if train_loader is None or isinstance(train_loader, Iterator):
            raise InputError(
                "SWAG runs over the training data many times: write select(train_loader) with a DataLoader or a list "
                f"of batches; a {type(train_loader).__name__} came."
            )
        keys = Keys(further=self.likelihood.further, pairs=self.likelihood.pairs)
        walk = iterates(self.model, self.likelihood, train_loader, keys, self.epochs, SGD(self.lr))
        moments = Moments()
        for vector in islice(walk, self.n_snapshots):
            moments.add(vector)
        if not moments.variance.isfinite().all():
            raise NumericalError(f"SGD diverged with swag_lr={self.lr:g}. Take a smaller one.")
        return moments.variance
