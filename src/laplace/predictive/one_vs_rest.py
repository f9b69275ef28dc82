"""E[softmax(f)] for f ~ N(m, S) from the variances of contrasts: each class against the largest of the rest.

Softmax is the law of an argmax: k is the class with the largest f_k + g_k, where g are independent Gumbel variates. If
the f_k are independent too, with variances u_k, then

    p_k = int h_k(y) prod_j F_j(y) dy,   F_k(y) = P(f_k + g_k < y),   h_k = F_k' / F_k,

because the largest of all has the density (sum_j h_j) prod_j F_j, and is that of class k with probability h_k / sum h.
One integral over y gives all classes, at a cost in proportion to their number.

Softmax does not see a shift that all outputs have in common. So of S only contrasts are used, P S P with
P = I - 1 1^T / C, and u is chosen such that diag(u) has their variances: diag(P diag(u) P) = diag(P S P). The integral
is exact if S is diagonal but for a common shift, and for two classes with any S; what it leaves out are other
correlations between outputs.

F_k is a normal distribution function averaged over a Gumbel variate. The Gumbel variate is written as a mixture of six
normals; for small u, the Gumbel distribution function itself is averaged over five nodes of f instead. The result has
an error of up to 5e-4 in p where variances are within a factor of 100, and of some 1e-2 where they lie six decades
apart; it tends to softmax(m) as u tends to 0, and sums to 1.

Most of many classes lie so far below y, wherever the integrand counts, that two terms say all of them:

    log F_k(y) = -x + x^2 (e^u - 1) / 2 - ...,   x = e^(m + u/2 - y),   h_k = d log F_k / dy.

These are the same function of y for all of them, so that each row needs only two sums over its far classes, and the
integral is evaluated for the near ones alone: 3 of 150 for a network that is sure of its classes.

Measured against quasi-random draws on posteriors of last layers with prior precisions of 1 and 1e-3, the mean KL
divergence of the draws from this is below 1e-4 for 3 classes and below 1e-2 for 10 and for 150.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Final

import torch
from torch import Tensor

from laplace.linalg.contrasts import as_if_independent
from laplace.linalg.tracing import is_traced

# A mixture of normals with the density exp(x - exp(x)), the logarithm of an exponential variate: minus a Gumbel one.
_WEIGHTS: Final = (0.013963, 0.086665, 0.24754, 0.361792, 0.242455, 0.047585)
_MEANS: Final = (-4.344017, -2.622038, -1.335131, -0.340352, 0.458234, 1.144439)
_VARIANCES: Final = (2.774858, 1.307589, 0.669848, 0.369361, 0.216169, 0.131194)
_NODES: Final = ((0.0, 8 / 15), (1.355626179974266, 0.2220759220056126), (2.856970013872806, 0.01125741132772069))
_NARROW, _WIDE = 0.1, 0.3  # below the first u the nodes are used alone, above the second the mixture
_GUMBEL_MEAN, _GUMBEL_VARIANCE = 0.5772156649, math.pi**2 / 6
_POINTS = 20  # at which the integral over y is evaluated
_SHARES: Final = (0.0, *(2 ** (-k / 3) for k in range(30, -1, -1)))  # where the integrand is looked for: 0, 2^-10 to 1
_FLANK = 0.12  # the first distance between points, as a share of the integrand's left flank
_LEFT, _RIGHT = 9.0, 5e-5  # -log of the distribution function of the largest, where the integral starts and ends
_FAR = 2.0  # how far below the integral's range a class with m + 2 u lies, if two terms are to do
_FEWEST = 4  # near classes of a group of rows, at least
_SMALL = 16  # classes up to which rows are not grouped: calling the operations would cost more than it saves
_OUTER = 9.0  # in units of 1 / sqrt(2 u): beyond it, exp(-z^2) is 0 for every purpose, and slow to compute with
_FEW = 64  # outputs of a call that are integrated as they are: to group them would cost more than it saves
_CHUNK = 2**19  # numbers at a time: few enough to stay in a processor's cache


def one_vs_rest(f: Tensor, variance: Tensor) -> Tensor:  # (N, C), (N, C) -> (N, C)
    """Return E[softmax(f)], given the variances of the contrasts f_c - mean of f."""
    return softmax_of_independent(f, as_if_independent(variance))


def softmax_of_independent(f: Tensor, u: Tensor) -> Tensor:  # (N, C), (N, C) -> (N, C)
    """Return E[softmax(f)] for independent f_c with means `f` and variances u.

    Costs about 20 * 12 exponentials and error functions per near class, and no memory beyond a chunk of inputs.
    """
    f = f - f.amax(-1, keepdim=True)
    if is_traced() or f.numel() <= _FEW:
        return _integrated(f, u)[0]
    if f.shape[1] <= _SMALL:
        step = max(1, _CHUNK // (_POINTS * len(_WEIGHTS) * f.shape[1]))
        parts = zip(f.split(step), u.split(step), strict=True)
        return torch.cat([_integrated(*part)[0] for part in parts])
    with torch.no_grad():
        edge = _lowest(f, u)
        reach = f + 2 * u
        near = (reach > edge - _FAR).sum(1)
        sizes = _group_sizes(f.shape[1])
        group = torch.bucketize(near, torch.tensor(sizes[:-1], device=f.device))
    found: list[Tensor] = []
    order: list[Tensor] = []
    for i, size in enumerate(sizes):
        rows = (group == i).nonzero().flatten()
        for some in rows.split(max(1, _CHUNK // (_POINTS * len(_WEIGHTS) * size))) if len(rows) else ():
            order.append(some)
            found.append(_near_and_far(f[some], u[some], edge[some], reach[some], size))
    return torch.cat(found)[torch.cat(order).argsort()] if found else torch.zeros_like(f)


@dataclass(frozen=True)
class _Constants:
    """The numbers above as tensors. Six normals and five nodes have a first dimension of their own."""

    shares: Tensor  # (32,)
    levels: Tensor  # (3,)
    t: Tensor  # (Y,)
    means: Tensor  # (6, 1, 1, 1)
    variances: Tensor  # (6, 1, 1, 1)
    weights: Tensor  # (6,)
    nodes: Tensor  # (5, 1, 1, 1)
    node_weights: Tensor  # (5,)


def _constants(dtype: torch.dtype, device: torch.device) -> _Constants:
    def tensor(numbers: Iterable[float]) -> Tensor:
        return torch.tensor(list(numbers), dtype=dtype, device=device)

    def first(numbers: Iterable[float]) -> Tensor:
        return tensor(numbers).reshape(-1, 1, 1, 1)

    nodes = [(sign * x, weight) for x, weight in _NODES for sign in ((1, -1) if x else (1,))]
    levels, t = tensor((_LEFT, 1.0, _RIGHT)).log(), tensor(range(_POINTS))
    normals = first(_MEANS), first(_VARIANCES), tensor(_WEIGHTS)
    return _Constants(tensor(_SHARES), levels, t, *normals, first(x for x, _ in nodes), tensor(w for _, w in nodes))


@cache
def _kept_constants(dtype: torch.dtype, device: torch.device) -> _Constants:
    with torch.inference_mode(False):  # they may be used with gradients later
        return _constants(dtype, device)


def _group_sizes(c: int) -> list[int]:
    """Return how many near classes the rows of a group have at most: powers of two, and all."""
    sizes = [_FEWEST]
    while 2 * sizes[-1] < c:
        sizes.append(2 * sizes[-1])
    return [size for size in sizes if size < c] + [c]


def _near_and_far(f: Tensor, u: Tensor, edge: Tensor, reach: Tensor, size: int) -> Tensor:  # (n, C)
    """Integrate the `size` classes that reach highest, with the two sums of the others."""
    if size == f.shape[1]:
        return _integrated(f, u)[0]
    chosen = reach.topk(size, 1, sorted=False).indices
    near = torch.zeros_like(f, dtype=torch.bool).scatter_(1, chosen, True)
    first = (f + u / 2 - edge).masked_fill(near, -math.inf).exp()  # x at the edge
    second = (2 * (f + u - edge)).masked_fill(near, -math.inf).exp() * -torch.expm1(-u)  # x^2 (e^u - 1)
    far = edge, first.sum(1, keepdim=True), second.sum(1, keepdim=True)
    p, one, two = _integrated(f.gather(1, chosen), u.gather(1, chosen), far)
    return (first * one - second * two).clamp(min=0).scatter(1, chosen, p)


def _integrated(
    f: Tensor, u: Tensor, far: tuple[Tensor, Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor, Tensor]:  # (n, C), (n, C) -> (n, C), (n, 1), (n, 1)
    """Integrate by the trapezoidal rule in t, with y = low + first (e^(k t) - 1) / k.

    Of classes with very different variances, a narrow one bounds the largest of all from below, and wide ones reach
    far above it: the integrand is widest on its right.

    `far` has a lower bound of y and the sums of x and x^2 (e^u - 1) of further classes there. Besides the
    probabilities of these classes, return what x and x^2 (e^u - 1) of a further one are multiplied by for its own.
    """
    known = (_constants if is_traced() else _kept_constants)(f.dtype, f.device)
    with torch.no_grad():
        low, first, growth = _spacing(f, u, far, known)
        grown = growth * known.t
        y = low + first * torch.expm1(grown) / growth  # (n, Y)
    log_h, log_below = _log_hazard(f.unsqueeze(1) - y.unsqueeze(2), u.unsqueeze(1), known)  # (n, Y, C)
    total, depth = log_h.logsumexp(-1), log_below.sum(-1)
    if far is None:
        weights = (depth + total + grown).softmax(-1)  # both ends are negligible
        return _averaged(weights, log_h, total), low, low  # which nobody asks for
    decay = (far[0] - y).exp()  # (n, Y): x relative to that at the edge
    once, twice = far[1] * decay, far[2] * decay.square()
    total = torch.logaddexp(total, _log(once - twice))
    weights = (depth - once + twice / 2 + total + grown).softmax(-1)
    each = weights * (-total).exp()
    p = _averaged(weights, log_h, total)
    return p, (each * decay).sum(1, keepdim=True), (each * decay.square()).sum(1, keepdim=True)


def _averaged(weights: Tensor, log_h: Tensor, total: Tensor) -> Tensor:  # (n, Y), (n, Y, C), (n, Y) -> (n, C)
    return (weights.unsqueeze(1) @ (log_h - total.unsqueeze(-1)).exp()).squeeze(1)


def _log_hazard(a: Tensor, u: Tensor, known: _Constants) -> tuple[Tensor, Tensor]:  # (n, Y, C), (n, 1, C)
    """Return log h and log F at a = m - y, from whichever of the two forms is accurate at u, or from both."""
    if not is_traced() and len(u):
        least, most = (float(end) for end in u.detach().aminmax())
        if least >= _WIDE:
            return _by_mixture(a, u, known)
        if most <= _NARROW:
            return _by_nodes(a, u, known)
    share = ((u - _NARROW) / (_WIDE - _NARROW)).clamp(0, 1)
    share = share.square() * (3 - 2 * share)
    (h, below), (narrow_h, narrow_below) = _by_mixture(a, u, known), _by_nodes(a, u, known)
    return torch.lerp(narrow_h, h, share.expand_as(h)), torch.lerp(narrow_below, below, share.expand_as(h))


def _by_mixture(a: Tensor, u: Tensor, known: _Constants) -> tuple[Tensor, Tensor]:
    scale = (2 * (u + known.variances)).rsqrt()  # (6, n, 1, C)
    z = ((a - known.means) * scale).clamp(-_OUTER, _OUTER)
    log_below = _log(_summed(known.weights / 2, torch.erfc(z)))
    log_density = _log(_summed(known.weights / math.sqrt(math.pi), (-z.square()).exp() * scale))
    # Jensen's bound, e^(a + u/2) exp(-e^(a + 3u/2)): sharp far below y, where the mixture's tail falls too fast
    bound = a + u / 2 - (a + 1.5 * u).clamp(max=50).exp()
    return torch.maximum(log_density, bound) - log_below, log_below


def _by_nodes(a: Tensor, u: Tensor, known: _Constants) -> tuple[Tensor, Tensor]:
    spread = u.clamp(torch.finfo(u.dtype).tiny, _WIDE).sqrt()  # whose derivative is finite at u = 0
    a = a.clamp(max=50)  # where both are 0, and finite in float32
    shift = a.clamp(max=0)  # so that the density far below y does not underflow
    moved = spread * known.nodes  # (5, n, 1, C)
    each = (-(a + moved).exp()).exp()
    log_below = _log(_summed(known.node_weights, each))
    log_density = _log(_summed(known.node_weights, each * (a - shift + moved).exp()))
    return log_density + shift - log_below, log_below


def _summed(weights: Tensor, terms: Tensor) -> Tensor:  # (k,), (k, n, Y, C) -> (n, Y, C)
    return (weights @ terms.flatten(1)).view(terms.shape[1:])


def _lowest(f: Tensor, u: Tensor) -> Tensor:  # (n, C), (n, C) -> (n, 1)
    """Return a bound below which the largest of all does not lie: that of the best class alone."""
    spread = (u + _GUMBEL_VARIANCE).sqrt()
    return (f + _GUMBEL_MEAN - math.sqrt(2 * _LEFT) * spread).amax(1, keepdim=True)


def _spacing(
    f: Tensor, u: Tensor, far: tuple[Tensor, Tensor, Tensor] | None, known: _Constants
) -> tuple[Tensor, Tensor, Tensor]:  # (n, C), (n, C) -> (n, 1) each
    """Return the first y, the distance of the second from it, and k, the logarithm by which distances grow.

    -log of the distribution function of the largest falls with y: where it crosses three levels is looked for on one
    grid, finest on its left, and interpolated. This is rough, and moves points alone: the integral is theirs.
    """
    mean, spread, ends = f + _GUMBEL_MEAN, (u + _GUMBEL_VARIANCE).sqrt(), math.log(f.shape[1] / _RIGHT)
    low = _lowest(f, u)
    reach = torch.minimum(u / 2, (2 * ends * u).sqrt()) + ends  # above f, by the exponential tail or the normal one
    high = torch.maximum(mean + math.sqrt(2 * ends) * spread, f + reach).amax(1, keepdim=True)
    if far is not None:
        high = torch.maximum(high, far[0] + _log(far[1]) + math.log(1 / _RIGHT))
    y = low + (high - low) * known.shares  # (n, 32)
    depth = _log_depth(y, f, u, spread, far)
    after = (depth.unsqueeze(2) > known.levels).sum(1).clamp(1, len(_SHARES) - 1)  # (n, 3)
    above, below = depth.gather(1, after - 1), depth.gather(1, after)
    share = ((above - known.levels) / (above - below)).nan_to_num(0.5).clamp(0, 1)
    start, middle, stop = torch.lerp(y.gather(1, after - 1), y.gather(1, after), share).split(1, 1)
    equal = (stop - start) / (_POINTS - 1)
    first = torch.minimum(_FLANK * (middle - start), equal).clamp(min=1e-6)
    return start, first, _growth(equal / first) / (_POINTS - 1)


def _log_depth(
    y: Tensor, f: Tensor, u: Tensor, spread: Tensor, far: tuple[Tensor, Tensor, Tensor] | None
) -> Tensor:  # (n, points) -> (n, points)
    """Return log(-log prod F), roughly: by one normal in place of the Gumbel variate, or by its exponential tail."""
    below, u = f.unsqueeze(1) - y.unsqueeze(2), u.unsqueeze(1)  # a, (n, points, C)
    above = torch.erfc((below + _GUMBEL_MEAN) / (-math.sqrt(2) * spread).unsqueeze(1)) / 2
    tail = torch.where(below + 1.5 * u < 0, below + u / 2, -math.inf).exp()
    depth = torch.maximum(-torch.log1p(-above.clamp(max=1 - 1e-6)), tail).sum(-1)
    if far is not None:
        depth = depth + far[1] * (far[0] - y).exp()
    return depth.clamp(min=torch.finfo(f.dtype).tiny).log()


def _growth(ratio: Tensor) -> Tensor:
    """Return x > 0 with (e^x - 1) / x = ratio, to 2 %: one step of x = log ratio + log(x / (1 - e^-x))."""
    log_ratio = ratio.log()
    x = (log_ratio + torch.log1p(log_ratio)).clamp(min=1e-3)
    return (log_ratio + torch.log(x / -torch.expm1(-x))).clamp(min=1e-3)


def _log(x: Tensor) -> Tensor:
    return x.clamp(min=torch.finfo(x.dtype).tiny).log()
