"""The joint search by validation against brute force: a fine grid of all hyperparameters, closed in on by scipy."""

from __future__ import annotations

import itertools
import math
import random
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from torch import Tensor, nn

from laplace import Laplace
from laplace.errors import LaplaceWarning
from laplace.posterior.posterior import Posterior
from laplace.tuning.problem import _BOUNDS, how_scored, validation_of
from laplace.tuning.result import Tuned
from laplace.tuning.search import Search
from laplace.tuning.space import Space

TOLERANCE = 1e-3  # nats
LINK = {"regression": None, "classification": "probit"}  # scores by which the search is compared with brute force

KINDS = {
    "regression": [
        ("prior_precision", "sigma_noise"),
        ("prior_precision", "temperature"),
        ("sigma_noise", "temperature"),
        ("prior_precision", "sigma_noise", "temperature"),
    ],
    "classification": [("prior_precision", "temperature")],
}


@dataclass
class Problem:
    """A fitted posterior, validation data, and what is tuned; all of it follows from the seed."""

    seed: int
    la: Laplace = field(init=False)
    validation: list[tuple[Tensor, Tensor]] = field(init=False)

    def __post_init__(self) -> None:
        choose = random.Random(self.seed)
        torch.manual_seed(self.seed)
        self.task = choose.choice(["regression", "classification"])
        self.names = choose.choice(KINDS[self.task])
        self.groups = choose.choice(["scalar", "scalar", "layerwise"])
        subset = "last_layer" if self.groups == "layerwise" else choose.choice(["last_layer", "all"])
        structure = choose.choice(["diag", "kron", "full"])
        inputs, hidden, n, outputs = choose.choice([1, 3]), choose.choice([4, 10]), choose.choice([20, 80]), 1
        activation = choose.choice([nn.Tanh, nn.ReLU])
        x = torch.randn(n + 40, inputs).double()
        x[n:] *= choose.choice([1, 1, 2, 4])  # validation inputs further away than the training's
        y = x.sin().sum(1, keepdim=True) + choose.choice([0.05, 0.3, 1.0]) * torch.randn(n + 40, 1).double()
        if choose.random() < 0.3:
            y[n : n + 4] += 5.0 * torch.randn(4, 1).double()  # outliers
        if self.task == "classification":
            outputs, y = 3, (y[:, 0] > 0).long() + (y[:, 0] > 0.7).long()
            wrong = torch.rand(n + 40) < choose.choice([0.0, 0.2])
            y = torch.where(wrong, torch.randint(3, (n + 40,)), y)
        model = nn.Sequential(nn.Linear(inputs, hidden), activation(), nn.Linear(hidden, outputs)).double()
        optimizer = torch.optim.Adam(model.parameters(), lr=2e-2)
        loss = nn.functional.mse_loss if self.task == "regression" else nn.functional.cross_entropy
        for _ in range(choose.choice([20, 150, 400])):
            optimizer.zero_grad()
            loss(model(x[:n]), y[:n]).backward()
            optimizer.step()
        self.la = Laplace(model, self.task, subset, structure).fit([(x[:n], y[:n])])
        self.validation = [(x[n:], y[n:])]

    def __str__(self) -> str:
        return f"seed {self.seed}: {self.task}, {', '.join(self.names)}, {self.groups}, {self.la.structure.name}"

    def tune(self, **options: object) -> Tuned:
        return self.la.tune(
            *self.names,
            method="validation",
            val_loader=self.validation,
            prior_structure=self.groups,
            link_approx=LINK[self.task],
            **options,
        )

    def scores(self) -> tuple[Callable[[np.ndarray], np.ndarray], list[tuple[float, float]]]:
        """The score of rows of logarithms (M, K), and their bounds."""
        la = self.la
        how = how_scored(la, "glm", LINK[self.task], 100, None)
        validation = validation_of(la, how, self.validation, None, False, again=True)
        moved = self.groups if "prior_precision" in self.names else None
        space = Space(la.posterior.detached(), moved, "sigma_noise" in self.names, "temperature" in self.names)
        bounds = [tuple(map(math.log, _BOUNDS[kind])) for kind in space.kinds]

        def scores(rows: np.ndarray) -> np.ndarray:
            with torch.no_grad():
                found = [validation.scores([space.at(x) for x in part]) for part in torch.from_numpy(rows).split(512)]
            return torch.cat(found).numpy()

        return scores, bounds

    def brute_force(self, sizes: dict[int, int]) -> float:
        """The lowest score of a grid, and of what Nelder and Mead find from its best local minima."""
        scores, bounds = self.scores()
        size = sizes[len(bounds)]
        axes = [np.linspace(*pair, size) for pair in bounds]
        grid = np.array([*itertools.product(*axes)])
        values = scores(grid).reshape([size] * len(bounds))
        lowest = local_minima(values)[:6]
        low, high = (np.array(side) for side in zip(*bounds, strict=True))
        best = float(values.min())
        for index in lowest:
            start = np.array([axis[i] for axis, i in zip(axes, index, strict=True)])
            steps = np.diag([axis[1] - axis[0] for axis in axes]) / 2
            simplex = np.stack([start, *(np.where(start + s > high, start - s, start + s) for s in steps)])
            found = minimize(
                lambda x: float(scores(x[None].clip(low, high))[0]), start, method="Nelder-Mead",
                options={"initial_simplex": simplex, "maxfev": 400, "xatol": 1e-4, "fatol": 1e-8},
            )  # fmt: skip
            best = min(best, float(found.fun))
        return best


