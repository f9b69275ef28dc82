"""Guesses of scores from interpolated variances: against the scores themselves, and when they are not used."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

from laplace import Laplace
from laplace.errors import BoundaryWarning, LaplaceWarning
from laplace.tuning.interpolated import Interpolated, second_derivatives
from laplace.tuning.problem import how_scored, validation_of
from laplace.tuning.space import Space

NAMES = ("prior_precision", "sigma_noise", "temperature")


def fitted(structure: str = "kron", subset: str = "all", outputs: int = 1, **options: object):
    torch.manual_seed(0)
    x = torch.randn(90, 2).double()
    y = x.sin().sum(1, keepdim=True).repeat(1, outputs) + 0.3 * torch.randn(90, outputs).double()
    model = nn.Sequential(nn.Linear(2, 10), nn.Tanh(), nn.Linear(10, outputs)).double()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-2)
    for _ in range(150):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x[:60]), y[:60]).backward()
        optimizer.step()
    la = Laplace(model, "regression", subset, structure, **options).fit([(x[:60], y[:60])])
    weights = torch.rand(30).double()
    return la, [(1.5 * x[60:], y[60:], weights)]


def guessing(la: Laplace, data: list, curvature: str = "ggn"):
    validation = validation_of(la, how_scored(la, "glm", None, 100, None), data, None, False, again=True)
    space = Space(la.posterior.detached(), "scalar", noise=True, temperature=True)
    return Interpolated.of(validation, space), validation, space


@pytest.mark.parametrize("structure", ["full", "kron", "diag", "gp"])
def test_guesses_are_the_scores_between_the_posteriors_that_were_scored(structure):
    la, data = fitted(structure)
    guesses, validation, space = guessing(la, data)
    assert guesses is not None
    low, high = torch.tensor([-9.0, -4.0, -5.0]).double(), torch.tensor([9.0, 2.0, 5.0]).double()
    nodes = [torch.lerp(low, high, part) for part in torch.linspace(0, 1, 61).double()]
    with torch.no_grad():
        own = guesses.scores([space.at(x) for x in nodes])
        assert torch.allclose(own, validation.scores([space.at(x) for x in nodes]), rtol=1e-12)
        others = [
            low + (high - low) * torch.rand(3, generator=torch.Generator().manual_seed(i)).double() for i in range(20)
        ]
        exact = validation.scores([space.at(x) for x in others])
        assert torch.allclose(guesses.guesses(others), exact, rtol=1e-3, atol=1e-3)
        assert torch.allclose(guesses.guesses(nodes), own, rtol=1e-9)


@pytest.mark.parametrize("subset", ["last_layer", "all"])
def test_three_hyperparameters_take_few_points_and_end_no_higher_than_a_dense_grid(subset):
    la, data = fitted("full", subset)
    _, validation, space = guessing(la, data)
    grid = torch.cartesian_prod(
        torch.linspace(-9.2, 9.2, 21), torch.linspace(-6.9, 6.9, 21), torch.linspace(-6.9, 6.9, 11)
    ).double()
    with torch.no_grad():
        lowest = min(float(validation.scores([space.at(x) for x in part]).min()) for part in grid.split(512))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", LaplaceWarning)
        first, again = (la.tune(*NAMES, method="validation", val_loader=data) for _ in range(2))
    assert len(first.points) <= 100
    assert first.score <= lowest + 1e-6
    assert first.converged
    assert again.score <= first.score + 1e-9


def test_an_optimum_at_the_edge_still_warns():
    la, data = fitted()
    with pytest.warns(BoundaryWarning, match="edge of the grid"):
        la.tune(*NAMES, method="validation", val_loader=data, bounds={"sigma_noise": (1e-3, 1e-2)})


def test_what_variances_of_outputs_do_not_determine_is_not_guessed():
    assert guessing(*fitted(outputs=2))[0] is None
    assert guessing(*fitted(damping=True))[0] is None
    la, data = fitted()
    validation = validation_of(la, how_scored(la, "glm", None, 100, lambda m, v, y: v.mean()), data, None, False, True)
    assert Interpolated.of(validation, Space(la.posterior.detached(), "scalar", noise=True)) is None
    validation = guessing(la, data)[1]
    assert Interpolated.of(validation, Space(la.posterior.detached(), "layerwise", noise=True)) is None


def test_the_spline_of_a_straight_line_does_not_bend():
    nodes = torch.tensor([0.0, 0.5, 2.0, 3.0]).double()
    assert second_derivatives(nodes, (2 * nodes + 1).unsqueeze(1)).abs().max() < 1e-14
