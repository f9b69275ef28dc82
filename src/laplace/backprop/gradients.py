"""Define the protocols between the engine and its users: moments for fitting, Jacobians for predicting.

For a tracked parameter with input a[n, t, i] and vectors v[k, n] sent back as g[k, n, t, o], the per-example gradient
is G[k, n] = sum over positions t of g[k, n, t] a[n, t]^T. While fitting, structures ask for second moments of G over a
batch. While predicting, the v are the unit vectors of output space, and posteriors ask what variance G gives to each
output. G itself is almost never formed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

from laplace.backprop.covariances import Basis, Covariance, KroneckerCovariance
from laplace.linalg.output_curvature import OutputCurvature
from laplace.linalg.sketch import sketched
from laplace.predictive.positions import Positions

if TYPE_CHECKING:
    from laplace.network.inputs import Inputs


class Sketchable:
    """Answers for sketches of the factors from the factors themselves, for moments that know no shorter way."""

    def inputs(self) -> tuple[Tensor, float | Tensor]:
        """Return the sum of a a^T and the number of a."""
        raise NotImplementedError

    def outputs(self) -> Tensor:
        """Return the sum of g g^T."""
        raise NotImplementedError

    def output_rows(self) -> Tensor | None:
        """Return the g themselves, if their product is best taken together with that of other batches."""
        return None

    def input_sketch(self, rank: int) -> tuple[Tensor, Tensor, float | Tensor]:
        """Return the sum of a a^T times `rank` fixed columns, (Gr, I, R), its trace, (Gr,), and the number of a."""
        gram, count = self.inputs()
        return *sketched(gram, rank), count

    def output_sketch(self, rank: int) -> tuple[Tensor, Tensor]:
        """Return the sum of g g^T times `rank` fixed columns, (Gr, O, R), and its trace, (Gr,)."""
        return sketched(self.outputs(), rank)


def is_absent(moments: MomentsOf) -> bool:
    """Return whether a batch does not use a tensor: its gradients are zeros, without a form."""
    return bool(getattr(moments, "absent", False))


class MomentsOf(Protocol):
    """Defines second moments of one parameter's gradients, summed over the batch's examples and vectors."""

    def inputs(self) -> tuple[Tensor, float | Tensor]:
        """Return the sum of a a^T, (Gr, I, I), or its diagonal, (Gr, I), and the number of a.

        The number is a tensor (Gr, 1, 1) where groups differ. Examples that count more than once do so in both.
        """
        ...

    def input_rows(self) -> Tensor | None:
        """Return the a themselves, (M, I), if their product is best taken together with that of other batches.

        None if `inputs` knows a shorter way.
        """
        ...

    def input_sketch(self, rank: int) -> tuple[Tensor, Tensor, float | Tensor]:
        """Return the sum of a a^T times `rank` fixed columns, (Gr, I, R), its trace, (Gr,), and the number of a."""
        ...

    def outputs(self) -> Tensor:
        """Return the sum of g g^T, (Gr, O, O)."""
        ...

    def output_rows(self) -> Tensor | None:
        """Return the g themselves, (M, O), if their product is best taken together with that of other batches."""
        ...

    def output_sketch(self, rank: int) -> tuple[Tensor, Tensor]:
        """Return the sum of g g^T times `rank` fixed columns, (Gr, O, R), and its trace, (Gr,)."""
        ...

    def output_squares(self) -> Tensor:
        """Return the sum of g^2, the diagonal of `outputs`, (Gr, O)."""
        ...

    def squares(self) -> Tensor:
        """Return the sum of G^2 elementwise, flat (p,)."""
        ...

    def squares_in(self, left: Basis | None, right: Basis | None) -> Tensor:
        """Return the sum of (Q_left^T G Q_right)^2 elementwise, (Gr, O, I), for gradients that are outer products."""
        ...

    def gram(self) -> Tensor:
        """Return the sum of vec(G) vec(G)^T, (p, p)."""
        ...

    def row_grams(self) -> Tensor:
        """Return the sum of G[o] G[o]^T for each row o of the tensor, (O, I, I), in float64.

        These are the blocks of `gram` on its diagonal, without the rest.
        """
        ...

    @property
    def weights(self) -> int:
        """Return the number of weights p."""
        ...

    @property
    def rows(self) -> int:
        """Return the length of the tensor's first dimension. Each row has weights // rows weights."""
        ...

    @property
    def positions(self) -> int:
        """Return at how many positions of an example the parameter is used."""
        ...

    @property
    def factors(self) -> tuple[int, int, int]:
        """Return (Gr, O, I): groups, rows and columns of the outer products, for gradients that have this form."""
        ...

    @property
    def inputs_left(self) -> bool:
        """Return whether the rows of the weight are inputs and its columns outputs: G = sum of a g^T."""
        ...

    @property
    def diagonal_inputs(self) -> bool:
        """Return whether only the diagonal of the sum of a a^T is kept, because a are one-hot rows of a lookup."""
        ...

    @property
    def form(self) -> str:
        """Return 'kron' if the gradients are outer products, else 'dense'."""
        ...

    @property
    def first(self) -> bool:
        """Return whether these are the first vectors of their examples. Inputs are counted only then, that is once."""
        ...


