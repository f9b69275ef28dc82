"""Modules whose output has no dimension of examples, as a position embedding of arange(T)."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from exact import assert_exact
from laplace import Laplace


class Placed(nn.Module):
    """Token and position embeddings, then a linear map. `at` says how the positions reach the tokens."""

    def __init__(self, at: str = "added") -> None:
        super().__init__()
        torch.manual_seed(3)
        self.at = at
        self.tokens, self.places = nn.Embedding(7, 4), nn.Embedding(6, 4)
        self.mix, self.head = nn.Linear(4, 3), nn.Linear(3, 2)

    def forward(self, ids: Tensor) -> Tensor:  # (N, T) -> (N, 2)
        x, p = self.tokens(ids), self.places(torch.arange(ids.shape[1]))
        if self.at == "mixed":  # a linear map of positions alone, too
            return self.head(torch.tanh(self.mix(x) + self.mix(p)).mean(1))
        if self.at == "sliced":  # a dimension of examples in front would be sliced instead
            p = p[: ids.shape[1] - 1]
            x = x[:, 1:]
        elif self.at == "turned":  # T is counted from the front, so that a further dimension fails
            p = p.permute(1, 0).T
        return self.head(torch.tanh(self.mix(x + p)).mean(1))


def _ids(n: int, t: int) -> Tensor:
    return torch.randint(7, (n, t), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("t", [5, 6])  # with five, there are as many positions as examples in the audit
@pytest.mark.parametrize("at", ["added", "mixed", "sliced", "turned"])
def test_positions_without_a_batch_dimension_have_exact_gradients(at, t):
    assert_exact(Placed(at).double(), _ids(11, t), "regression")


def test_positions_that_are_added_are_explained_by_their_own_rule():
    la = Laplace(Placed(), "regression", "all", "kron").fit([(_ids(8, 6), torch.randn(8, 2))])
    assert la.runner.plan.rule_of("places.weight") == "embedding"
    assert "places" in la.runner.plan.lifted


@pytest.mark.parametrize("at", ["sliced", "turned"])
def test_positions_that_change_with_a_batch_dimension_are_explained_by_the_network(at):
    la = Laplace(Placed(at), "regression", "all", "diag").fit([(_ids(8, 6), torch.randn(8, 2))])
    assert "places" not in la.runner.plan.lifted


def test_batches_of_other_lengths_and_single_examples_are_the_same_network():
    model, y = Placed().double(), torch.randn(8, 2, dtype=torch.float64)
    batches = [(_ids(8, 6), y), (_ids(8, 4), y), (_ids(1, 5), y[:1])]
    whole = Laplace(model, "regression", "all", "diag").fit(batches)
    apart = [Laplace(model, "regression", "all", "diag").fit([batch]) for batch in batches]
    total = sum(la.posterior.fit.sums["places.weight/diag"] for la in apart)
    torch.testing.assert_close(whole.posterior.fit.sums["places.weight/diag"], total)
