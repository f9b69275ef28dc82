"""Counts with an uncertain rate: y ~ Poisson(exp(u)) with u ~ N(f, S), or with u one of several draws.

    p(y) = int exp(y u - e^u) / y!  N(u; f, S) du

has no closed form, but its integrand always has the same shape: at distance d from its mode u*, with lambda = exp(u*),
it has fallen by the factor exp(-lambda (e^d - 1 - d) - d^2 / 2S). Nodes are placed where that is above rounding, as
close together as the trapezoidal rule needs; its error falls exponentially for such functions. Everything is computed
in float64. For rates from 1e-3 to 1e6 and S from 1e-8 to 25, log p is off by less than 1e-8 at every y in reach of the
distribution, and P(y <= k) by less than 1e-10.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributions import Distribution, constraints

_DEPTH = 36.0  # the integrand is cut off this many nats below its mode
_ACCURACY = 30.0  # the error of the rule is this many nats below the integral
_WIDE = 16.0  # from this S on, P(y = 0) is integrated over the Poisson part instead: the Gaussian is wide
_LEAST = 1e-60  # stands in for S = 0
_STIRLING = 16  # from this count on, log y! is computed by its series
_LARGEST = 1e15  # the largest rate at which torch can draw counts
_CHUNK = 2**12  # integrals at a time


class UncertainCounts(Distribution):
    """Derives cdf and quantiles of the two distributions of counts from P(y <= k) and P(y > k)."""

    @property
    def support(self) -> Any:
        """Return the support: whole numbers from 0 on."""
        return constraints.nonnegative_integer

    @abstractmethod
    def _tails(self, k: Tensor) -> tuple[Tensor, Tensor]:
        """Return P(y <= k) and P(y > k) in float64, for whole k >= 0."""

    @abstractmethod
    def _start(self) -> Tensor:
        """Return a rough upper bound on y in float64, where the search for quantiles starts."""

    def cdf(self, value: Tensor) -> Tensor:
        """Return P(y <= value)."""
        return self._tail(value, 0)

    def survival(self, value: Tensor) -> Tensor:
        """Return P(y > value). Precise even where it is small, unlike 1 - cdf."""
        return self._tail(value, 1)

    @torch.no_grad()
    def icdf(self, value: Tensor) -> Tensor:
        """Return the smallest k with P(y <= k) >= value, by bisection; beyond 2^52 to a relative 1e-15."""
        q = torch.as_tensor(value, dtype=torch.float64, device=self.mean.device)
        if self._validate_args and not ((q >= 0) & (q <= 1)).all():
            raise ValueError("The value argument must be within [0, 1].")
        q, high = torch.broadcast_tensors(q, self._start())
        high, low = high.ceil().clone(), torch.full_like(high, -1)
        while (short := ~self._reached(high, q) & (high < 1e300)).any():
            high = torch.where(short, 2 * high + 1, high)
        while (wide := high - low > (high * 1e-15).clamp(min=1)).any():
            middle = ((low + high) / 2).floor()
            enough = self._reached(middle, q)
            low, high = torch.where(wide & ~enough, middle, low), torch.where(wide & enough, middle, high)
        return high.masked_fill(q >= 1, math.inf).to(self.mean.dtype)

    def _reached(self, k: Tensor, q: Tensor) -> Tensor:
        lower, upper = self._tails(k.clamp(min=0))
        return torch.where(q > 0.5, upper <= 1 - q, lower >= q) & (k >= 0)

    def _tail(self, value: Tensor, which: int) -> Tensor:
        k = torch.as_tensor(value, device=self.mean.device).double().floor()
        found = self._tails(k.clamp(min=0))[which]
        return torch.where(k < 0, float(which), found).to(self.mean.dtype)


class PoissonLogNormal(UncertainCounts):
    """Describes y ~ Poisson(exp(u)), u ~ N(log_rate, log_rate_variance).

    The log-probability can be differentiated once, with respect to either parameter.
    """

    @property
    def arg_constraints(self) -> dict[str, Any]:
        """Return the constraint of each parameter."""
        return {"log_rate": constraints.real, "log_rate_variance": constraints.nonnegative}

    def __init__(self, log_rate: Tensor, log_rate_variance: Tensor, validate_args: bool | None = None) -> None:
        self.log_rate, self.log_rate_variance = torch.broadcast_tensors(log_rate, log_rate_variance)
        super().__init__(self.log_rate.shape, validate_args=validate_args)

    @property
    def mean(self) -> Tensor:
        """Return exp(f + S/2)."""
        return (self.log_rate + self.log_rate_variance / 2).exp()

    @property
    def variance(self) -> Tensor:
        """Return m + m^2 (exp(S) - 1), where m is the mean."""
        return self.mean + self.mean * (self.mean * torch.expm1(self.log_rate_variance))

    def log_prob(self, value: Tensor) -> Tensor:
        """Return log p(y)."""
        if self._validate_args:
            self._validate_sample(value)
        parameters = (self.log_rate.double(), self.log_rate_variance.double())
        y, f, s = torch.broadcast_tensors(torch.as_tensor(value).to(self.log_rate.device).double(), *parameters)
        result: Any = _LogProb.apply(y, f, s)
        return result.to(self.log_rate.dtype)

    @torch.no_grad()
    def sample(self, sample_shape: Any = ()) -> Tensor:
        """Draw counts with torch's global generator."""
        shape = self._extended_shape(sample_shape)
        f, s = self.log_rate.double().expand(shape), self.log_rate_variance.double().sqrt().expand(shape)
        return _counts((f + s * torch.randn_like(f)).exp()).to(self.log_rate.dtype)

    def _start(self) -> Tensor:
        rate = (self.log_rate.double() + 6 * self.log_rate_variance.double().sqrt()).exp()
        return (rate + 10 * rate.sqrt() + 40).clamp(max=1e300)

    def _tails(self, k: Tensor) -> tuple[Tensor, Tensor]:
        k, f, s = torch.broadcast_tensors(k, self.log_rate.double(), self.log_rate_variance.double())
        parts = zip(*(t.reshape(-1).split(_CHUNK) for t in (k, f, s)), strict=True)
        lower, upper = zip(*(_log_tails(*part) for part in parts), strict=True)
        return torch.cat(lower).exp().reshape(k.shape), torch.cat(upper).exp().reshape(k.shape)


