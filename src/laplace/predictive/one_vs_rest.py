"""E[softmax(f)] for f ~ N(m, S) from the variances of contrasts: each class against the largest of the rest.

Softmax is the law of an argmax: k is the class with the largest f_k + g_k, where g are independent Gumbel variates. If
the f_k are independent too, with variances u_k, then

    p_k = int h_k(y) prod_j F_j(y) dy,   F_k(y) = P(f_k + g_k < y),   h_k = F_k' / F_k,

because the largest of all has the density (sum_j h_j) prod_j F_j, and is that of class k with probability h_k / sum h.
One integral over y gives all classes, at a cost in proportion to their number.

Softmax does not see a shift that all outputs have in common. So S is only known by its contrasts, P S P with
P = I - 1 1^T / C, and u is chosen such that diag(u) has their variances: diag(P diag(u) P) = diag(P S P). The integral
is exact if S is diagonal but for a common shift, and for two classes with any S; what it leaves out are other
correlations between outputs.

F_k is a normal distribution function averaged over a Gumbel variate. The Gumbel variate is written as a mixture of six
normals; for small u, the Gumbel distribution function itself is averaged over five nodes of f instead. The result has
an error of up to 5e-4 in p, tends to softmax(m) as u tends to 0, and sums to 1.

Measured against 131,072 quasi-random draws on posteriors of last layers with prior precisions from 100 to 1e-4, the
mean KL divergence of the draws from this is below 1e-5 for 2 and 3 classes, at most .003 for 10, and at most .0004 for
150; 'probit' has up to 1.5. On covariances of rank C / 3 with standard deviations of 3 it is .005 for 3 classes, .027
for 10 and .004 for 150.
"""

from __future__ import annotations

import math
from typing import Final

import torch
from torch import Tensor

from laplace.linalg.contrasts import as_if_independent

# A mixture of normals with the density exp(x - exp(x)), the logarithm of an exponential variate: minus a Gumbel one.
_WEIGHTS: Final = (0.013963, 0.086665, 0.24754, 0.361792, 0.242455, 0.047585)
_MEANS: Final = (-4.344017, -2.622038, -1.335131, -0.340352, 0.458234, 1.144439)
_VARIANCES: Final = (2.774858, 1.307589, 0.669848, 0.369361, 0.216169, 0.131194)
_NODES: Final = ((0.0, 8 / 15), (1.355626179974266, 0.2220759220056126), (2.856970013872806, 0.01125741132772069))
_NARROW, _WIDE = 0.1, 0.3  # below the first u the nodes are used alone, above the second the mixture
_GUMBEL_MEAN, _GUMBEL_VARIANCE = 0.5772156649, math.pi**2 / 6
_POINTS = 20  # at which the integral over y is evaluated
_SEARCHED = 7  # points per round of the search for where the integrand is
_LEFT, _RIGHT = 9.0, 5e-5  # -log of the distribution function of the largest, where the integral starts and ends
_CHUNK = 2**17  # numbers at a time: few enough to stay in a processor's cache