class Moments(Protocol):
    """Defines second moments of all tracked parameters' gradients."""

    @property
    def held(self) -> int:
        """Return how many numbers are held until the moments are taken."""
        ...

    def merged(self, others: Sequence[Any]) -> Moments:
        """Return the moments of this batch and others as one batch."""
        ...

    @property
    def parameters(self) -> Sequence[MomentsOf]:
        """Return one entry per parameter tensor, in the layout's order."""
        ...

    def gram(self) -> Tensor:
        """Return H = sum of vec(G) vec(G)^T over all parameters together, (P, P)."""
        ...

    def products(self, vectors: Tensor) -> Tensor:
        """Return H times each vector, (S, P) -> (S, P), without forming H, in the dtype of the gradients."""
        ...

    def trace(self) -> Tensor | None:
        """Return tr H in float64, or None if that would need all of H."""
        ...

    def gram_along(self, steps: Sequence[Tensor]) -> Tensor:
        """Return the sum of (U^T G) (U^T G)^T for the rows U^T, (r, p) of each parameter: (r, r).

        Steps in float64 are multiplied in float64.
        """
        ...


class JacobianOf(Protocol):
    """Defines one parameter's Jacobian J[n, c, (o, i)]. S is a `KroneckerCovariance` of its weights."""

    def variance(self, spread: KroneckerCovariance) -> Tensor:
        """Return diag(J S J^T), (N, C)."""
        ...

    def covariance(self, spread: KroneckerCovariance) -> Tensor:
        """Return J S J^T of each example, (N, C, C)."""
        ...

    def product(self, spread: KroneckerCovariance, v: Tensor) -> Tensor:
        """Return J S J^T v of each example, v: (N, C) -> (N, C)."""
        ...

    def joint(self, spread: KroneckerCovariance) -> Tensor:
        """Return J S J^T over all examples together, (N, C, N, C)."""
        ...

    def along(self, steps: Tensor, part: slice = ...) -> Tensor:
        """Return J step for some examples, (S, p) -> (S, n, C)."""
        ...

    def alone(self) -> Jacobian:
        """Return this as the Jacobian of all parameters, for a dense covariance of this one's weights only."""
        ...

    def cross(self, other: Any) -> Tensor:
        """Return J G'^T for the gradients G' of a `Use` with L vectors and M examples, (N, C, M, L)."""
        ...

    def cross_each(self, other: Any) -> Tensor:
        """Return J G'^T only for output c with vector number c, (C, N, M)."""
        ...

    def double(self) -> JacobianOf:
        """Return the Jacobian in float64."""
        ...