class PoissonMixture(UncertainCounts):
    """Describes y ~ Poisson(exp(u)), where u is one of (..., S) log-rates, each equally likely."""

    @property
    def arg_constraints(self) -> dict[str, Any]:
        """Return the constraint of each parameter."""
        return {"log_rates": constraints.independent(constraints.real, 1)}

    def __init__(self, log_rates: Tensor, validate_args: bool | None = None) -> None:
        self.log_rates = log_rates
        super().__init__(log_rates.shape[:-1], validate_args=validate_args)

    @property
    def mean(self) -> Tensor:
        """Return the mean of the rates."""
        return self.log_rates.exp().mean(-1)

    @property
    def variance(self) -> Tensor:
        """Return the variance of the rates plus their mean."""
        return self.mean + self.log_rates.exp().var(-1, correction=0)

    def log_prob(self, value: Tensor) -> Tensor:
        """Return log p(y)."""
        if self._validate_args:
            self._validate_sample(value)
        y, u = torch.as_tensor(value).to(self.log_rates.device).double().unsqueeze(-1), self.log_rates.double()
        each = y * u - u.exp()
        result = each.logsumexp(-1) - math.log(u.shape[-1]) - torch.lgamma(y + 1).squeeze(-1)
        return result.to(self.log_rates.dtype)

    @torch.no_grad()
    def sample(self, sample_shape: Any = ()) -> Tensor:
        """Draw counts with torch's global generator."""
        shape = self._extended_shape(sample_shape)
        n = self.log_rates.shape[-1]
        which = torch.randint(n, (*shape, 1), device=self.log_rates.device)
        drawn = self.log_rates.double().expand(*shape, n).gather(-1, which).squeeze(-1)
        return _counts(drawn.exp()).to(self.log_rates.dtype)

    def _start(self) -> Tensor:
        rate = self.log_rates.double().amax(-1).exp()
        return (rate + 10 * rate.sqrt() + 40).clamp(max=1e300)

    def _tails(self, k: Tensor) -> tuple[Tensor, Tensor]:
        a, rates = torch.broadcast_tensors(k.unsqueeze(-1) + 1, self.log_rates.double().exp())
        return torch.special.gammaincc(a, rates).mean(-1), torch.special.gammainc(a, rates).mean(-1)


