"""`Kron(dtype=, device=)`: in which dtype the factors are kept, and where."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from laplace import Laplace
from laplace.errors import OptionError
from laplace.structures import Kron

T = 4


class Tokens(nn.Module):
    """A wide linear layer at every position, and a head on their mean."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.head = nn.Linear(520, 70), nn.Linear(70, 3)

    def forward(self, x: Tensor) -> Tensor:  # (N, T, 520) -> (N, 3)
        return self.head(self.inner(x).tanh().mean(1))


X, Y = torch.randn(40, T, 520, generator=torch.Generator().manual_seed(1)) / 20, torch.arange(40) % 3
DATA = list(zip(X.split(16), Y.split(16), strict=True))


def _fitted(structure: Kron) -> Laplace:
    return Laplace(Tokens(), "classification", "all", structure).fit(DATA)


def _factors(la: Laplace) -> dict[str, Tensor]:
    return {key: value for key, value in la.posterior.fit.sums.items() if key[-1] in "AB" and value.dim() == 3}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_factors_are_kept_in_the_dtype_and_are_those_of_float64(dtype):
    found = _factors(_fitted(Kron(dtype=dtype)))
    expected = _factors(
        Laplace(Tokens().double(), "classification", "all", "kron").fit([(x.double(), y) for x, y in DATA])
    )
    assert {value.dtype for value in found.values()} == {dtype}
    for key, value in expected.items():
        size = float(value.abs().max())
        torch.testing.assert_close(found[key].double(), value, rtol=0, atol=2e-6 * size)


def test_the_input_factor_is_exact_in_float64_and_rounded_by_the_stated_share_in_float32():
    rows = X.flatten(0, 1).double()
    exact, rounded = (_factors(_fitted(Kron(dtype=d)))["inner.weight/A"][0] for d in ("float64", "float32"))
    torch.testing.assert_close(exact, rows.T @ rows, rtol=1e-12, atol=1e-12)
    largest = float(torch.linalg.eigvalsh(exact)[-1])
    assert float(torch.linalg.eigvalsh(rounded.double() - exact).abs().max()) <= 1e-6 * largest


@pytest.mark.parametrize("dtype", [None, torch.float32, "float64"])
def test_predictions_agree_in_every_dtype(dtype):
    la, usual = _fitted(Kron(dtype=dtype)), _fitted(Kron())
    torch.testing.assert_close(la(X[:5]), usual(X[:5]), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(la.log_marginal_likelihood(), usual.log_marginal_likelihood(), rtol=1e-4, atol=1e-3)


def test_a_device_is_where_the_factors_are():
    la = _fitted(Kron(device="cpu"))
    assert {value.device.type for value in _factors(la).values()} == {"cpu"}
    torch.testing.assert_close(la(X[:5]), _fitted(Kron())(X[:5]))


@pytest.mark.parametrize("made", [Kron(dtype=torch.float32), Kron(device=torch.device("cpu")), Kron(dtype="float64")])
def test_both_options_go_round_through_constructor_and_file(made, tmp_path):
    assert eval(repr(made)) == made != Kron()  # noqa: S307 - its own repr
    la = _fitted(made)
    la.save(tmp_path / "a.safetensors")
    loaded = Laplace.load(tmp_path / "a.safetensors", Tokens())
    assert loaded.posterior.fit.structure == made
    assert torch.equal(loaded(X[:5]), la(X[:5]))


def test_data_that_is_added_later_stays_in_the_dtype():
    la = Laplace(Tokens(), "classification", "all", Kron(dtype="float32")).fit(DATA[:1]).fit(DATA[1:], override=False)
    whole = _factors(_fitted(Kron(dtype="float32")))
    for key, value in _factors(la).items():
        assert value.dtype == torch.float32
        torch.testing.assert_close(value, whole[key], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.int64, "half", 32, float])
def test_other_dtypes_are_refused(dtype):
    with pytest.raises(OptionError, match=r"dtype=.* Valid: None, torch.float32, torch.float64"):
        Kron(dtype=dtype)


@pytest.mark.parametrize("device", ["gpu", "meta", 1.5, ["cpu"]])
def test_other_devices_are_refused(device):
    with pytest.raises(OptionError, match=r"device=.*Write device='cpu'"):
        Kron(device=device)
