"""What posteriors over functions share: they are made of some points of the data, and know no single weights."""

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
from laplace.structures.base import Contribution, Curvature, Gaussian, Structure, Sums
from laplace.structures.functional.points import FunctionForward, Gradients, Points
from laplace.weights.layout import Layout

DEFAULT_POINTS = 256  # kept where the user does not say how many, if there are so many


class Functional(Structure):
    """A structure made of the gradients at `n_subset` points, drawn uniformly without replacement by `seed`."""

    functional = True
    exact_hessian = False
    prior_structures = ("scalar", "layerwise")

    def __init__(self, n_subset: int | None, seed: int) -> None:
        self.n_subset = None if n_subset is None else whole_number(n_subset, "n_subset")
        self.seed = whole_number(seed, "seed", 0, LARGEST)

    @property
    def adds(self) -> bool:
        return False

    def attach_points(self, forward: Forward, points: Points | None, engine: Engine, limit: int) -> Any:
        """With the kept points beside it, whose gradients may be kept in `limit` bytes."""
        return FunctionForward(forward, lambda: () if points is None else points.gradients(engine, limit))

    @property
    def most(self) -> int:
        """How many points are kept at most."""
        return DEFAULT_POINTS if self.n_subset is None else self.n_subset

    def sums(self, moments: Moments, layout: Layout) -> Contribution:
        """Nothing: of the first run over the data only points are kept."""
        return {}

    @abstractmethod
    def vectors(self, curvature: OutputCurvature, repeats: float) -> Tensor:  # (K, N, C)
        """What is sent back from the outputs of some points, each of which stands for `repeats` of the data."""

    @abstractmethod
    def bytes(self, points: int, vectors: int, layout: Layout, itemsize: int) -> int:
        """Bytes that the matrices of so many points take, with so many vectors sent back from each."""

    @abstractmethod
    def from_points(self, gradients: Gradients, points: int, layout: Layout) -> Sums:
        """What is kept of the points' gradients."""

    def memory(self, moments: Moments, layout: Layout, itemsize: int) -> int:
        """For as many points as may be kept, with as many vectors sent back as `moments` are of."""
        return self.bytes(self.most, _vectors(moments), layout, itemsize)

    def work(self, moments: Moments, layout: Layout, vectors: int) -> tuple[float, float]:
        rows = self.most * _vectors(moments)
        products = sum(min(m.weights, sum(m.factors)) if m.form == "kron" else m.weights for m in moments.parameters)
        return 0.0, rows**2 * products / 2 + EIGH * rows**3  # the kernel is symmetric

    def runs(self, layout: Layout, n_data: int) -> tuple[float, float]:
        """Vectors are sent back from the points alone, which are run again; further runs over all data are whole."""
        points = min(self.most, n_data) / n_data
        return self.passes + points, self.passes - 1 + points


def _vectors(moments: Moments) -> int:
    one = moments.parameters[0]
    return one.shape[0] if isinstance(one, Use) else one.factors[1]  # a last layer's are as many as its outputs


class FunctionCurvature(Curvature):
    """The curvature as functions see it."""

    def matrix(self) -> NoReturn:
        refuse("a curvature of the weights")


class FunctionGaussian(Gaussian):
    """What is asked of weights has no answer here."""

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
        refuse("a covariance for Jacobians that you bring")

    def scale(self) -> NoReturn:
        refuse("variances of the weights")


def refuse(what: str) -> NoReturn:
    """Say what there is instead."""
    raise UnsupportedError(
        f"hessian_structure='gp' is a posterior over functions and has no {what}. There is: la(x), la.predict(x), "
        "la.functional_samples(x) and the evidence; for weights take hessian_structure='full', 'kron' or 'diag'."
    )
