"""Define the base of posteriors over functions. They keep some points of the data, and no weights."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, NoReturn

from torch import Tensor

from laplace.backprop.gradients import Engine, Forward, Moments
from laplace.backprop.uses import Use
from laplace.checks import LARGEST, whole_number
from laplace.errors import UnsupportedError
from laplace.linalg.output_curvature import OutputCurvature
from laplace.linalg.symmetric import EIGH
from laplace.structures.base import Contribution, Structure, Sums
from laplace.structures.functional.points import FunctionForward, Gradients, Points
from laplace.structures.functional.subset import Subset
from laplace.structures.gaussian import Curvature, Gaussian
from laplace.weights.layout import Layout

DEFAULT_POINTS = 256  # the most points to keep if the user does not say


class Functional(Structure):
    """Uses the gradients at `n_subset` points, which are drawn uniformly without replacement with `seed`."""

    functional = True
    exact_hessian = False
    scattered = True
    prior_structures = ("scalar", "layerwise")

    def __init__(self, n_subset: int | None, seed: int) -> None:
        self.n_subset = None if n_subset is None else whole_number(n_subset, "n_subset")
        self.seed = whole_number(seed, "seed", 0, LARGEST)

    @property
    def adds(self) -> bool:
        return False

    def attach_points(self, forward: Forward, points: Points | None, engine: Engine, limit: int) -> Any:
        """Add the kept points to a run. Their gradients may be kept if they take at most `limit` bytes."""
        return FunctionForward(forward, lambda: () if points is None else points.gradients(engine, limit))

    @property
    def most(self) -> int:
        """Return the largest number of points to keep."""
        return DEFAULT_POINTS if self.n_subset is None else self.n_subset

    @property
    def drawn(self) -> int:
        """Return how many points to draw in the first run over the data, of which `place` makes those to use."""
        return self.most

    def place(self, subset: Subset, n_data: int, engine: Engine) -> Points:
        """Return the points to use. By default these are all that were drawn from `n_data` examples."""
        return subset.points(n_data, self.n_subset, self.vectors)

    def sums(self, moments: Moments, layout: Layout) -> Contribution:
        """Return nothing: the first run over the data only collects points."""
        return {}

    @abstractmethod
    def vectors(self, curvature: OutputCurvature, repeats: float) -> Tensor:  # (K, N, C)
        """Return the vectors to send back from some points, each of which represents `repeats` examples."""

    @abstractmethod
    def bytes(self, points: int, vectors: int, layout: Layout, itemsize: int) -> int:
        """Return the bytes of the matrices for so many points and so many vectors per point."""

    @abstractmethod
    def from_points(self, gradients: Gradients, points: int, layout: Layout) -> Sums:
        """Return the sums to keep, from the gradients of the points."""

    def memory(self, moments: Moments, layout: Layout, itemsize: int) -> int:
        """Return the bytes for the largest number of points, with as many vectors per point as `moments` has."""
        return self.bytes(self.most, _vectors(moments), layout, itemsize)

    def work(self, moments: Moments, layout: Layout, vectors: int) -> tuple[float, float]:
        rows = self.most * _vectors(moments)
        products = sum(min(m.weights, sum(m.factors)) if m.form == "kron" else m.weights for m in moments.parameters)
        return 0.0, rows**2 * products / 2 + EIGH * rows**3  # the kernel is symmetric

    def runs(self, layout: Layout, n_data: int) -> tuple[float, float]:
        """Count the runs: the points are run once more, and in the first run vectors are sent back only from them."""
        points = min(self.most, n_data) / n_data
        return self.passes + points, self.passes - 1 + points


def _vectors(moments: Moments) -> int:
    one = moments.parameters[0]
    return one.shape[0] if isinstance(one, Use) else one.factors[1]  # a last layer has one per output


class FunctionCurvature(Curvature):
    """Refuses to return a curvature of the weights."""

    def matrix(self) -> NoReturn:
        refuse("a curvature of the weights")


class FunctionGaussian(Gaussian):
    """Refuses every question about the distribution of weights."""

    def color(self, eps: Tensor) -> NoReturn:
        refuse("draws of the weights")

    def marginal_variances(self) -> NoReturn:
        refuse("variances of the weights")

    def quadratic(self, vector: Tensor) -> NoReturn:
        refuse("a density of the weights")

    def precision_matrix(self) -> NoReturn:
        refuse("a precision of the weights")

    def covariance_matrix(self) -> NoReturn:
        refuse("a covariance of the weights")

    def dense_variance(self, jacobians: Tensor) -> NoReturn:
        refuse("a covariance for Jacobians that you computed")

    def scale(self) -> NoReturn:
        refuse("variances of the weights")


def refuse(what: str) -> NoReturn:
    """Raise UnsupportedError, and list what is available instead."""
    raise UnsupportedError(
        f"hessian_structure='gp' is a posterior over functions and has no {what}. It has la(x), la.predict(x), "
        "la.functional_samples(x) and the evidence. For weights take hessian_structure='full', 'kron' or 'diag'."
    )