def one_vs_rest(f: Tensor, variance: Tensor) -> Tensor:  # (N, C), (N, C) -> (N, C)
    """Return E[softmax(f)], given the variances of the contrasts f_c - mean of f.

    Costs about 20 * 12 exponentials and error functions per output, and no memory beyond a chunk of inputs.
    """
    step = max(1, _CHUNK // (_POINTS * f.shape[1]))
    u = as_if_independent(variance)
    parts = zip((f - f.amax(-1, keepdim=True)).split(step), u.split(step), strict=True)
    return torch.cat([_integrated(*part) for part in parts])


def _integrated(f: Tensor, u: Tensor) -> Tensor:  # (n, C), (n, C) -> (n, C)
    with torch.no_grad():
        low, high = _ends(f, u)
        y = low + (high - low) * torch.linspace(0, 1, _POINTS, dtype=f.dtype, device=f.device)  # (n, Y)
    log_h, log_below = _log_hazard(f.unsqueeze(1) - y.unsqueeze(2), u.unsqueeze(1))  # (n, Y, C)
    total = log_h.logsumexp(-1)
    weights = (log_below.sum(-1) + total).softmax(-1)  # of the trapezoidal rule, whose ends are negligible
    return torch.einsum("ny,nyc->nc", weights, (log_h - total.unsqueeze(-1)).exp())


def _log_hazard(a: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:  # (n, Y, C), (n, 1, C)
    """Return log h and log F at a = m - y, from whichever of the two forms is accurate at u, or from both."""
    if (u >= _WIDE).all():
        return _by_mixture(a, u)
    if (u <= _NARROW).all():
        return _by_nodes(a, u)
    share = ((u - _NARROW) / (_WIDE - _NARROW)).clamp(0, 1)
    share = share.square() * (3 - 2 * share)
    (h, below), (narrow_h, narrow_below) = _by_mixture(a, u), _by_nodes(a, u)
    return torch.lerp(narrow_h, h, share.expand_as(h)), torch.lerp(narrow_below, below, share.expand_as(h))


def _by_mixture(a: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    density, below = torch.zeros_like(a), torch.zeros_like(a)
    for weight, mean, variance in zip(_WEIGHTS, _MEANS, _VARIANCES, strict=True):
        scale = (2 * (u + variance)).rsqrt()
        z = (a - mean) * scale
        below = below + weight / 2 * torch.erfc(z)
        density = density + weight / math.sqrt(math.pi) * scale * (-z.square()).exp()
    log_below = _log(below)
    # Jensen's bound, e^(a + u/2) exp(-e^(a + 3u/2)): sharp far below y, where the mixture's tail falls too fast
    bound = a + u / 2 - (a + 1.5 * u).clamp(max=50).exp()
    return torch.maximum(_log(density), bound) - log_below, log_below


def _by_nodes(a: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    density, below = torch.zeros_like(a), torch.zeros_like(a)
    spread = u.clamp(min=torch.finfo(u.dtype).tiny).sqrt()  # whose derivative is finite at u = 0
    shift = a.clamp(max=0)  # so that the density far below y does not underflow
    for node, weight in _NODES:
        for x in {node: None, -node: None}:  # once for the node at 0
            rate = (a + spread * x).exp()
            each = weight * (-rate).exp()
            below = below + each
            density = density + each * (a - shift + spread * x).exp()
    log_below = _log(below)
    return _log(density) + shift - log_below, log_below


def _ends(f: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:  # (n, C), (n, C) -> (n, 1), (n, 1)
    """Return between which y the largest of all lies, with one normal in place of the Gumbel variate."""
    mean, spread, c = f + _GUMBEL_MEAN, (u + _GUMBEL_VARIANCE).sqrt(), f.shape[1]
    low = (mean - math.sqrt(2 * _LEFT) * spread).amax(1, keepdim=True)
    high = (mean + math.sqrt(2 * math.log(c / _RIGHT)) * spread).amax(1, keepdim=True)
    steps = torch.linspace(0, 1, _SEARCHED, dtype=f.dtype, device=f.device)
    scale = spread.unsqueeze(1) * math.sqrt(2)
    for _ in range(2):
        y = low + (high - low) * steps
        above = torch.erfc((y.unsqueeze(2) - mean.unsqueeze(1)) / scale) / 2
        depth = -torch.log1p(-above.clamp(max=1 - 1e-6)).sum(-1)  # -log F, falling in y
        depth = depth.clamp(min=torch.finfo(f.dtype).tiny).log()
        low, high = _crossing(y, depth, math.log(_LEFT)), _crossing(y, depth, math.log(_RIGHT))
    return low, high


def _crossing(y: Tensor, values: Tensor, level: float) -> Tensor:  # (n, k), (n, k) -> (n, 1)
    """Return where falling values cross a level, interpolated between their points y."""
    after = (values > level).sum(1, keepdim=True).clamp(1, y.shape[1] - 1)
    (y0, v0), (y1, v1) = ((y.gather(1, i), values.gather(1, i)) for i in (after - 1, after))
    return y0 + (y1 - y0) * ((v0 - level) / (v0 - v1)).nan_to_num(0.0).clamp(0, 1)


def _log(x: Tensor) -> Tensor:
    return x.clamp(min=torch.finfo(x.dtype).tiny).log()
