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
normals; for small u, the Gumbel distribution function itself is averaged over seven nodes of f instead. The result has
an error of up to 5e-4 in p, also where variances lie five decades apart; it tends to softmax(m) as u tends to 0, and
sums to 1.

The integral is a sum over 22 points y, whatever the input: they follow from three bounds by one product with a constant
matrix. For one input each operation costs more than its arithmetic, so there are as few operations as can be.

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
_NODES: Final = (  # of the normal distribution, for polynomials up to degree 13
    (0.0, 16 / 35),
    (1.154405394739968, 0.2401231786050127),
    (2.366759410734541, 0.0307571239675865),
    (3.750439717725742, 0.000548268855972218),
)
NARROW, WIDE = 1.0, 2.0  # below the first u the nodes are used alone, above the second the mixture
POINTS = 22  # at which the integral over y is evaluated
LEFT, LEFT_VARIANCE = 4.1, 0.4  # the integral starts at the largest of m - 4.1 sqrt(u + 0.4)
_RIGHT = 5e-5  # and ends where the largest of all lies above it with about this probability
_FLANK, _POWER = 8.0, 4  # how the distances between points begin, in units of sqrt(u + 0.4), and how they grow
_FAR = 2.0  # how far below the integral's range a class with m + 2 u lies, if two terms are to do
_FEWEST = 4  # near classes of a group of rows, at least
_SMALL = 16  # classes up to which rows are not grouped: calling the operations would cost more than it saves
OUTER = 9.0  # in units of 1 / sqrt(2 u): beyond it, exp(-z^2) is 0 for every purpose, and slow to compute with
HIGH = 50.0  # a = m - y, above which F is 0, and e^a still finite in float32
_FEW = 64  # outputs of a call that are integrated as they are: to group them would cost more than it saves
_CHUNK = 2**19  # numbers at a time: few enough to stay in a processor's cache


def one_vs_rest(f: Tensor, variance: Tensor) -> Tensor:  # (N, C), (N, C) -> (N, C)
    """Return E[softmax(f)], given the variances of the contrasts f_c - mean of f."""
    return softmax_of_independent(f, as_if_independent(variance))