class PoissonLogNormalMixture(UncertainCounts):
    """Describes y ~ Poisson(exp(u)), where u is drawn from one of K Gaussians by their weights. All are (..., K)."""

    @property
    def arg_constraints(self) -> dict[str, Any]:
        """Return the constraint of each parameter."""
        return {
            "log_rates": constraints.independent(constraints.real, 1),
            "log_rate_variances": constraints.independent(constraints.nonnegative, 1),
            "weights": constraints.independent(constraints.nonnegative, 1),
        }

    def __init__(
        self, log_rates: Tensor, log_rate_variances: Tensor, weights: Tensor, validate_args: bool | None = None
    ) -> None:
        self.log_rates, self.log_rate_variances, self.weights = log_rates, log_rate_variances, weights
        super().__init__(log_rates.shape[:-1], validate_args=validate_args)

    @property
    def mean(self) -> Tensor:
        """Return the mean of the rates."""
        return (self.weights * self._each.mean).sum(-1)

    @property
    def variance(self) -> Tensor:
        """Return the variance of y, within the Gaussians and between them."""
        off = self._each.mean - self.mean.unsqueeze(-1)
        return (self.weights * (self._each.variance + off.square())).sum(-1)

    def log_prob(self, value: Tensor) -> Tensor:
        """Return log p(y)."""
        if self._validate_args:
            self._validate_sample(value)
        each = self._each.log_prob(torch.as_tensor(value).unsqueeze(-1)).double()
        return (each + self.weights.double().log()).logsumexp(-1).to(self.log_rates.dtype)

    @torch.no_grad()
    def sample(self, sample_shape: Any = ()) -> Tensor:
        """Draw counts with torch's global generator."""
        shape = self._extended_shape(sample_shape)
        p = self.weights.expand(*shape, -1)
        which = torch.multinomial(p.flatten(0, -2), 1).reshape(*shape, 1)
        pairs = (self.log_rates, self.log_rate_variances)
        f, s = (t.double().expand(*shape, -1).gather(-1, which).squeeze(-1) for t in pairs)
        return _counts((f + s.sqrt() * torch.randn_like(f)).exp()).to(self.log_rates.dtype)

    @property
    def _each(self) -> PoissonLogNormal:
        return PoissonLogNormal(self.log_rates, self.log_rate_variances, validate_args=False)

    def _start(self) -> Tensor:
        return self._each._start().amax(-1)

    def _tails(self, k: Tensor) -> tuple[Tensor, Tensor]:
        lower, upper = self._each._tails(k.unsqueeze(-1))
        w = self.weights.double()
        return (w * lower).sum(-1), (w * upper).sum(-1)


