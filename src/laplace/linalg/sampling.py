"""Draw random numbers that do not depend on how the data was cut into batches, or dealt out over processes.

In a fit, the numbers of an example are a hash of a seed and of the example's place in the data (`Keyed`), so that it
has the same ones in whatever batch, and on whatever process. From a plain generator they are drawn as integers, example
by example. (`torch.randn` draws in blocks.) Draws of outputs are cheaper: all examples share the same quasi-random
numbers, which cover the Gaussian more evenly than independent ones would.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import lru_cache

import torch
from torch import Tensor

_STEPS = 2**31
_BITS = 32  # random signs from one hash
_EVEN = 128  # dimensions at most
_KEPT = 2**16  # most numbers that are kept for the next call


@dataclass(frozen=True)
class Draws:
    """Says how many draws of outputs to make, and from which generator (None: torch's global one).

    Attributes:
        n: How many draws, S.
        generator: The only source of randomness.
        apart: Whether each example has numbers of its own, so that draws at different inputs are independent.
            Otherwise all share the same S points, whichever part of the data they are in.
    """

    n: int
    generator: torch.Generator | None = None
    apart: bool = False
    _points: dict[int, Tensor] = field(default_factory=dict, init=False, repr=False, compare=False)

    def shared_normals(self, c: int, like: Tensor) -> Tensor:  # (c, S)
        """Return the standard normal numbers of c outputs that all examples share. They are drawn once."""
        if c not in self._points:
            self._points[c] = _spread_normals(self.n, c, like, self.generator).mT.contiguous()
        return self._points[c].to(like)

    def seeded(self, device: torch.device) -> Draws:
        """Return draws that are the same in every call: from the generator if there is one, else from seed 0."""
        if self.generator is not None:
            return self
        return SeededDraws(self.n, torch.Generator(device).manual_seed(0), self.apart)


@dataclass(frozen=True)
class SeededDraws(Draws):
    """Draws from seed 0. Numbers that all examples share are the same in every call, and are kept if they are few."""

    def shared_normals(self, c: int, like: Tensor) -> Tensor:  # (c, S)
        if self.n * c > _KEPT:
            return super().shared_normals(c, like)
        return _kept_normals(self.n, c, like.device).to(like)


@lru_cache(maxsize=16)
def _kept_normals(n: int, c: int, device: torch.device) -> Tensor:  # (c, n)
    generator = torch.Generator(device).manual_seed(0)
    with torch.inference_mode(False):  # whose tensors autograd could not use later
        return _spread_normals(n, c, torch.empty(0, device=device), generator).mT.contiguous()


class Keyed(torch.Generator):
    """Gives each row of a batch random numbers that depend on nothing but a seed and the row's key.

    It is a generator, too, for draws that are not made here (a likelihood of the user's). Those depend on the batch.

    Args:
        seed: of a fit.
        rows: one key for each row, (n,) integers.
    """

    rows: Tensor

    def __new__(cls, seed: int, rows: Tensor) -> Keyed:
        """Make a generator on the CPU."""
        return super().__new__(cls)

    def __init__(self, seed: int, rows: Tensor) -> None:
        self.rows = mixed(_mixed_number(seed) + rows)
        self.manual_seed(int(self.rows[0]) & (2**62 - 1) if len(rows) else seed)

    def hashes(self, count: int, device: torch.device) -> Tensor:  # (n, count)
        """Return random integers of 64 bits for every row."""
        steps = torch.arange(1, count + 1, device=device) * _GOLDEN
        return mixed(self.rows.to(device).unsqueeze(1) + steps)


_GOLDEN, *_FACTORS = (-0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15)  # of SplitMix64, signed


def mixed(keys: Tensor) -> Tensor:
    """Return a hash of each 64-bit integer (SplitMix64): neighbours have unrelated hashes."""
    keys = keys ^ _shifted(keys, 30)
    keys = keys.mul_(_FACTORS[0])
    keys = keys.bitwise_xor_(_shifted(keys, 27)).mul_(_FACTORS[1])
    return keys.bitwise_xor_(_shifted(keys, 31))


def _shifted(keys: Tensor, bits: int) -> Tensor:
    """Return keys >> bits of unsigned integers, which torch does not have."""
    return (keys >> bits).bitwise_and_((1 << (64 - bits)) - 1)


@lru_cache(maxsize=16)
def _mixed_number(seed: int) -> int:
    """Return the hash of one integer. It is the same for all batches of a fit."""
    return int(mixed(torch.tensor(seed)))


def rows_keyed(
    places: Tensor,  # (n,), of examples
    of: Tensor | None,  # (M,), the example of each row, ascending; None if each example has one row
) -> Tensor:  # (n,) or (M,)
    """Return the key of each row: the place of its example, and which of the example's rows it is."""
    if of is None:
        return places
    of = of.cpu()
    first = torch.searchsorted(of, of)  # of each row's example
    return mixed(places[of]) + torch.arange(len(of)) - first


def seed_from(generator: torch.Generator | None, below: int = _STEPS) -> int:
    """Draw a seed for another generator, on the device of the given one."""
    device = None if generator is None else generator.device  # torch's default device may be another
    return int(torch.randint(below, (), generator=generator, device=device))


def signs(n: int, k: int, c: int, like: Tensor, generator: torch.Generator | None) -> Tensor:
    """Return Rademacher signs, (k, n, c)."""
    if isinstance(generator, Keyed):
        places = torch.arange(min(_BITS, k * c), device=like.device)
        words = generator.hashes(-(-k * c // _BITS), like.device).unsqueeze(2) >> places
        bits = (words & 1).flatten(1)[:, : k * c].unflatten(1, (k, c))
    else:
        bits = torch.randint(2, (n, k, c), generator=generator, device=_device(like, generator))
    return bits.to(like).mul_(2).sub_(1).transpose(0, 1)


def uniforms(n: int, k: int, c: int, like: Tensor, generator: torch.Generator | None) -> Tensor:
    """Return uniform numbers strictly between 0 and 1 in float64, (k, n, c)."""
    if isinstance(generator, Keyed):
        steps = (generator.hashes(k * c, like.device) & (_STEPS - 1)).unflatten(1, (k, c))
    else:
        steps = torch.randint(_STEPS, (n, k, c), generator=generator, device=_device(like, generator))
    return ((steps.double() + 0.5) / _STEPS).to(like.device).transpose(0, 1)


def normals_by_example(n: int, k: int, c: int, like: Tensor, generator: torch.Generator | None) -> Tensor:
    """Return standard normal numbers for the outputs of each example, (k, n, c)."""
    return (math.sqrt(2) * torch.erfinv(2 * uniforms(n, k, c, like, generator) - 1)).to(like.dtype)


def _spread_normals(n: int, c: int, like: Tensor, generator: torch.Generator | None) -> Tensor:  # (n, c)
    """Return n standard normal points: a scrambled Sobol sequence through the quantile function.

    In more than `_EVEN` dimensions they are independent: so few Sobol points are no more even there, and cost more.
    """
    device = _device(like, generator)
    if c > _EVEN:
        return torch.randn(n, c, generator=generator, dtype=torch.float64, device=device).to(like.device)
    seed = int(torch.randint(_STEPS, (), generator=generator, device=device))
    points = torch.quasirandom.SobolEngine(c, scramble=True, seed=seed).draw(n, dtype=torch.float64)
    return torch.special.ndtri(points.clamp(0.25 / _STEPS, 1 - 0.25 / _STEPS)).to(like.device)


def normals(n: int, p: int, like: Tensor, generator: torch.Generator | None) -> Tensor:
    """Return standard normal numbers for n draws of p weights, drawn one after the other, (n, p)."""
    device = _device(like, generator)
    rows = [torch.randn(p, generator=generator, dtype=like.dtype, device=device) for _ in range(n)]
    return torch.stack(rows).to(like.device)


def _device(like: Tensor, generator: torch.Generator | None) -> torch.device:
    return like.device if generator is None else generator.device
