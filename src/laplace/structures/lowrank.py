"""Keep the largest eigenpairs of the curvature of all weights together, H ~ U diag(l) U^T. H itself is never formed.

Block Krylov iteration finds the eigenpairs. Each run over the data multiplies one block of vectors by H. The runs stop
when the residuals of the kept pairs are small.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from laplace.backprop.gradients import Moments
from laplace.checks import whole_number
from laplace.errors import OptionError
from laplace.linalg.krylov import Krylov, Ritz, start, vectors
from laplace.linalg.symmetric import EIGH
from laplace.structures.base import Contribution, Forms, Pass, Structure, Sums
from laplace.structures.lowrank_gaussian import LowRankCurvature
from laplace.weights.layout import Layout

RANK = 20  # the default if neither rank nor tol is given
DIRECT = 256  # up to so many weights, one run multiplies H by all unit vectors
MOST_PASSES = 30
_USUAL = 4  # runs over the data that a fit usually takes, for `laplace.plan`
_BLOCKS = 6  # the basis is restarted when it has so many blocks
_SMALL = {torch.float64: 1e-6, torch.float32: 1e-5}  # tolerance: residual / largest eigenvalue


class LowRank(Structure):
    """Keeps the largest eigenpairs of all weights together.

    Args:
        rank: how many pairs to keep. Pairs whose eigenvalue equals the last one are kept, too. None means 20.
        tol: given instead of `rank`, keeps all eigenvalues above `tol` times the largest.

    Raises:
        OptionError: a value is outside its range, or both are given.
    """

    name = "lowrank"
    scattered = True
    options = ("rank", "tol")
    passes = 2
    forms = Forms(
        whole=tuple(
            {"vectors": "rP", "values": "r", "residuals": "r", "passes": "", "negative": "", "lowest": "", "cut": ""}
            | t
            for t in ({"trace": ""}, {})
        ),
        counts=("passes", "negative"),
    )

    def __init__(self, rank: int | float | None = None, tol: float | None = None) -> None:
        if rank is not None and tol is not None:
            raise OptionError(f"rank={rank!r} and tol={tol!r}: give only one, a number of eigenvalues or a share.")
        if tol is not None and not (isinstance(tol, float) and 0 < tol < 1):
            raise OptionError(
                f"tol={tol!r} must lie between 0 and 1: eigenvalues above tol times the largest are kept."
            )
        self.rank = None if rank is None else whole_number(rank, "rank")
        self.tol = tol
        self._start: Tensor | None = None  # one start for all batches of the first run

    def spectrum(self, sums: Sums) -> Spectrum:
        return Spectrum.of(sums)

    def check(self, layout: Layout) -> None:
        size = layout.n_params
        if self.rank is not None and self.rank > size:
            raise OptionError(f"rank={self.rank} is more than the {size} uncertain weights. Give rank= at most {size}.")

    def sums(self, moments: Moments, layout: Layout) -> Contribution:
        size = layout.n_params
        if self._start is None or self._start.shape[1] != size:
            self._start = start(self._block(size), size)
        sums: Contribution = {"product": moments.products(self._start)}
        trace = moments.trace()
        return sums if trace is None else sums | {"trace": trace}

    def finish(self, before: Sums, found: Sums) -> Sums:
        product = found.pop("product")
        first, self._start = self._start, None
        if first is None:  # the fit was interrupted after its last batch
            first = start(*product.shape)
        return self._after(Krylov.begun(first.to(product)), product, found)

    def work(self, moments: Moments, layout: Layout, vectors: int) -> tuple[float, float]:
        size = layout.n_params
        used = sum(m.positions * m.weights for m in moments.parameters)
        block = self._block(size)
        if block == size:  # one block of products gives all of H
            return 2.0 * size * used, EIGH * size**3
        return _USUAL * 2.0 * block * used, 2.0 * _USUAL * size * (_BLOCKS * block) ** 2

    def runs(self, layout: Layout, n_data: int) -> tuple[float, float]:
        usual = 1 if self._block(layout.n_params) == layout.n_params else _USUAL
        return usual, usual

    def further(self, sums: Sums, layout: Layout, dtype: torch.dtype) -> Pass | None:
        return None if "vectors" in sums else _Multiplied(sums, self)

    def advanced(self, before: Sums, product: Tensor) -> Sums:
        """Return the sums after one more block of products with H."""
        state = dict(before)
        krylov = Krylov(*(state.pop(key) for key in ("basis", "projected", "block")))
        return self._after(krylov, product, state)

    def _after(self, krylov: Krylov, product: Tensor, others: Sums) -> Sums:
        krylov, ritz = krylov.grown(product)
        others = others | self._counted(ritz, others)
        small = _SMALL[product.dtype]
        wanted = self._wanted(ritz.values, 10 * small, 10 * torch.finfo(product.dtype).eps)
        far = bool((ritz.residuals[:wanted] > small * ritz.values.abs().max()).any())
        far |= self.tol is not None and wanted == len(ritz.values)
        if len(krylov.block) and far and int(others["passes"]) < MOST_PASSES:
            width = max(len(product), len(krylov.block))
            if len(krylov.basis) >= max(_BLOCKS * width, 2 * wanted):
                krylov = krylov.restarted(ritz, max(width, wanted + width // 3))
            self._require_room(krylov, wanted)
            return others | {"basis": krylov.basis, "projected": krylov.projected, "block": krylov.block}
        found = {"vectors": vectors(krylov, ritz, wanted), "values": ritz.values[:wanted]}
        found |= {"residuals": ritz.residuals[:wanted], "cut": ritz.values[wanted : wanted + 1].clamp(min=0).sum()}
        if len(krylov.basis) == krylov.basis.shape[1]:
            found["trace"] = ritz.values.sum()
        return others | found

    def _require_room(self, krylov: Krylov, wanted: int) -> None:
        """Refuse a basis that does not fit into memory. With `tol`, its size is known only as pairs are found."""
        (basis, size), block = krylov.basis.shape, len(krylov.block)
        self.budget.require(
            _growth(basis, block, size, krylov.basis.element_size()),
            krylov.basis.device,
            f"hessian_structure='lowrank' with {wanted:,} eigenpairs of {size:,} weights so far",
            "Give a larger tol=, or a rank=.",
        )

    def _counted(self, ritz: Ritz, others: Sums) -> Sums:
        """Return the number of runs so far, and the negative eigenvalues seen in any of them."""
        values = ritz.values
        negative = values < -1e-9 * values.abs().max() if not self.semidefinite else values < -torch.inf
        count, lowest = negative.sum(), (values * negative).min()
        if "passes" not in others:
            return {"passes": torch.ones_like(count), "negative": count, "lowest": lowest}
        count, lowest = torch.maximum(count, others["negative"]), torch.minimum(lowest, others["lowest"])
        return {"passes": others["passes"] + 1, "negative": count, "lowest": lowest}

    def _wanted(self, values: Tensor, close: float, rounding: float) -> int:
        """Return how many pairs to keep. Pairs that are zero up to rounding are not kept."""
        positive = values[values > torch.maximum(rounding * values.abs().max(), (self.tol or 0.0) * values[0])]
        if self.tol is not None or len(positive) <= (self.rank or RANK):
            return len(positive)
        last = positive[(self.rank or RANK) - 1]
        return int((positive > (1 - close) * last).sum())  # keep equal ones together: a choice would be arbitrary

    def _block(self, size: int) -> int:
        """Return how many vectors one run multiplies: 1.5 times the rank, or all unit vectors of a small network."""
        rank = self.rank or RANK
        block = rank + max(10, rank // 2)
        return size if size <= max(DIRECT, _BLOCKS * block) else block

    def memory(self, moments: Moments, layout: Layout, itemsize: int) -> int:
        size = layout.n_params
        block = self._block(size)
        return _growth(0 if block == size else _BLOCKS * block, block, size, itemsize)

    def form(self, own: Sums, whole: Sums) -> str:
        return f"lowrank {len(whole['vectors'])}"

    def notes(self, sums: Sums) -> Iterator[str]:
        spectrum = Spectrum.of(sums)
        if spectrum.negative:
            yield (
                f"lowrank dropped {spectrum.negative} negative eigenvalues of the Hessian, the lowest "
                f"{spectrum.lowest:.3g}: the weights are not at a minimum of the loss. See la.spectrum."
            )
        far = spectrum.residuals > _SMALL[sums["vectors"].dtype] * spectrum.eigenvalues[:1]
        if spectrum.passes >= MOST_PASSES and (far.any() or (self.tol is not None and spectrum.cut == 0)):
            yield (
                f"lowrank had not converged after {spectrum.passes} runs over the data: |H u - l u| is up to "
                f"{float(spectrum.residuals.max()):.3g}. See la.spectrum; another rank= or tol= may converge faster."
            )

    def curvature(self, sums: Sums, layout: Layout, dtype: torch.dtype) -> LowRankCurvature:
        return LowRankCurvature(sums["vectors"].to(dtype), sums["values"].to(dtype), layout, self.budget)


def _growth(basis: int, block: int, size: int, itemsize: int) -> int:
    """Return the bytes needed to add a block to the basis: both bases, the product and its parts, the projection."""
    return (2 * basis + 7 * block) * size * itemsize + 5 * 8 * (basis + block) ** 2


class _Multiplied(Pass):
    """Multiplies one more block by H in one run over the data."""

    def __init__(self, before: Sums, structure: LowRank) -> None:
        self.block, self.structure = before["block"], structure

    def sums(self, moments: Moments, layout: Layout) -> Contribution:
        return {"product": moments.products(self.block)}

    def finish(self, before: Sums, found: Sums) -> Sums:
        return self.structure.advanced(before, found["product"])


@dataclass(frozen=True)
class Spectrum:
    """Reports which eigenvalues of the curvature at unit noise hessian_structure='lowrank' kept and dropped.

    Attributes:
        eigenvalues: the kept eigenvalues, (R,), in descending order.
        residuals: |H u - l u| of each pair, (R,).
        cut: an estimate of the largest eigenvalue that was not kept.
        trace: the trace of H. None for an exact Hessian, whose trace would take one product per weight.
        negative: how many negative eigenvalues of an exact Hessian were seen and dropped.
        lowest: the most negative of them.
        passes: the number of runs over the data.
    """

    eigenvalues: Tensor
    residuals: Tensor
    cut: float
    trace: float | None
    negative: int
    lowest: float
    passes: int

    @classmethod
    def of(cls, sums: Sums) -> Spectrum:
        """Read the spectrum from the sums of a fit."""
        trace = float(sums["trace"]) if "trace" in sums else None
        numbers = (int(sums["negative"]), float(sums["lowest"]), int(sums["passes"]))
        return cls(sums["values"].clone(), sums["residuals"].clone(), float(sums["cut"]), trace, *numbers)

    @property
    def share(self) -> float | None:
        """Return the share of the trace that the kept eigenvalues have. None if the trace is unknown."""
        if self.trace is None:
            return None
        return float(self.eigenvalues.sum()) / self.trace if self.trace else 1.0

    def __repr__(self) -> str:
        values, n = self.eigenvalues, len(self.eigenvalues)
        kept = f"{n}, from {float(values[0]):.4g} to {float(values[-1]):.4g}" if n else "none: the curvature is zero"
        whole = "unknown" if self.trace is None else f"{self.trace:.4g}, of which {self.share:.1%} are kept"
        rows = [("kept", kept), ("largest cut", f"{self.cut:.4g}"), ("trace", whole)]
        if n:
            rows.append(("residuals", f"up to {float(self.residuals.max()):.1e}"))
        if self.negative:
            rows.append(("negative", f"{self.negative} dropped, the lowest {self.lowest:.4g}"))
        rows.append(("runs", f"{self.passes} over the data"))
        return "Spectrum(\n" + "".join(f"  {key:<12}{value}\n" for key, value in rows) + ")"