class _LogProb(torch.autograd.Function):
    """Computes log p(y) and its derivatives E[y - e^u] and E[(y - e^u)^2 - e^u] / 2 under the integrand, for any S."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, f: Tensor, s: Tensor) -> Tensor:
        slopes = any(ctx.needs_input_grad[1:])
        chunks = zip(*(t.reshape(-1).split(_CHUNK) for t in (y, f, s)), strict=True)
        parts = [torch.stack(_log_prob(*chunk, slopes=slopes)) for chunk in chunks]
        values = torch.cat(parts, 1) if parts else y.new_zeros(3, 0)
        if slopes:
            ctx.save_for_backward(*(row.reshape(y.shape) for row in values[1:]))
        return values[0].reshape(y.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor, Tensor]:  # type: ignore[override]
        by_f, by_s = ctx.saved_tensors
        return None, grad * by_f, grad * by_s


def _log_prob(y: Tensor, f: Tensor, s: Tensor, slopes: bool) -> tuple[Tensor, ...]:  # (n,) each
    """Return log p(y), and its derivatives with respect to f and S if `slopes`."""
    given, wide = s, (y == 0) & (s > _WIDE)
    s = s.clamp(min=_LEAST).masked_fill(wide, 1.0)  # a wide Gaussian alone would need many nodes
    t = _log_omega(f + s * y + s.log())
    rate = (t - s.log()).exp()  # lambda
    shift = torch.where(s * (y + rate) < 1, s * (y - rate), t - s.log() - f)  # u* - f, without cancellation
    peak = _log_poisson(y, f + shift, rate, shift / s) - shift * (shift / s) / 2
    nodes, step = _nodes(rate, s)
    falls = -rate.unsqueeze(-1) * (torch.expm1(nodes) - nodes) - nodes.square() / (2 * s.unsqueeze(-1))
    weights = falls.exp()
    total = weights.sum(-1)
    value = peak + (step * total / (2 * math.pi * s).sqrt()).log()
    if wide.any():
        value[wide] = _log_tails(y[wide], f[wide], given[wide])[0]
    if not slopes:
        return (value,)
    over = shift.unsqueeze(-1) / s.unsqueeze(-1) - rate.unsqueeze(-1) * torch.expm1(nodes)  # y - e^u
    by_f = (weights * over).sum(-1) / total
    rates = rate.unsqueeze(-1) * nodes.exp()
    by_s = (weights * (over.square() - rates)).sum(-1) / total / 2
    if wide.any():  # e^u p(y given u) is (y + 1) p(y + 1 given u)
        one, two = (_log_prob(y[wide] + k, f[wide], given[wide], False)[0].sub(value[wide]).exp() for k in (1, 2))
        by_f[wide], by_s[wide] = -one, two - one / 2
    return value, by_f, by_s


def _log_tails(k: Tensor, f: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:  # (n,) each
    """Return log P(y <= k) and log P(y > k).

    P(y <= k given u) falls from 1 to 0 around u = log(k + 1), over a distance of 1 / sqrt(k + 1). If the Gaussian is
    narrower than that, P(y <= k given u) is averaged over the Gaussian. If it is wider, the Gaussian's distribution
    function is averaged over minus the derivative of P(y <= k given u), which is the density of the logarithm of a
    gamma variate.
    """
    s = s.clamp(min=_LEAST)
    lower, upper = torch.empty_like(f), torch.empty_like(f)
    narrow = s * (k + 1) < 1
    if narrow.any():
        z = torch.linspace(-9, 9, 37, dtype=f.dtype, device=f.device)
        weights = torch.softmax(-z.square() / 2, 0)
        rates = (f[narrow].unsqueeze(-1) + s[narrow].sqrt().unsqueeze(-1) * z).exp()
        a = (k[narrow] + 1).unsqueeze(-1).expand_as(rates)
        lower[narrow] = (torch.special.gammaincc(a, rates) @ weights).log()
        upper[narrow] = (torch.special.gammainc(a, rates) @ weights).log()
    if not narrow.all():
        a, f, s = k[~narrow] + 1, f[~narrow], s[~narrow]
        nodes, _ = _nodes(a, s, own=False)
        logs = (-a.unsqueeze(-1) * (torch.expm1(nodes) - nodes)).log_softmax(-1)
        z = (nodes + (a.log() - f).unsqueeze(-1)) / s.sqrt().unsqueeze(-1)
        lower[~narrow] = (logs + torch.special.log_ndtr(z)).logsumexp(-1)
        upper[~narrow] = (logs + torch.special.log_ndtr(-z)).logsumexp(-1)
    return lower, upper


def _nodes(rate: Tensor, s: Tensor, own: bool = True) -> tuple[Tensor, Tensor]:  # (n, Q), (n,)
    """Return equally spaced d, (n, Q), and their spacing for exp(-rate (e^d - 1 - d) - d^2 / 2S).

    Without `own`, the term in S is left out.

    On the lines at height h beside the real axis, the integrand grows by exp(-rate log cos h + h^2 / 2S) at most, and
    the error of the trapezoidal rule is exp(-2 pi h / spacing) times that: the spacing follows from the best h.
    """
    precision = 1 / s if own else torch.zeros_like(s)
    depth = _DEPTH if own else 2 * _DEPTH  # leaving out the Gaussian factor moves the mass
    by_gaussian = (2 * depth / precision).sqrt()
    left = torch.minimum(by_gaussian, (depth + (depth**2 + 8 * depth * rate).sqrt()) / (2 * rate))
    ratio = depth / rate
    right = torch.minimum(by_gaussian, torch.log1p(ratio + (2 * ratio).sqrt() + torch.log1p(ratio)))
    for _ in range(4):  # Newton's steps on a convex function, started outside, stay outside
        left = left - _excess(-left, rate, precision, depth)
        right = right - _excess(right, rate, precision, depth)
    height = (2 * _ACCURACY / (rate + 1 / s)).sqrt().clamp(max=1.2)
    growth = -rate * height.cos().log() + height.square() / (2 * s)
    spacing = 2 * math.pi * height / (_ACCURACY + growth)
    n = int(((left + right) / spacing).max().ceil().clamp(min=16)) if len(rate) else 16
    step = (left + right) / n
    return step.unsqueeze(-1) * torch.arange(n + 1, dtype=s.dtype, device=s.device) - left.unsqueeze(-1), step


def _excess(d: Tensor, rate: Tensor, precision: Tensor, depth: float) -> Tensor:
    """Return Newton's step for rate (e^d - 1 - d) + precision d^2 / 2 = depth, towards zero."""
    value = rate * (torch.expm1(d) - d) + precision * d.square() / 2 - depth
    return (value / (rate * torch.expm1(d) + precision * d).abs()).nan_to_num(0.0)


