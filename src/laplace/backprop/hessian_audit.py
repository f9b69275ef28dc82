"""Check on the first batch that autograd's second derivatives are right.

An operation's double backward may be wrong, or treat as constant what its backward depends on. Then the Hessian is not
symmetric, or is not the derivative of the gradient. Averaging it with its transpose would hide that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from laplace.backprop.hessian import HessianMoments
from laplace.backprop.sending import sent_back
from laplace.errors import ModelError
from laplace.linalg.autocast import rounding
from laplace.network.pieces import whole
from laplace.weights.layout import Layout

_DIRECTIONS = 4
_FAR, _NEAR = 1e-5, 1e-7  # lengths of steps, relative to the weights
_INSTEAD = (
    "Some operation's double backward is wrong (an autograd.Function of your own?), or a part of the network is "
    "detached. Take curvature='ggn', 'mc' or 'ef', which need first derivatives only; or write the operation with "
    "plain torch operations, and remove a parametrization with torch.nn.utils.parametrize.remove_parametrizations."
)


def require_hessian(
    moments: HessianMoments,
    outputs: Tensor,  # (M, C), with their graph
    outputs_at: Callable[[Sequence[Tensor]], Tensor],  # the float64 outputs at other values of the tensors
    loss: Callable[[Tensor], Tensor],
) -> None:
    """Refuse second derivatives that are not symmetric, or not the derivative of the gradient.

    The derivative is checked along a random direction. Costs a dozen products and five gradients. Differences are taken
    in float64. A network that does not run in float64 is only checked for symmetry.
    """
    steps = _steps(moments)
    _require_symmetric(moments, outputs, steps)
    tensors = [whole(t).detach().double().requires_grad_() for t in moments.tensors]
    layout = moments.layout

    def made(at: list[Tensor]) -> tuple[HessianMoments, Tensor]:
        f = outputs_at(at)
        return HessianMoments(loss(f), at, layout, moments.chunk, torch.float64), f

    with torch.enable_grad():
        try:
            exact, f = made(tensors)
        except Exception:  # any error of a network in another dtype
            return
        if rounding({f.dtype}) > 1e-12:  # the network casts its inputs to a coarser dtype
            return
        _require_symmetric(exact, f, steps)
        _require_derivative(exact, f, steps[0].double(), lambda at: made(at)[0].slope.detach())


def _steps(moments: HessianMoments) -> Tensor:  # (4, P)
    """Return random directions, with zeros for weights without a gradient.

    Such a weight is unused, or constant by convention, as the padding row of an embedding.
    """
    slope, generator = moments.slope.detach(), torch.Generator().manual_seed(0)
    return torch.randn(_DIRECTIONS, len(slope), generator=generator).to(slope) * (slope != 0)


def _require_symmetric(moments: HessianMoments, outputs: Tensor, steps: Tensor) -> None:
    eps = rounding({moments.slope.dtype, outputs.dtype})
    products = moments.products(steps)
    between = steps.to(products) @ products.T  # <u, H w> for all pairs
    off = float((between - between.T).abs().max())
    size = float(products.norm(dim=1).max())
    rounded = 1e3 * eps * float(_terms(moments, outputs).norm()) ** 2
    allowed = min(30 * eps**0.5, 0.5) * size + rounded
    if off > allowed + _rounded(moments, steps[0], products[0]):  # False for NaN, which the sums report
        raise ModelError(
            f"the Hessian that autograd gives is not symmetric: along random directions u and w, <u, Hw> and <w, Hu> "
            f"differ by {off:.2g} where |Hw| is {size:.2g}. {_INSTEAD}"
        )


def _rounded(moments: HessianMoments, step: Tensor, product: Tensor) -> float:
    """Return how large <u, Hw> may be by rounding alone.

    Measured as the difference between the product of a step and the sum of the products of its two parts.
    """
    share = step * torch.rand(len(step), generator=torch.Generator().manual_seed(0)).to(step)
    parts = moments.products(torch.stack([share, step - share]))
    return 100 * float((product - parts.sum(0)).norm()) * float(step.norm())


def _require_derivative(
    moments: HessianMoments,
    outputs: Tensor,
    step: Tensor,
    slope_at: Callable[[list[Tensor]], Tensor],
) -> None:
    """Refuse a Hessian that differs from central differences of the gradient.

    Differences are ignored where they depend on their length or on the side, as over a kink.
    """
    layout, slope = moments.layout, moments.slope.detach()
    tensors = [t.detach() for t in moments.tensors]
    scale = max(float(layout.join(tensors).norm()) / len(step) ** 0.5, 1e-3)

    def one_sided(length: float) -> Tensor:  # (2, P)
        ahead, behind = (slope_at(_moved(layout, tensors, sign * length * step)) for sign in (1, -1))
        return torch.stack([ahead - slope, slope - behind]) / length

    far, near = one_sided(_FAR * scale), one_sided(_NEAR * scale)
    doubts = torch.stack([far[0] - near[0], far[1] - near[1], near[0] - near[1]])
    vectors = (moments.products(step.unsqueeze(0))[0], near.mean(0), doubts, _terms(moments, outputs))
    for name, exact, found, doubt, terms in zip(layout.names, *map(layout.split, vectors), strict=True):
        off, size = float((found - exact).norm()), float(found.norm())
        rounded = 100 * torch.finfo(torch.float64).eps / (_NEAR * scale) * float(terms.norm())
        if off > 1e-3 * max(size, float(exact.norm())) + 10 * float(doubt.norm()) + rounded:
            raise ModelError(
                f"the Hessian that autograd gives is not the derivative of the gradient: for {name!r}, along a random "
                f"direction, it differs from finite differences by {off:.2g} where these are {size:.2g}. {_INSTEAD}"
            )


def _moved(layout: Layout, tensors: Sequence[Tensor], step: Tensor) -> list[Tensor]:
    return [t[0].requires_grad_() for t in layout.moved(tensors, step.unsqueeze(0))]


def _terms(moments: HessianMoments, outputs: Tensor) -> Tensor:  # (P,)
    """Return the gradient of the outputs summed with random signs: the size of terms that may cancel in a Hessian."""
    generator = torch.Generator().manual_seed(0)
    signs = torch.randint(0, 2, outputs.shape, generator=generator).to(outputs) * 2 - 1
    found = sent_back(outputs, moments.tensors, signs)
    dense = [torch.zeros_like(p) if g is None else g for p, g in zip(moments.tensors, found, strict=True)]
    return moments.layout.join(dense).to(moments.dtype)
