"""If one rank's loader promises more rows than it has, all ranks begin again, and the sums are exact."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, distributed, nn

from laplace import Laplace

D, N = 600, 140


class Boastful(list):
    """A list of batches that says it has more than it gives."""

    def __init__(self, batches: list[tuple[Tensor, Tensor]], said: int) -> None:
        super().__init__(batches)
        self.said, self.readings = said, 0

    def __len__(self) -> int:
        return self.said

    def __iter__(self):
        self.readings += 1
        return super().__iter__()


def fitted(said: int) -> tuple[float, int]:
    """Return how far the factor of the inputs is from the exact one, and how often the data was read."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(D, 4), nn.Tanh(), nn.Linear(4, 3))
    x, y = torch.randn(N, D, generator=torch.Generator().manual_seed(1)), torch.arange(N) % 3
    own = slice(distributed.get_rank(), N, 2)
    batches = list(zip(x[own].split(10), y[own].split(10), strict=True))
    loader = Boastful(batches, said if distributed.get_rank() == 0 else len(batches))
    la = Laplace(model, "classification", "all", "kron", prior_precision=1e-6)
    la.fit(loader, group=distributed.group.WORLD)
    exact = x.double().T @ x.double()
    return float((la.posterior.fit.sums["0.weight/A"] - exact).abs().max() / exact.max()), loader.readings


@pytest.mark.parametrize(("said", "times"), [(7, 1), (200, 2)])
def test_a_rank_that_promises_too_much_begins_again_with_all_others(two, said, times):
    usual = [readings for _, readings in two.run(fitted, 7)]
    for (error, readings), once in zip(two.run(fitted, said), usual, strict=True):
        assert error < 1e-12
        assert readings == times * once