def local_minima(values: np.ndarray) -> list[tuple[int, ...]]:
    """Where a grid is nowhere lower next to it, diagonals included; the lowest first."""
    padded = np.pad(values, 1, constant_values=np.inf)
    shifts = itertools.product((0, 1, 2), repeat=values.ndim)
    around = [padded[tuple(slice(s, s + n) for s, n in zip(shift, values.shape, strict=True))] for shift in shifts]
    found = np.argwhere(values <= np.min(around, axis=0))
    return sorted(map(tuple, found), key=lambda index: values[index])


def excess(seed: int) -> tuple[float, Tuned, str]:
    """By how much the search ends above brute force."""
    problem = Problem(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", LaplaceWarning)
        lowest = problem.brute_force({1: 201, 2: 33, 3: 13, 4: 9})
        tuned = problem.tune()
    return tuned.score - lowest, tuned, str(problem)


@pytest.mark.parametrize("seed", [20, 78])  # where one coordinate after the other ends above
def test_the_search_ends_no_higher_than_brute_force(seed):
    above, tuned, which = excess(seed)
    assert above <= TOLERANCE, which
    assert tuned.converged
    assert "converged" in repr(tuned)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(60))
def test_the_search_of_any_problem_ends_no_higher_than_brute_force_or_says_so(seed):
    above, tuned, which = excess(seed)
    assert above <= TOLERANCE or not tuned.converged, which
    assert above <= 10 * TOLERANCE, which


def searched(score: Callable[[float, float], float], start: tuple[float, float] = (0.0, 0.0)) -> Search:
    """A search over the logarithms of precision and temperature, of any score of them."""
    model = nn.Linear(1, 1).double()
    la = Laplace(model, "regression").fit([(torch.ones(2, 1).double(), torch.zeros(2, 1).double())])
    space = Space(la.posterior.detached(), "scalar", temperature=True)

    def scores(posteriors: Sequence[Posterior]) -> Tensor:
        pairs = [(float(p.prior.precision.log()), math.log(p.temperature)) for p in posteriors]
        return torch.tensor([score(*pair) for pair in pairs], dtype=torch.float64)

    grids = [torch.linspace(-9, 9, 21).double(), torch.linspace(-7, 7, 21).double()]
    search = Search(space, scores, torch.tensor(start).double(), grids, lambda *_: "")
    search.descend()
    return search


def wells(x: float, z: float, lower: float = 1.2) -> float:
    """Two wells, the lower one narrow."""
    return 2 - math.exp(-((x + 5) ** 2 + z**2) / 4) - lower * math.exp(-((x - 4) ** 2 + (z - 3) ** 2))


@pytest.mark.parametrize("start", [(-5.0, 0.0), (4.0, 3.0), (8.0, -6.0)])
def test_of_two_optima_the_lower_is_found_wherever_it_starts(start):
    search = searched(wells, start)
    assert search.value == pytest.approx(0.8, abs=1e-4)
    assert search.found("validation").converged


def test_two_optima_that_are_as_good_are_told():
    search = searched(lambda x, z: wells(x, z, lower=1.0002))
    with pytest.warns(LaplaceWarning, match=r"another optimum is as good: score 1 at prior precision 0\.0067"):
        tuned = search.found("validation")
    assert any("another optimum" in note for note in tuned.notes)


def test_a_long_curved_valley_is_followed_to_its_end():
    search = searched(lambda x, z: 0.01 * (x - 3) ** 2 + 4 * (z - 0.05 * x**2) ** 2)
    assert search.value <= 1e-3
    assert search.found("validation").converged


def test_a_search_that_ends_at_its_budget_says_so(monkeypatch):
    monkeypatch.setattr("laplace.tuning.search._ITERATIONS", 1)
    monkeypatch.setattr("laplace.tuning.search._SWEEPS", 1)
    search = searched(lambda x, z: 0.01 * (x - 3) ** 2 + 4 * (z - 0.05 * x**2) ** 2)
    with pytest.warns(LaplaceWarning, match="still improving: call tune again"):
        tuned = search.found("validation")
    assert tuned.converged is False
    assert "not converged" in repr(tuned)


def test_a_score_in_steps_is_searched_as_well():
    """An accuracy, say: no slope anywhere."""
    search = searched(lambda x, z: math.floor(abs(x - 2)) + math.floor(abs(z + 3)) + 0.0)
    assert search.value == 0.0
    assert search.converged