def softmax_of_independent(f: Tensor, u: Tensor) -> Tensor:  # (N, C), (N, C) -> (N, C)
    """Return E[softmax(f)] for independent f_c with means `f` and variances u.

    Costs about 22 * 12 exponentials and error functions per near class, and no memory beyond a chunk of inputs.
    """
    f = f - f.amax(-1, keepdim=True)
    if is_traced() or f.numel() <= _FEW:
        return _integrated(f, u)[0]
    if f.shape[1] <= _SMALL:
        step = max(1, _CHUNK // (POINTS * len(_WEIGHTS) * f.shape[1]))
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
        for some in rows.split(max(1, _CHUNK // (POINTS * len(_WEIGHTS) * size))) if len(rows) else ():
            order.append(some)
            found.append(_near_and_far(f[some], u[some], edge[some], reach[some], size))
    return torch.cat(found)[torch.cat(order).argsort()] if found else torch.zeros_like(f)


@dataclass(frozen=True)
class _Constants:
    """Holds the numbers above as tensors. Six normals and seven nodes have a first dimension of their own."""

    further: Tensor  # (3, 1, 1)
    times: Tensor  # (3, 1, 1)
    grid: Tensor  # (3, 2 Y)
    means: Tensor  # (6, 1, 1, 1)
    variances: Tensor  # (6, 1, 1, 1), doubled
    below: Tensor  # (1, 6)
    density: Tensor  # (1, 6)
    nodes: Tensor  # (7, 1, 1, 1)
    node_weights: Tensor  # (1, 7)


def _constants(classes: int, dtype: torch.dtype, device: torch.device) -> _Constants:
    def tensor(numbers: Iterable[float], *shape: int) -> Tensor:
        return torch.tensor(list(numbers), dtype=dtype, device=device).reshape(-1, *shape)

    ends = end_exponent(classes)
    nodes = [(sign * x, weight) for x, weight in _NODES for sign in ((1, -1) if x else (1,))]
    return _Constants(
        further=tensor((LEFT_VARIANCE, LEFT_VARIANCE, ends / 2), 1, 1),
        times=tensor((-LEFT, 1 - LEFT, math.sqrt(2 * ends)), 1, 1),
        grid=tensor((x for row in _grid() for x in row), 2 * POINTS),
        means=tensor(_MEANS, 1, 1, 1),
        variances=tensor((2 * v for v in _VARIANCES), 1, 1, 1),
        below=tensor((w / 2 for w in _WEIGHTS), len(_WEIGHTS)),
        density=tensor((w / math.sqrt(math.pi) for w in _WEIGHTS), len(_WEIGHTS)),
        nodes=tensor((x for x, _ in nodes), 1, 1, 1),
        node_weights=tensor((w for _, w in nodes), len(nodes)),
    )


@cache
def constants_for(classes: int, dtype: torch.dtype, device: torch.device) -> _Constants:
    """Return the constants of so many classes, made once."""
    with torch.inference_mode(False):  # they may be used with gradients later
        return _constants(classes, dtype, device)


def end_exponent(classes: int) -> float:
    """Return -log of the probability with which each class may lie above the end of the integral."""
    return math.log(classes / _RIGHT)


def _grid() -> list[list[float]]:
    """Return what (low, next, high) are multiplied by: for y(t) at t = 0 to 1, and for dy/dt.

    y = low + b t + (high - low - b) t^4 with b = 8 (next - low). Of classes with very different variances, a narrow one
    bounds the largest of all from below, and wide ones reach far above it: the integrand is widest on its right.
    """
    t = [i / (POINTS - 1) for i in range(POINTS)]
    first = [x - x**_POWER for x in t] + [1 - _POWER * x ** (_POWER - 1) for x in t]
    last = [x**_POWER for x in t] + [_POWER * x ** (_POWER - 1) for x in t]
    low = [float(i < POINTS) - one - _FLANK * b for i, (one, b) in enumerate(zip(last, first, strict=True))]
    return [low, [_FLANK * b for b in first], last]


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
    """Integrate by the trapezoidal rule in t: a sum, because both ends are negligible.

    `far` has a lower bound of y and the sums of x and x^2 (e^u - 1) of further classes there. Besides the
    probabilities of these classes, return what x and x^2 (e^u - 1) of a further one are multiplied by for its own.
    """
    known = (_constants if is_traced() else constants_for)(f.shape[1], f.dtype, f.device)
    with torch.no_grad():
        y, speed = _points(f, u, far, known)  # (n, Y)
    below, density = _distribution(f.unsqueeze(1) - y.unsqueeze(2), u.unsqueeze(1), known)  # (n, Y, C)
    below = below.clamp(min=torch.finfo(below.dtype).tiny)
    hazard, depth = density / below, below.log().sum(-1)
    if far is None:
        p = torch.bmm((depth.softmax(-1) * speed).unsqueeze(1), hazard).squeeze(1)
        return p / p.sum(1, keepdim=True), y, y  # which nobody asks for
    decay = (far[0] - y).exp()  # (n, Y): x relative to that at the edge
    once, twice = far[1] * decay, far[2] * decay.square()
    weights = (depth - once + twice / 2).softmax(-1) * speed
    each = weights / (weights * (hazard.sum(-1) + (once - twice).clamp(min=0))).sum(1, keepdim=True)
    p = torch.bmm(each.unsqueeze(1), hazard).squeeze(1)
    return p, (each * decay).sum(1, keepdim=True), (each * decay.square()).sum(1, keepdim=True)


def _points(
    f: Tensor, u: Tensor, far: tuple[Tensor, Tensor, Tensor] | None, known: _Constants
) -> tuple[Tensor, Tensor]:  # (n, C), (n, C) -> (n, Y), (n, Y)
    """Return the points y and dy/dt.

    They lie between two bounds: what the best class alone almost surely exceeds, and what none exceeds, by the normal
    or the exponential tail of its distribution. How fast the integrand rises on its left is the distance of the first
    bound from the next one, with one standard deviation less. It is at most a ninth of the whole, so dy/dt > 0.
    """
    bounds = torch.addcmul(f, (u + known.further).sqrt(), known.times).amax(2)  # (3, n)
    if far is not None:
        low, inner, high = bounds.split(1)
        reach = far[0] + _log(far[1]) + math.log(1 / _RIGHT)
        bounds = torch.cat([low, inner, torch.maximum(high, reach.T)])
    y, speed = (bounds.T @ known.grid).split(POINTS, 1)
    return y, speed


def _distribution(a: Tensor, u: Tensor, known: _Constants) -> tuple[Tensor, Tensor]:  # (n, Y, C), (n, 1, C)
    """Return F and F' at a = m - y, from whichever of the two forms is accurate at u, or from both."""
    if not is_traced() and len(u):
        least, most = (end.item() for end in u.detach().aminmax())
        if least >= WIDE:
            return _by_mixture(a, u, known)
        if most <= NARROW:
            return _by_nodes(a, u, known)
    share = ((u - NARROW) / (WIDE - NARROW)).clamp(0, 1)
    (below, density), (narrow_below, narrow_density) = _by_mixture(a, u, known), _by_nodes(a, u, known)
    if is_traced():  # recorded, one `lerp` becomes seven operations
        rest = 1 - share
        return rest * narrow_below + share * below, rest * narrow_density + share * density
    return torch.lerp(narrow_below, below, share), torch.lerp(narrow_density, density, share)


def _by_mixture(a: Tensor, u: Tensor, known: _Constants) -> tuple[Tensor, Tensor]:
    scale = torch.add(known.variances, u, alpha=2).rsqrt()  # (6, n, 1, C)
    z = ((a - known.means) * scale).clamp(-OUTER, OUTER)
    below = _summed(known.below, torch.erfc(z))
    density = _summed(known.density, (z * -z).exp() * scale)
    # Jensen's bound, e^(a + u/2) exp(-e^(a + 3u/2)): sharp far below y, where the mixture's tail falls too fast
    bound = torch.add(a, u, alpha=0.5) - torch.add(a, u, alpha=1.5).clamp(max=HIGH).exp()
    return below, torch.maximum(density, bound.exp())


def _by_nodes(a: Tensor, u: Tensor, known: _Constants) -> tuple[Tensor, Tensor]:
    spread = u.clamp(torch.finfo(u.dtype).tiny, WIDE).sqrt()  # whose derivative is finite at u = 0
    x = (a.clamp(max=HIGH) + spread * known.nodes).exp()  # (7, n, Y, C)
    each = (-x).exp()
    return _summed(known.node_weights, each), _summed(known.node_weights, each * x)


def _summed(weights: Tensor, terms: Tensor) -> Tensor:  # (1, k), (k, n, Y, C) -> (n, Y, C)
    return torch.mm(weights, terms.flatten(1)).view(terms.shape[1:])


def _lowest(f: Tensor, u: Tensor) -> Tensor:  # (n, C), (n, C) -> (n, 1)
    """Return a bound below which the largest of all does not lie: that of the best class alone."""
    return torch.sub(f, (u + LEFT_VARIANCE).sqrt(), alpha=LEFT).amax(1, keepdim=True)


def _log(x: Tensor) -> Tensor:
    return x.clamp(min=torch.finfo(x.dtype).tiny).log()
