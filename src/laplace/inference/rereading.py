"""Read the training data again after a fit: products with its curvature, and draws with that covariance."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

import torch
from torch import Tensor

from laplace.backprop.forward_mode import by_moments, by_tangents, may_use_tangents, summed_back
from laplace.backprop.gradients import Forward
from laplace.backprop.network import NetworkForward
from laplace.curvature import CURVATURES, Estimator, OutputCurvature
from laplace.errors import FormChangedError, InputError, UnsupportedError
from laplace.inference.accumulate import Accumulator
from laplace.inference.runner import Runner
from laplace.likelihoods.base import Targets
from laplace.linalg.autocast import plain
from laplace.linalg.sampling import Keyed, normals_by_example, rows_keyed
from laplace.network.batches import Batch
from laplace.network.inputs import Inputs
from laplace.posterior.posterior import Fit

_RESTARTS: Final = 20  # give up on a network that behaves differently in each of so many readings of the data
_SAME: Final = {torch.float64: 1e-8, torch.float32: 1e-3}  # relative difference of sums over the same data
_AGREE: Final = {torch.float64: 1e-6, torch.float32: 1e-2}  # of products in both ways

Work = Callable[[Forward, OutputCurvature, Tensor], Tensor]  # run, Lambda, key of each row -> what to add up


class Rereading:
    """Holds the loader of a fit by reference, and the network at the weights of the fit.

    Products with blocks of vectors are computed in one of two ways, by the engine's gradients or in forward mode. Both
    are timed for each size of a block, and the cheaper one is kept. Forward mode is compared with the engine first.

    Args:
        runner: the network and the user's options.
        loader: what `fit` read.
        fit: the sums of that fit, with which every reading is compared.
        estimator: the curvature that the fit used.
        seed: for the draws of that curvature.

    Raises:
        InputError: the loader can be read only once.
    """

    def __init__(self, runner: Runner, loader: Iterable[Any], fit: Fit, estimator: Estimator, seed: int) -> None:
        if isinstance(loader, Iterator):
            raise InputError(
                f"hessian_structure='matrix_free' reads the training data for every answer, and a "
                f"{type(loader).__name__} can be read once. Give a DataLoader or a list of batches."
            )
        self.runner, self.loader, self.fit, self.estimator, self.seed = runner, loader, fit, estimator, seed
        self._seconds: dict[tuple[int, str], float] = {}  # for an example, by the size of the block and the way
        self._tangents: bool | None = None  # whether forward mode agrees with the engine; None before it was tried
        self._order: list[float] | None = None  # a mark of each batch, in the order of the first reading

    @classmethod
    def of(cls, runner: Runner, loader: Iterable[Any], fit: Fit, estimator: Estimator | None = None) -> Rereading:
        """Return the data of a fit, whose estimator it may have chosen itself."""
        asked = runner.spec.curvature if estimator is None else estimator
        known = asked if asked is not None and asked.name == fit.kind else CURVATURES[fit.kind]()
        return cls(runner, loader, fit, known, getattr(fit.structure, "seed", 0))

    def products(self, vectors: Tensor) -> Tensor:  # (S, P) -> (S, P)
        """Return H times each vector."""

        def multiply(forward: Forward, curvature: OutputCurvature, keys: Tensor) -> Tensor:
            way = self._way(forward, curvature, len(vectors))
            start = time.process_time()
            if way == "tangents" and isinstance(forward, NetworkForward):
                found = by_tangents(forward, curvature, vectors)
            else:
                found = by_moments(forward, curvature, vectors)
            seconds = (time.process_time() - start) / max(1, len(forward.outputs))
            size = _size(len(vectors)), way
            self._seconds[size] = min(seconds, self._seconds.get(size, seconds))
            return found

        return self._summed(multiply)

    def noise(self, n: int, seed: int) -> Tensor:  # (n, P)
        """Return the sum over the data of J^T L e with standard normal e: n draws of N(0, H)."""

        def draw(forward: Forward, curvature: OutputCurvature, keys: Tensor) -> Tensor:
            root = forward.vectors(curvature)
            rows = root[0:1].shape[1]
            eps = normals_by_example(len(keys), n, len(root), forward.outputs, Keyed(seed, keys))  # (n, N, K)
            v = forward.outputs.new_zeros(n, rows, forward.outputs.shape[1])
            for k in range(len(root)):
                own = eps[..., k].repeat_interleave(rows // len(keys), 1)  # a row for each position
                v += own.unsqueeze(-1) * root[k : k + 1]
            return summed_back(forward, v)

        return self._summed(draw)

    def _way(self, forward: Forward, curvature: OutputCurvature, count: int) -> str:
        """Return how to multiply: the way that was not timed yet for such blocks, or else the cheaper one."""
        if self._tangents is False or not may_use_tangents(forward, curvature):
            return "moments"
        if self._tangents is None:
            assert isinstance(forward, NetworkForward)
            self._tangents = _agree(forward, curvature, self.fit.layout.n_params)
            if not self._tangents:
                return "moments"
        size = _size(count)
        return min(("moments", "tangents"), key=lambda way: self._seconds.get((size, way), 0.0))

    def _summed(self, work: Work) -> Tensor:
        """Read the data once, and add up what `work` makes of each batch."""
        runner, fit = self.runner, self.fit
        if changed := runner.changed(fit.mean):
            raise UnsupportedError(
                f"{changed} since fit, and hessian_structure='matrix_free' reads the data at the weights of the fit. "
                "Call la.fit again, or put the old weights back."
            )
        weights = runner.weights
        assert weights is not None
        engine = runner.engine(weights, runner.plan)
        spec = runner.spec
        parts = (spec.likelihood, fit.structure, fit.layout, self.estimator, None, spec.budget)
        for _ in range(_RESTARTS):
            reading = _Reading(work, self.seed, engine, *parts)
            try:
                with plain(), torch.no_grad():
                    reading.read(runner.batches(self.loader, False, "training data"), marked=self.estimator.draws)
                break
            except FormChangedError:  # a batch showed more of the network: read again with that knowledge
                continue
        else:
            raise InputError(
                "the network uses its weights in another way each time that the training data is read. Remove what "
                "varies between calls (a random number, a counter) from its forward, or take another "
                "hessian_structure, such as 'kron' or 'full', which reads the data in fit only."
            )
        runner.plan = engine.plan
        self._require_same(reading)
        assert reading.total is not None
        return reading.total

    def _require_same(self, reading: _Reading) -> None:
        """Refuse data that is not what the fit has read, by its number of examples and its log-likelihood."""
        fit = self.fit
        if reading.n_data != fit.n_data:
            raise InputError(
                f"the training data has {reading.n_data} examples; the fit has read {fit.n_data}. "
                "hessian_structure='matrix_free' needs the same ones each time. Leave out samplers that vary."
            )
        tolerance = _SAME[fit.mean.dtype]
        for key, then in fit.data.items():
            now = reading.data[key].to(then)
            if not torch.allclose(now, then, rtol=tolerance, atol=tolerance * float(then.abs().max())):
                raise InputError(
                    f"the training data is not what the fit has read: the sum {key!r} over it is "
                    f"{float(now.flatten()[0]):.6g} and was {float(then.flatten()[0]):.6g}. "
                    "hessian_structure='matrix_free' needs the same inputs and labels each time. Leave out random "
                    "augmentation."
                )
        if self.estimator.draws and self._order is None:
            self._order = reading.marks
        if self.estimator.draws and reading.marks != self._order:
            raise InputError(
                f"the training data came in another order than before, and curvature={self.estimator.name!r} draws by "
                "an example's place. Give a loader with shuffle=False, or take curvature='ggn'."
            )


class _Reading(Accumulator):
    """Reads the data once, small batches together, and adds up what some work makes of each run."""

    def __init__(self, work: Work, seed: int, *args: Any) -> None:
        self._own_seed = seed
        super().__init__(*args)
        self.work, self.total = work, None
        self.marks: list[float] = []

    def _drawn_seed(self) -> int:
        """Return the seed that all readings share. Nothing is drawn from torch's own generator."""
        return self._own_seed

    def read(self, batches: Iterable[Batch], marked: bool) -> None:
        """Read all batches."""
        self._add(self._marked(batches) if marked else batches)
        self.marks = self._marks

    def _keep(self, inputs: Inputs, forward: Forward, targets: Targets, of: Tensor | None) -> None:
        keys = self._places(forward.positions.n)
        if not isinstance(forward, NetworkForward):
            keys = rows_keyed(keys, of)
        term = self.work(forward, self._curvature(forward, targets, of), keys)
        self.total: Tensor | None = term if self.total is None else self.total + term


def _size(count: int) -> int:
    """Return the size of a block, up to the next power of 2: such blocks share their timings."""
    return 1 << (count - 1).bit_length()


def _agree(forward: NetworkForward, curvature: OutputCurvature, size: int) -> bool:
    """Return whether forward mode gives the engine's product with a random vector."""
    u = torch.randn(1, size, dtype=forward.outputs.dtype, generator=torch.Generator().manual_seed(0))
    u = u.to(forward.outputs.device)
    try:
        found = by_tangents(forward, curvature, u)
    except Exception:  # whatever an operation without a forward derivative raises
        return False
    expected = by_moments(forward, curvature, u).to(found)
    return float((found - expected).norm()) <= _AGREE[found.dtype] * float(expected.norm())
