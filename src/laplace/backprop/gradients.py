"""The words between the engine and those who listen to it.

For a tracked parameter with input a[n, t, i] and vectors v[k, n] sent back as g[k, n, t, o], the per-example gradient
is G[k, n] = sum over positions t of g[k, n, t] a[n, t]^T. While fitting, structures ask for second moments of G over a
batch; while predicting, the v are the unit vectors of output space, and posteriors ask what variance G gives to each
output. G itself is almost never formed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

from laplace.algebra import gram
from laplace.curvature.output import OutputCurvature
from laplace.positions import Positions

if TYPE_CHECKING:
    from laplace.batches import Inputs


class Basis:
    """Orthonormal bases Q (columns), one per group, that remember their elementwise square."""

    def __init__(self, vectors: Tensor) -> None:  # (Gr, D, D)
        self.vectors = vectors

    @cached_property
    def squares(self) -> Tensor:  # (Gr, D, D), [k, c] = Q[c, k]^2
        """The transposed elementwise square: weights per basis vector times this are weights per output."""
        return self.vectors.square().mT.contiguous()


def rotate_right(x: Tensor, basis: Basis | None) -> Tensor:  # (..., Gr, R, D) -> x Q
    """The columns in a basis; None is that of unit vectors."""
    if basis is None:
        return x
    if basis.vectors.shape[0] == 1:
        return (x.reshape(-1, x.shape[-1]) @ basis.vectors[0]).reshape(x.shape)
    return x @ basis.vectors


def rotate_left(x: Tensor, basis: Basis | None) -> Tensor:  # (..., Gr, D, R) -> Q^T x
    """The rows in a basis."""
    return x if basis is None else basis.vectors.mT @ x


class Spread:
    """A covariance (Q_B (x) Q_A) diag(R) (Q_B (x) Q_A)^T of one tensor's weights; None is the basis of unit vectors."""

    def __init__(self, variances: Tensor, left: Basis | None = None, right: Basis | None = None) -> None:
        self.variances, self.left, self.right = variances, left, right  # R: (Gr, O, I)
        self._asked, self._by_output = 0, None

    def by_output(self, n: int) -> Tensor | None:  # (I, O), of a single group
        """M[i, c] = sum_o R[o, i] Q_B[c, o]^2, the variance that squared input i gives to output c.

        Formed once it pays: from when it has been asked for at more examples, `n` at a time, than there are inputs.
        """
        if self.left is None:
            return self.variances[0].T
        self._asked += n
        if self._by_output is None and self._asked > self.variances.shape[2] and not self.variances.requires_grad:
            self._by_output = self.variances[0].T @ self.left.squares[0]
        return self._by_output


class Covariance:
    """A covariance S = R R^T of all weights.

    Gradients times R are squared, and nothing cancels: of a gradient that the data determines, float32 would leave
    little where S itself has the prior's large variances.
    """

    def __init__(self, root: Tensor) -> None:  # R: (P, P)
        self.root = root

    @cached_property
    def matrix(self) -> Tensor:  # (P, P), float64
        """S itself, for those to whom its blocks are cheaper; in float64, since there it does cancel."""
        return gram(self.root.double().T)


class MomentsOf(Protocol):
    """Second moments of one parameter's gradients, summed over the batch's examples and vectors."""

    def inputs(self) -> tuple[Tensor, float | Tensor]:
        """sum of a a^T, (Gr, I, I), or its diagonal, (Gr, I), and over how many a; (Gr, 1, 1) where groups differ.

        Examples that count more than once do so in both.
        """
        ...

    def input_rows(self) -> Tensor | None:
        """The a themselves, (M, I), where they are few enough to be collected over batches; else None."""
        ...

    def outputs(self) -> Tensor:
        """sum of g g^T, (Gr, O, O)."""
        ...

    def output_squares(self) -> Tensor:
        """sum of g^2, the diagonal of `outputs`, (Gr, O)."""
        ...

    def squares(self) -> Tensor:
        """sum of G^2 elementwise, flat (p,)."""
        ...

    def squares_in(self, left: Basis | None, right: Basis | None) -> Tensor:
        """sum of (Q_left^T G Q_right)^2 elementwise, (Gr, O, I), where the gradients are outer products."""
        ...

    def gram(self) -> Tensor:
        """sum of vec(G) vec(G)^T, (p, p)."""
        ...

    @property
    def weights(self) -> int:
        """Number of weights p."""
        ...

    @property
    def positions(self) -> int:
        """At how many positions of an example the parameter is used."""
        ...

    @property
    def factors(self) -> tuple[int, int, int]:
        """(Gr, O, I): groups, rows and columns of the outer products, where the gradients are such."""
        ...

    @property
    def inputs_left(self) -> bool:
        """Whether the rows of the weight are the inputs, and its columns the outputs: G = sum of a g^T."""
        ...

    @property
    def diagonal_inputs(self) -> bool:
        """Whether of the sum of a a^T only the diagonal is kept: a are rows that are looked up."""
        ...

    @property
    def form(self) -> str:
        """'kron' where the gradients are outer products, 'dense' where they are not."""
        ...

    @property
    def first(self) -> bool:
        """Whether these are the first vectors of their examples: inputs are counted once."""
        ...


