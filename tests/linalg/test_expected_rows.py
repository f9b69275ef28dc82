"""A sum that is told how many rows will come need not collect them to find out, and notices if it was told wrong."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from laplace import Laplace
from laplace.linalg.folded import written_out
from laplace.linalg.gram_sums import GramSum
from laplace.linalg.shared_sums import sums_from
from laplace.network.loaders import ArrayBatches, examples_in

D = 600


def _rows(m: int) -> Tensor:
    return torch.randn(m, D, generator=torch.Generator().manual_seed(0))


def _held(total: GramSum) -> int:
    """Return the bytes of all tensors that a sum holds."""
    return sum(value.nbytes for value in vars(total).values() if isinstance(value, Tensor))


def _added(total: GramSum, rows: Tensor, step: int) -> int:
    """Add rows, `step` at a time, and return the most bytes that the sum has held."""
    return max([total.add(part) or _held(total) for part in rows.split(step)])


@pytest.mark.parametrize("step", [64, 300])
@pytest.mark.parametrize("m", [900, 2000])
def test_the_sum_is_the_same_and_holds_less_than_a_matrix(m, step):
    told, untold = GramSum(expected=m), GramSum()
    most = _added(told, _rows(m), step)
    assert most < 0.57 * 8 * D * D + 256 * 4 * D + 1 < _added(untold, _rows(m), step)
    assert not told.mistaken
    tolerance = 1e-12 if m < 2 * D else 1e-5  # float64 as long as the rows may span too little
    expected = _rows(m).double().T @ _rows(m).double()
    for total in (told, untold):
        difference = written_out(total.close())[0].double() - expected
        assert float(difference.abs().max()) <= tolerance * float(expected.max())


@pytest.mark.parametrize("expected", [0, 100, 900, 1300])
@pytest.mark.parametrize("m", [100, 900, 1300])
def test_a_sum_of_few_rows_is_exact_or_known_to_be_mistaken(m, expected):
    total = GramSum(expected=expected)
    _added(total, _rows(m), 64)
    assert total.mistaken == (m < 2 * D <= expected)
    if m < 2 * D and not total.mistaken:
        exact = _rows(m).double().T @ _rows(m).double()
        torch.testing.assert_close(written_out(total.close())[0], exact, rtol=1e-12, atol=1e-10)


@pytest.mark.parametrize("expected", [0, 1300])
def test_a_sum_that_goes_on_knows_how_many_rows_it_has_seen(expected):
    whole, first = GramSum(expected=expected), GramSum(expected=expected)
    for part in _rows(1300).split(100):
        whole.add(part)
    for part in _rows(1300)[:700].split(100):
        first.add(part)
    (rest,) = sums_from({"A": first.flush()}, {"A": (first.seen, first.expected)}).values()
    for part in _rows(1300)[700:].split(100):
        rest.add(part)
    assert rest.seen + rest._filled == 1300
    assert not rest.mistaken
    torch.testing.assert_close(rest.flush(), whole.flush(), rtol=0, atol=1e-3)


def test_loaders_say_how_many_examples_they_have():
    data = TensorDataset(torch.zeros(21, 2), torch.zeros(21))
    assert examples_in(DataLoader(data, 4), 4) == 21
    assert examples_in(DataLoader(data, 4, drop_last=True), 4) == 17  # at least
    assert examples_in(list(DataLoader(data, 4)), 4) == 21
    assert examples_in(ArrayBatches(torch.zeros(21, 2), torch.zeros(21), 4), 4) == 21
    assert examples_in(iter(DataLoader(data, 4)), 4) == 21
    assert examples_in((batch for batch in DataLoader(data, 4)), 4) == 0


class Boastful:
    """A loader that says it has more batches than it gives, as some samplers do."""

    def __init__(self, batches: list[tuple[Tensor, Tensor]], said: int) -> None:
        self.batches, self.said, self.readings = batches, said, 0

    def __len__(self) -> int:
        return self.said

    def __iter__(self):
        self.readings += 1
        return iter(self.batches)


def _fitted(loader) -> Laplace:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(D, 8), nn.Tanh(), nn.Linear(8, 3))
    return Laplace(model, "classification", "all", "kron", prior_precision=1e-6).fit(loader)


@pytest.mark.parametrize(("said", "times"), [(10, 1), (200, 2)])
def test_a_loader_that_promises_too_much_is_read_again_and_the_sums_are_exact(said, times):
    batches = list(DataLoader(TensorDataset(_rows(700), torch.arange(700) % 3), 64))
    honest, loader = Boastful(batches, len(batches)), Boastful(batches, said)
    _fitted(honest)
    la = _fitted(loader)
    assert loader.readings == times * honest.readings
    found = written_out(la.posterior.fit.sums["0.weight/A"])[0]
    torch.testing.assert_close(found, _rows(700).double().T @ _rows(700).double(), rtol=1e-12, atol=1e-10)
    assert la.n_data == 700


def test_a_loader_that_can_be_read_once_may_promise_too_much():
    batches = list(DataLoader(TensorDataset(_rows(700), torch.arange(700) % 3), 64))

    class Once(Boastful):
        def __iter__(self):
            return self

        def __next__(self):
            if not self.batches:
                raise StopIteration
            return self.batches.pop(0)

    la, whole = _fitted(Once(list(batches), 200)), _fitted(batches)
    torch.testing.assert_close(la.log_marginal_likelihood(), whole.log_marginal_likelihood())