def _log_poisson(y: Tensor, u: Tensor, rate: Tensor, over: Tensor) -> Tensor:
    """Return y u - e^u - log y! with e^u = rate = y - over. For large y, Stirling's series avoids cancellation."""
    large = y.clamp(min=_STIRLING)
    x = (-over / large).clamp(min=-1 + 1e-15)
    stirling = (1 / 12 - (1 / 360 - (1 / 1260 - 1 / (1680 * large**2)) / large**2) / large**2) / large
    above = -large * _x_minus_log1p(x) - (2 * math.pi * large).log() / 2 - stirling
    return torch.where(y < _STIRLING, y * u - rate - torch.lgamma(y + 1), above)


def _x_minus_log1p(x: Tensor) -> Tensor:
    """Return x - log(1 + x) without cancellation: log(1 + x) = 2 artanh(r) with r = x / (2 + x)."""
    r = x / (2 + x)
    square, series = r.square(), torch.zeros_like(r)
    for k in range(21, 1, -2):
        series = series * square + 1 / k
    return torch.where(x.abs() < 0.3, x * r - 2 * r * square * series, x - torch.log1p(x))


def _log_omega(x: Tensor) -> Tensor:
    """Return t with e^t + t = x."""
    t = torch.where(x > 1, x.clamp(min=1).log(), x)
    for _ in range(8):
        e = t.exp()
        t = t - (e + t - x) / (e + 1)
    return t


def _counts(rates: Tensor) -> Tensor:
    """Draw Poisson counts. Rates beyond torch's limit are rounded: in float64 their spread is not visible."""
    return torch.where(rates < _LARGEST, torch.poisson(rates.clamp(max=_LARGEST)), rates.round())
