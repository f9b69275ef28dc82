"""One sum for all names that bring the same rows."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from laplace import Laplace
from laplace.inference.sums import add_to
from laplace.linalg.gram_sums import GramRows, GramSum

DIMS = [3, 70, 520]  # narrow, collected over batches, kept as a triangle


def _rows(m: int, d: int, seed: int = 0) -> Tensor:
    return torch.randn(m, d, generator=torch.Generator().manual_seed(seed))


def _gram(*rows: Tensor) -> Tensor:
    return sum(x.double().T @ x.double() for x in rows)  # type: ignore[return-value]


@pytest.mark.parametrize("d", DIMS)
def test_names_of_the_same_rows_share_a_sum(d):
    sums, batches = {}, [_rows(m, d, m) for m in (4, 1100, 7)]
    for x in batches:
        add_to(sums, {"q": GramRows(x), "k": GramRows(x), "other": GramRows(x.clone())})
    assert sums["q"] is sums["k"] is not sums["other"]
    for name in sums:
        torch.testing.assert_close(sums[name].flush().double(), _gram(*batches), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("d", DIMS)
@pytest.mark.parametrize("how", ["other rows", "none", "a finished product"])
def test_names_that_bring_other_rows_later_part(d, how):
    sums, x, z = {}, _rows(600, d), _rows(600, d, 1)
    add_to(sums, {"q": GramRows(x), "k": GramRows(x)})
    later = {"other rows": GramRows(z), "a finished product": _gram(z).unsqueeze(0)}
    add_to(sums, {"q": GramRows(x)} | ({"k": later[how]} if how in later else {}))
    torch.testing.assert_close(sums["q"].flush().double(), _gram(x, x), rtol=1e-5, atol=1e-3)
    expected = _gram(x) if how == "none" else _gram(x, z)
    torch.testing.assert_close(sums["k"].flush().double(), expected, rtol=1e-5, atol=1e-3)


def test_few_rows_of_a_wide_matrix_are_multiplied_in_float64_and_many_in_float32():
    few, many = GramSum(), GramSum()
    for part in _rows(1000, 600).split(10):
        few.add(part)
    torch.testing.assert_close(few.flush(), _gram(_rows(1000, 600)), rtol=1e-12, atol=1e-12)
    for part in _rows(6000, 600).split(700):
        many.add(part)
    torch.testing.assert_close(many.flush(), _gram(_rows(6000, 600)), rtol=0, atol=6e-3)


class Attention(nn.Module):
    """One head, whose queries, keys and values read one tensor."""

    def __init__(self, width: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.q, self.k, self.v, self.head = (nn.Linear(width, d) for d in (width, width, width, 2))

    def forward(self, x: Tensor) -> Tensor:  # (N, T, D) -> (N, 2)
        return self.head(nn.functional.scaled_dot_product_attention(self.q(x), self.k(x), self.v(x)).mean(1))


@pytest.fixture(scope="module")
def fitted() -> Laplace:
    x, y = torch.randn(12, 3, 80, generator=torch.Generator().manual_seed(0)), torch.arange(12) % 2
    return Laplace(Attention(80), "classification", "all", "kron").fit([(x[:8], y[:8]), (x[8:], y[8:])])


def test_queries_keys_and_values_share_one_factor_and_its_basis(fitted):
    sums = fitted.posterior.fit.sums
    assert len({sums[f"{name}.weight/A"].data_ptr() for name in "qkv"}) == 1
    blocks = dict(zip(fitted.posterior.fit.layout.names, fitted.posterior.gaussian.blocks, strict=True))
    assert len({id(blocks[f"{name}.weight"].block.right) for name in "qkv"}) == 1


def test_a_shared_factor_survives_a_file(fitted, tmp_path):
    fitted.save(tmp_path / "a.safetensors")
    loaded = Laplace.load(tmp_path / "a.safetensors", Attention(80))
    for key, value in fitted.posterior.fit.sums.items():
        assert torch.equal(value, loaded.posterior.fit.sums[key])


def test_data_that_is_added_to_a_shared_factor_counts_once_for_each_layer(fitted):
    x, y = torch.randn(12, 3, 80, generator=torch.Generator().manual_seed(0)), torch.arange(12) % 2
    la = Laplace(Attention(80), "classification", "all", "kron").fit([(x[:8], y[:8])])
    la.fit([(x[8:], y[8:])], override=False)
    for key, value in fitted.posterior.fit.sums.items():
        torch.testing.assert_close(value, la.posterior.fit.sums[key], rtol=1e-4, atol=1e-6)
