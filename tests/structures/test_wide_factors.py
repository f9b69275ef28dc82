"""Wide Kronecker factors: decomposed in float32 where the prior covers its rounding, in float64 where it does not."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from laplace import Laplace
from laplace.structures.blockdiag import BlockCurvature
from laplace.structures.kron_wide import WideKronBlock

CLOSE = 1e-3  # share of a variance that may be rounding, of float32 anywhere in the network too
WIDE = 300


def fitted(dtype: torch.dtype, spread: float) -> tuple[Laplace, Tensor]:
    """300-4-3. The inputs' factor has eigenvalues that fall by `spread` squared."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(700, WIDE, generator=generator) * torch.logspace(0, -spread, WIDE)
    x = (x @ torch.linalg.qr(torch.randn(WIDE, WIDE, generator=generator))[0]).to(dtype)
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(WIDE, 4), nn.Tanh(), nn.Linear(4, 3)).to(dtype)
    y = torch.arange(700) % 3
    la = Laplace(model, "classification", "all", "kron").fit(
        [(x[s : s + 100], y[s : s + 100]) for s in (0, 100, 200, 300, 400, 500, 600)]
    )
    return la, x[:9]


def wide_block(la: Laplace) -> WideKronBlock:
    curvature = la.posterior.curvature
    assert isinstance(curvature, BlockCurvature)
    (block,) = [block for block in curvature.blocks if isinstance(block, WideKronBlock)]
    return block


def made(block: WideKronBlock) -> set[str]:
    """Which decompositions are there."""
    return {"rounded", "exact"} & set(vars(block))


@pytest.mark.parametrize("spread", [1.0, 3.0])
def test_variances_and_evidence_are_those_of_float64_at_every_prior(spread):
    single, x = fitted(torch.float32, spread)
    double, _ = fitted(torch.float64, spread)
    for prior in (1e3, 1.0, 1e-2, 1e-4, 1e-6, 1.0):  # the last one after the decomposition in float64
        single.prior_precision = double.prior_precision = prior
        found, exact = (la.predict(x.to(la.mean.dtype)).outputs.variance for la in (single, double))
        torch.testing.assert_close(found.double(), exact, rtol=CLOSE, atol=0)
        torch.testing.assert_close(
            single.posterior.log_det_ratio.double(), double.posterior.log_det_ratio, rtol=CLOSE, atol=1e-4
        )


def test_a_prior_that_covers_the_rounding_asks_for_float32_alone():
    la, x = fitted(torch.float32, 3.0)
    block = wide_block(la)
    assert made(block) == set()
    la.prior_precision = 1e3
    la(x)
    la.log_marginal_likelihood()
    assert made(block) == {"rounded"}
    la.prior_precision = 1e-6
    la(x)
    assert made(block) == {"rounded", "exact"}


def test_a_small_prior_asks_for_float64_at_once_and_it_serves_every_other_prior():
    la, x = fitted(torch.float32, 3.0)
    for prior in (1e-6, 1e3):
        la.prior_precision = prior
        la(x)
    assert made(wide_block(la)) == {"exact"}


def test_what_is_asked_without_a_prior_is_of_float64():
    la, _ = fitted(torch.float32, 3.0)
    la.prior_precision = 1e3
    la.log_marginal_likelihood()
    assert la.clipped.lowest > -1e-12
    assert made(wide_block(la)) == {"rounded", "exact"}


def test_the_bound_of_the_blur_holds():
    la, _ = fitted(torch.float32, 3.0)
    block = wide_block(la)
    assert 0 < block.exact.alpha.max() * block.exact.beta.max() * 1e-8 <= block.blur_bound
    assert block.blur <= block.blur_bound


def test_a_bias_takes_the_decomposition_that_its_weight_has_made():
    """A weight's norm may ask for float64 where that of the bias does not. Both have the same factor B."""
    torch.manual_seed(0)
    x, y = 10 * torch.randn(2000, 50), torch.arange(2000) % WIDE
    la = Laplace(nn.Linear(50, WIDE), "classification", "last_layer", "kron").fit([(x, y)])
    weight, bias = (block for block in la.posterior.curvature.blocks)
    largest = [float(la.posterior.scale) * block._norm for block in (weight, bias)]
    assert largest[0] > 4 * largest[1]
    la.prior_precision = 3e-2 * (largest[0] * largest[1]) ** 0.5  # covers the rounding of the bias alone
    la.log_marginal_likelihood()
    assert (made(weight), made(bias)) == ({"exact"}, {"rounded"})
    assert bias.rounded.left is weight.exact.left