class Moments(Protocol):
    """Second moments of all tracked parameters' gradients."""

    @property
    def held(self) -> int:
        """How many numbers are held until the moments are taken."""
        ...

    def merged(self, others: Sequence[Any]) -> Moments:
        """Those of this batch and of others as of one."""
        ...

    @property
    def parameters(self) -> Sequence[MomentsOf]:
        """One entry per parameter tensor, in the layout's order."""
        ...

    def gram(self) -> Tensor:
        """H = sum of vec(G) vec(G)^T over all parameters together, (P, P)."""
        ...

    def products(self, vectors: Tensor) -> Tensor:
        """H times each vector, (S, P) -> (S, P), without H; in the dtype of the gradients, whatever that of vectors."""
        ...

    def trace(self) -> Tensor | None:
        """tr H; None where it has no form short of H."""
        ...

    def gram_along(self, steps: Sequence[Tensor]) -> Tensor:
        """sum of (U^T G) (U^T G)^T for the rows U^T, (r, p) of each parameter: (r, r)."""
        ...


class JacobianOf(Protocol):
    """One parameter's Jacobian J[n, c, (o, i)], asked for the covariance that a `Spread` S of its weights gives."""

    def variance(self, spread: Spread) -> Tensor:
        """diag(J S J^T), (N, C)."""
        ...

    def covariance(self, spread: Spread) -> Tensor:
        """J S J^T of each example, (N, C, C)."""
        ...

    def product(self, spread: Spread, v: Tensor) -> Tensor:
        """J S J^T v of each example, v: (N, C) -> (N, C)."""
        ...

    def joint(self, spread: Spread) -> Tensor:
        """J S J^T over all examples together, (N, C, N, C)."""
        ...

    def along(self, steps: Tensor, part: slice = ...) -> Tensor:
        """J step for some examples, (S, p) -> (S, n, C)."""
        ...

    def alone(self) -> Jacobian:
        """The same as the Jacobian of all parameters there are: for a dense covariance of this one's weights."""
        ...

    def cross(self, other: Any) -> Tensor:
        """J G'^T for the gradients G' of a `Use` with L vectors and M examples, (N, C, M, L)."""
        ...

    def cross_each(self, other: Any) -> Tensor:
        """The same for output c and vector number c alone, (C, N, M)."""
        ...

    def double(self) -> JacobianOf:
        """The same in float64."""
        ...


class Jacobian(Protocol):
    """The Jacobian of the outputs in all tracked parameters."""

    @property
    def parameters(self) -> Sequence[JacobianOf]:
        """One entry per parameter tensor, in the layout's order."""
        ...

    def variance(self, covariance: Covariance) -> Tensor:
        """diag(J S J^T) for a dense S of all weights, (N, C)."""
        ...

    def covariance(self, covariance: Covariance) -> Tensor:
        """J S J^T of each example, (N, C, C)."""
        ...

    def joint(self, covariance: Covariance) -> Tensor:
        """J S J^T over all examples together, (N, C, N, C)."""
        ...

    def variance_in(self, basis: Tensor, variances: Tensor) -> Tensor:
        """diag(J Q diag(r) Q^T J^T) for G different r: (P, P), (G, P) -> (G, N, C), projecting onto Q once."""
        ...

    def along(self, steps: Tensor) -> Tensor:
        """J step, (S, P) -> (S, N, C)."""
        ...


class Engine(Protocol):
    """What fitting and predicting need of a network: runs on batches."""

    linear: bool  # whether the outputs are linear in the weights
    plan: Any  # what was learned of the network so far; None where nothing needs to be

    def room(self) -> int:
        """Up to how many examples small batches are run together."""
        ...

    def chunks(self, inputs: Inputs, n_outputs: int) -> Iterator[Inputs]:
        """The inputs cut so that the gradients of so many vectors fit into memory."""
        ...

    def forward(self, inputs: Inputs, with_grad: bool = False) -> Forward:
        """Run the network."""
        ...


class Forward(Protocol):
    """One run of the network on a batch: its outputs, and what can be sent back from them."""

    @property
    def outputs(self) -> Tensor:
        """What the network returned, (N, C): a row for each example, or for each position that counts."""
        ...

    @property
    def positions(self) -> Positions:
        """The shape in which the network returned them."""
        ...

    def counting(self, kept: Tensor) -> Forward:
        """The same run, of which the rows at some indices count."""
        ...

    def cut(self) -> Iterator[tuple[Forward, slice]]:
        """The same in parts of consecutive rows, and which, as many as memory asks for."""
        ...

    def vectors(self, curvature: OutputCurvature) -> Any:
        """The vectors of output space whose outer products sum to `curvature`, to be taken in slices."""
        ...

    @property
    def held(self) -> int:
        """How many numbers are held by whoever keeps this run."""
        ...

    def moments(self, curvature: OutputCurvature) -> Iterator[Moments]:
        """What the structures accumulate, for the vectors whose outer products sum to `curvature`, some at a time."""
        ...

    def sent(self, v: Tensor) -> Sequence[Any]:
        """The gradients of each parameter for vectors v of output space, (K, N, C) -> a `Use` each."""
        ...

    def hessian(self, loss: Callable[[Tensor], Tensor]) -> Moments | None:
        """The exact Hessian of a loss of the outputs; None where it is the GGN."""
        ...

    def jacobian(self, outputs: Tensor | None = None) -> Jacobian:
        """What the posteriors ask, for the unit vectors of output space (of the asked `outputs` alone)."""
        ...

    def linearised(self, steps: Tensor) -> Tensor:
        """J step, the change of the outputs to first order: (S, P) -> (S, N, C)."""
        ...

    def perturbed(self, steps: Tensor) -> Tensor:
        """The outputs of the network itself with weights moved by each step: (S, P) -> (S, N, C)."""
        ...
