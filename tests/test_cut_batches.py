"""A batch that is too large for the memory budget is run in parts, and the posterior does not depend on that."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from laplace import Laplace
from laplace.backprop.network import Network
from laplace.errors import InputError
from laplace.network.batch_merging import cut
from laplace.network.batches import Batch
from laplace.network.inputs import Inputs, Keys


def _batch(n: int) -> Batch:
    x = torch.arange(n, dtype=torch.float32).unsqueeze(1)
    return Batch(3, Inputs.of(x, {}, Keys()), torch.arange(n), {"weights": torch.arange(n) + 0.5})


@pytest.mark.parametrize(("n", "most", "sizes"), [(7, 7, [7]), (7, 100, [7]), (16, 6, [6, 6, 4]), (5, 1, [1] * 5)])
def test_parts_are_in_order_and_each_example_keeps_its_label(n, most, sizes):
    parts = list(cut(_batch(n), most))
    assert [len(part.y) for part in parts] == sizes
    assert {part.index for part in parts} == {3}
    assert torch.cat([part.y for part in parts]).tolist() == list(range(n))
    for part in parts:
        assert part.inputs.tensors()[0].flatten().tolist() == part.y.tolist()
        assert (part.given["weights"] - 0.5).tolist() == part.y.tolist()


def _fitted(structure: str, curvature: str, batches: list, monkeypatch: pytest.MonkeyPatch, most: int) -> Laplace:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 20), nn.Tanh(), nn.Linear(20, 3)).double()
    monkeypatch.setattr(Network, "most", lambda self, inputs: most)
    generator = torch.Generator().manual_seed(5)
    return Laplace(model, "classification", "all", structure, curvature=curvature).fit(batches, generator=generator)


@pytest.mark.parametrize("curvature", ["ggn", "sketch", "mc", "ef"])
@pytest.mark.parametrize("structure", ["kron", "ekfac", "diag", "full"])
def test_posterior_does_not_depend_on_the_parts(structure, curvature, monkeypatch):
    x, y = torch.randn(23, 6, dtype=torch.float64), torch.arange(23) % 3
    batches = [(x[:16], y[:16]), (x[16:], y[16:])]
    whole, parts = (_fitted(structure, curvature, batches, monkeypatch, most) for most in (2**62, 5))
    assert float(parts.log_marginal_likelihood()) == pytest.approx(float(whole.log_marginal_likelihood()), rel=1e-9)
    torch.testing.assert_close(parts(x[:4]), whole(x[:4]), rtol=1e-8, atol=1e-10)


def test_a_bad_example_is_found_in_its_part(monkeypatch):
    x, y = torch.randn(16, 6, dtype=torch.float64), torch.arange(16) % 3
    x[14, 2] = float("nan")
    with pytest.raises(InputError, match=r"batch 0.*number 14 of the batch"):
        _fitted("kron", "ggn", [(x, y)], monkeypatch, 5)
