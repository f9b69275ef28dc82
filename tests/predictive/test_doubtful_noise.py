"""Predictions of a regression say so if the noise was never set and the training data contradicts it."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

from laplace import Laplace
from laplace.errors import LaplaceWarning


def _fitted(scale: float, **options: object) -> tuple[Laplace, torch.Tensor]:
    """Fit a network with outputs (N, 2) near 0 to labels of this size."""
    g = torch.Generator().manual_seed(3)
    x, y = torch.randn(31, 3, generator=g), scale * torch.randn(31, 2, generator=g)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    for parameter in model[2].parameters():
        nn.init.constant_(parameter, 0.01)
    la = Laplace(model, "regression", **options)  # pyright: ignore[reportArgumentType]
    la.fit([(x[:20], y[:20]), (x[20:], y[20:])])
    return la, x


@pytest.mark.parametrize(("scale", "too"), [(30.0, "narrow"), (0.05, "wide")])
def test_a_noise_that_nobody_set_is_doubted_once(scale: float, too: str) -> None:
    la, x = _fitted(scale)
    with pytest.warns(LaplaceWarning, match=f"sigma_noise is 1.*too {too}.*la.tune"):
        la.predict(x)
    with warnings.catch_warnings():
        warnings.simplefilter("error", LaplaceWarning)
        la.predict(x)


def test_the_doubt_names_the_residuals() -> None:
    la, x = _fitted(30.0)
    with pytest.warns(LaplaceWarning, match=r"off by about (2[5-9]|3[0-5]): "):
        la.predict(x)


@pytest.mark.parametrize("how", ["given", "set", "tuned", "near"])
def test_a_noise_that_was_chosen_or_fits_is_not_doubted(how: str) -> None:
    la, x = _fitted(1.5 if how == "near" else 30.0, **({"sigma_noise": 2.0} if how == "given" else {}))
    with warnings.catch_warnings():
        warnings.simplefilter("error", LaplaceWarning)
        if how == "set":
            la.sigma_noise = 0.5
        if how == "tuned":
            la.tune(method="evidence")
        la.predict(x)
        la(x)  # about f alone: the noise plays no part


def test_a_classifier_has_no_noise_to_doubt() -> None:
    la = Laplace(nn.Linear(3, 2), "classification")
    la.fit([(torch.randn(9, 3), torch.arange(9) % 2)])
    with warnings.catch_warnings():
        warnings.simplefilter("error", LaplaceWarning)
        la.predict(torch.randn(4, 3))