class Jacobian(Protocol):
    """Defines a Jacobian of the outputs in all tracked parameters."""

    @property
    def parameters(self) -> Sequence[JacobianOf]:
        """Return one entry per parameter tensor, in the layout's order."""
        ...

    def variance(self, covariance: Covariance) -> Tensor:
        """Return diag(J S J^T) for a dense S of all weights, (N, C)."""
        ...

    def covariance(self, covariance: Covariance) -> Tensor:
        """Return J S J^T of each example, (N, C, C)."""
        ...

    def joint(self, covariance: Covariance) -> Tensor:
        """Return J S J^T over all examples together, (N, C, N, C)."""
        ...

    def variance_in(self, basis: Tensor, variances: Tensor) -> Tensor:
        """Return diag(J Q diag(r) Q^T J^T) for G different r, projecting onto Q once: (P, P), (G, P) -> (G, N, C)."""
        ...

    def along(self, steps: Tensor) -> Tensor:
        """Return J step, (S, P) -> (S, N, C)."""
        ...

    @property
    def examples(self) -> int:
        """Return N, the number of examples, or of rows."""
        ...

    def written(self, part: slice) -> Tensor:
        """Return J itself for some examples, (n, C, P). For those who have to solve for its rows."""
        ...


class Engine(Protocol):
    """Runs a network on batches, for fitting and predicting."""

    linear: bool  # whether the outputs are linear in the weights
    plan: Any  # what was learned of the network so far; None if nothing has to be learned

    def room(self) -> int:
        """Return up to how many examples small batches are run together."""
        ...

    def most(self, inputs: Inputs) -> int:
        """Return how many examples like these may be run at once, with what is sent back to all layers."""
        ...

    def chunks(self, inputs: Inputs, n_outputs: int) -> Iterator[Inputs]:
        """Cut the inputs so that the gradients of `n_outputs` vectors fit into memory."""
        ...

    def forward(self, inputs: Inputs, with_grad: bool = False) -> Forward:
        """Run the network on a batch."""
        ...

    def confirmed(self, inputs: Inputs) -> bool:
        """Return whether what was learned of the network also holds for this batch. If not, it is learned anew."""
        ...


class Forward(Protocol):
    """Defines one run of the network on a batch: its outputs, and what can be sent back from them."""

    @property
    def outputs(self) -> Tensor:
        """Return the outputs, (N, C): one row for each example, or for each position that counts."""
        ...

    @property
    def positions(self) -> Positions:
        """Return the shape in which the network returned the outputs."""
        ...

    def copied(self) -> Forward:
        """Return a copy for whoever keeps it longer than its batch. Only asked of runs that hold little."""
        ...

    def counting(self, kept: Tensor) -> Forward:
        """Return the same run with only the rows at some indices counted."""
        ...

    def cut(self) -> Iterator[tuple[Forward, slice]]:
        """Yield parts of consecutive rows, small enough for memory, with their slices."""
        ...

    def vectors(self, curvature: OutputCurvature) -> Any:
        """Return the vectors of output space whose outer products sum to `curvature`. Read them in slices."""
        ...

    @property
    def held(self) -> int:
        """Return how many numbers are held by whoever keeps this run."""
        ...

    def moments(self, curvature: OutputCurvature) -> Iterator[Moments]:
        """Yield the moments that structures accumulate, for some vectors of a root of `curvature` at a time."""
        ...

    def sent(self, v: Tensor) -> Sequence[Any]:
        """Return each parameter's gradients for vectors v of output space, (K, N, C) -> a `Use` each."""
        ...

    def hessian(self, loss: Callable[[Tensor], Tensor]) -> Moments | None:
        """Return the exact Hessian of a loss of the outputs, or None if it equals the GGN."""
        ...

    def jacobian(self, outputs: Tensor | None = None, centred: bool = False) -> Jacobian:
        """Return the Jacobian of all outputs, or of the asked `outputs` only; or of all contrasts, if `centred`."""
        ...

    def linearised(self, steps: Tensor) -> Tensor:
        """Return J step, the change of the outputs to first order: (S, P) -> (S, N, C)."""
        ...

    def perturbed(self, steps: Tensor) -> Tensor:
        """Return the outputs of the network itself with weights moved by each step: (S, P) -> (S, N, C)."""
        ...
