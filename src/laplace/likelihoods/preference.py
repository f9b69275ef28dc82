"""Preferences between two inputs: P(the second is preferred) = sigmoid(r_1 - r_0), Bradley and Terry's model."""

from __future__ import annotations

from torch import Tensor

from laplace.errors import InputError
from laplace.likelihoods.base import check_range, class_indices
from laplace.likelihoods.bernoulli import Bernoulli
from laplace.predictive.response import Latent, Response


class Preference(Bernoulli):
    """Learns rewards from preferences between two inputs.

    It is fitted on pairs (B, 2, ...) with labels (B,): 0 if the first of a pair is preferred, 1 if the second is. The
    network maps a single input to a reward, (N, 1); here f is the difference of a pair's two rewards. Predictions for
    single inputs are rewards with their variances; `la.preference(a, b)` is the probability that a beats b.
    """

    name = "reward_modeling"
    pairs = True

    @property
    def response(self) -> Response:
        return Latent()

    def check_outputs(self, f: Tensor) -> None:
        if f.dim() != 2 or f.shape[1] != 1:
            raise InputError(
                f"'{self.name}' needs one reward per input; the network gave {tuple(f.shape)} for (pairs, rewards). It "
                "is called on single inputs, the 2 B of B pairs one after the other, and must return (2 B, 1)."
            )

    def check_targets(self, f: Tensor, y: Tensor) -> Tensor:
        y = class_indices(len(f), y)
        check_range(y, 2, "preferences")
        return y.unsqueeze(1).to(f.dtype)
