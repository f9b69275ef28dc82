"""Runs over the data: batches that differ, networks that change with the batch, loaders that cannot be read again."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import oracle
from exact import assert_close
from laplace import Laplace
from laplace.errors import InputError, OptionError


class Sequence(nn.Module):
    """Linear layers over positions, averaged: sequences of any length, one included."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.inner(x)).mean(1))


def of_length(t: int, n: int):
    return torch.randn(n, t, 3, dtype=torch.float64), torch.randint(2, (n,))


@pytest.mark.parametrize("lengths", [(3, 1), (1, 3), (1, 1, 2), (2, 1, 1)])
@pytest.mark.parametrize("n", [1, 4])
def test_kron_sums_batches_of_other_lengths(lengths, n):
    torch.manual_seed(0)
    model = Sequence().double()
    batches = [of_length(t, n) for t in lengths]
    la = Laplace(model, "classification", "all", "kron").fit(batches)
    sums = la.posterior.fit.sums
    inputs = torch.cat([x.reshape(-1, 3) for x, _ in batches])
    assert_close(sums["inner.weight/A"][0], inputs.T @ inputs)
    assert float(sums["inner.weight/count"]) == len(inputs)
    names = list(la.posterior.fit.layout.names)
    for structure in ("full", "diag"):
        other = Laplace(model, "classification", "all", structure).fit(batches)
        h = sum(oracle.curvature_all(model, names, x, y, "classification")[1] for x, y in batches)
        assert_close(other.H, h if structure == "full" else h.diagonal())


class NormsItsInput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.layer = nn.BatchNorm1d(3, track_running_stats=False).requires_grad_(False), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.norm(x))


@pytest.mark.usefixtures("gathering")
def test_batches_are_not_joined_where_that_changes_the_outputs():
    torch.manual_seed(0)
    model = NormsItsInput().double()
    batches = [(torch.randn(6, 3, dtype=torch.float64) * (i + 1), torch.randint(2, (6,))) for i in range(4)]
    loss = sum(nn.functional.cross_entropy(model(x).detach(), y, reduction="sum") for x, y in batches)
    la = Laplace(model, "classification", "all", "diag").fit(batches)
    assert la.loss == pytest.approx(float(loss))


class Picky(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        if len(x) > 6:
            raise AssertionError("six at most")
        return self.layer(x)


@pytest.mark.usefixtures("gathering")
def test_any_error_on_joined_batches_sends_them_one_by_one():
    torch.manual_seed(0)
    batches = [(torch.randn(6, 3), torch.randint(2, (6,))) for _ in range(3)]
    assert Laplace(Picky(), "classification", "all", "diag").fit(batches).n_data == 18


@pytest.mark.usefixtures("gathering")
def test_large_inputs_of_a_narrow_network_are_not_joined():
    sizes = []

    class Pools(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            sizes.append(len(x))
            return self.layer(x.flatten(2).mean(2))

    batches = [(torch.randn(8, 3, 200, 200), torch.randint(2, (8,))) for _ in range(3)]
    Laplace(Pools(), "classification", "all", "diag").fit(batches)
    assert max(sizes) == 8


def test_keywords_are_cut_with_the_inputs(monkeypatch):
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 2)

        def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
            return self.layer(x) if scale is None else self.layer(x) * scale

    torch.manual_seed(0)
    x, scale = torch.randn(9, 3), torch.rand(9, 1)
    la = Laplace(Scaled(), "regression", "all", "full").fit([(x, torch.randn(9, 2))])
    whole = la(x, scale=scale)
    monkeypatch.setattr("laplace.budget.CHUNK", 1)
    for one, other in zip(whole, la(x, scale=scale), strict=True):
        assert_close(other, one, 1e-5)


def test_what_the_labels_and_outputs_must_be():
    torch.manual_seed(0)
    x, y = torch.randn(6, 3), torch.randn(6, 2)
    la = Laplace(nn.Linear(3, 2), "regression", "all", "diag").fit([(x, y)])
    with pytest.raises(InputError, match="validation batch 0"):
        la.optimize_prior_precision(method="gridsearch", val_loader=[(x, torch.randn(10, 2))])
    with pytest.raises(OptionError, match="must be indices"):
        la(x, outputs=[False, True])


def test_a_refused_refit_keeps_the_coverage():
    torch.manual_seed(0)
    x, y = torch.randn(6, 3), torch.randint(2, (6,))
    la = Laplace(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)), "classification", "all", "kron").fit([(x, y)])
    before = repr(la.coverage())
    with pytest.raises(InputError):
        la.fit([(x, y + 5)])
    assert repr(la.coverage()) == before
    other = Laplace(la.model, "classification", "all", "kron")
    other.load_state_dict(la.state_dict())
    assert "last layer" not in repr(other.coverage())
