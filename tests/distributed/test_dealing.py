"""Eigendecompositions are dealt out over the ranks by cost, and all ranks have all of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import distributed, nn
from torch.utils.data import DataLoader, TensorDataset

from laplace import Laplace
from laplace.distributed import ShardSampler
from laplace.structures import dealing
from laplace.structures.dealing import dealt


def test_the_dearest_go_first_to_the_rank_with_the_least_to_do():
    assert dealt([1.0, 8.0, 3.0, 4.0, 1.0], 2) == [1, 0, 1, 1, 0]  # 9 and 8
    costs = [float(d**3) for d in range(20, 60)]
    for ranks in (1, 2, 3, 7):
        loads = [
            sum(c for c, owner in zip(costs, dealt(costs, ranks), strict=True) if owner == r) for r in range(ranks)
        ]
        assert max(loads) <= sum(costs) / ranks + max(costs)


def decompositions(structure: str) -> dict[str, Any]:
    """Count the decompositions of this rank, and compare the posterior with that of one process."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 30), nn.Tanh(), nn.Linear(30, 20), nn.Tanh(), nn.Linear(20, 3)).double()
    data = TensorDataset(torch.randn(50, 40).double(), torch.arange(50) % 3)
    one = Laplace(model, "classification", "all", structure).fit(DataLoader(data, 9), group=None)
    evidence = one.log_marginal_likelihood()
    seen: list[int] = []
    solve, least = dealing.eigh, dealing.LEAST

    def counted(matrix: torch.Tensor, *rest: Any) -> Any:
        seen.append(matrix.shape[-1])
        return solve(matrix, *rest)

    dealing.eigh, dealing.LEAST = counted, 0.0
    try:
        la = Laplace(model, "classification", "all", structure)
        la.fit(DataLoader(data, 9, sampler=ShardSampler(data)), group=distributed.group.WORLD)
        during = len(seen)
        away = float((la.log_marginal_likelihood() - evidence).abs())
        variances = float((la(data.tensors[0]) - one(data.tensors[0])).abs().max())
        return {"seen": seen, "later": len(seen) - during, "away": max(away, variances)}
    finally:
        dealing.eigh, dealing.LEAST = solve, least


@pytest.mark.parametrize(
    "structure", ["kron", *(pytest.param(name, marks=pytest.mark.slow) for name in ("ekfac", "inf"))]
)
def test_each_rank_decomposes_some_factors_and_all_have_the_posterior(two, structure):
    zero, one = two.run(decompositions, structure)
    for found in (zero, one):
        assert found["seen"]
        assert found["later"] == 0
        assert found["away"] < 1e-9
    assert sorted(zero["seen"] + one["seen"]) == [1, 3, 20, 20, 30, 30, 40]
