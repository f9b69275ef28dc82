"""The last linear layer: its input is the features phi, and what is sent back to its output is v itself.

So one forward pass without autograd is all; every moment and covariance has a closed form in phi and Lambda.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from laplace.algebra import gram, in_sums
from laplace.backprop.activations import Stored
from laplace.backprop.gradients import Basis, Covariance, Spread
from laplace.backprop.uses import Outer
from laplace.batches import Inputs
from laplace.budget import Budget
from laplace.curvature.output import OutputCurvature
from laplace.errors import ModelError
from laplace.positions import Positions
from laplace.replica import replicate
from laplace.weights.last_layer import LastLayer, close, is_output
from laplace.weights.pointwise import features as features_last

_CHUNK = 2**24  # elements of an intermediate tensor

_ROWS = 2**24  # numbers of the rows u (x) phi that are written out at a time
_LEAST = 4096  # rows up to which a run is not cut: products of many rows are fast
_ALL = slice(None)


class Head:
    """Runs a network up to and through its last layer, on a replica of its own."""

    linear = True

    def __init__(self, model: nn.Module, weights: LastLayer, budget: Budget, class_dim: int | None = -1) -> None:
        self.replica, self.weights, self.class_dim, self.budget = replicate(model), weights, class_dim, budget

    def room(self) -> int:
        """None: what batches leave is small, and is collected before products are taken."""
        return 0

    def chunks(self, inputs: Inputs, n_outputs: int) -> Iterator[Inputs]:
        """The inputs as they are: no gradients are kept."""
        yield inputs

    def forward(self, inputs: Inputs, with_grad: bool = False) -> HeadForward:
        """Features and outputs of a batch; gradients with respect to the inputs only `with_grad`."""
        seen: list[tuple[Tensor, int, Tensor, int]] = []

        def capture(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> None:
            phi = args[0] if args else kwargs["input"]
            seen.append((phi, phi._version, output, output._version))

        layer = self.weights.layer(self.replica)
        handle = layer.register_forward_hook(capture, with_kwargs=True)
        try:
            with torch.inference_mode(False), torch.enable_grad() if with_grad else torch.no_grad():
                f = inputs.normal_tensors().singles().call(self.replica)
        finally:
            handle.remove()
        name = self.weights.module
        if len(seen) != 1:
            raise ModelError(f"the last layer {name!r} was called {len(seen)} times in one run; once is needed.")
        phi, phi_version, out, version = seen[0]
        self._check(out, version, f)
        if phi._version != phi_version:
            raise ModelError(
                f"the input of the last layer {name!r} is written to in place after the layer has read it. Replace "
                "that operation (h = h + x instead of h += x)."
            )
        dtype = torch.promote_types(f.dtype, torch.float32)
        with nullcontext() if with_grad else torch.no_grad():
            f, phi = inputs.combined(f), inputs.combined(self.weights.reduce(features_last(layer, phi)))
            positions = Positions.of(f, self.class_dim)
            rows, features = positions.rows(f).to(dtype), phi.flatten(0, -2).to(dtype)
        if len(features) != len(rows):
            raise ModelError(
                f"the outputs {tuple(f.shape)} with class_dim={self.class_dim} are {len(rows)} x {positions.c}; the "
                f"last layer {name!r} gives {out.shape[0]} examples at {len(features) // max(1, out.shape[0])} "
                "positions. class_dim must name the dimension that the last layer makes."
            )
        return HeadForward(rows, features, self.weights, positions, self.budget, 0.0 if inputs.pairs else 1.0)

    def _check(self, out: Tensor, version: int, f: Tensor) -> None:
        if self.weights.reduction is None or out.dim() == 2:
            same = is_output(out, version, f)
        else:
            same = out._version == version and close(self.weights.reduce(out), f)
        if not same:
            raise ModelError(
                f"the output of the last layer {self.weights.module!r} {tuple(out.shape)} is not the network's output "
                f"{tuple(f.shape)} on this batch (feature_reduction={self.weights.reduction!r}): something changes it "
                "on the way. The network must return the layer's output itself."
            )


@dataclass(frozen=True)
class HeadForward:
    """One run: outputs f = W phi + b."""

    outputs: Tensor  # (N, C), or a row for each position that counts
    features: Tensor  # (N, H)
    weights: LastLayer
    positions: Positions
    budget: Budget
    constant: float = 1.0  # the bias's input: 0 for the difference of two inputs

    def counting(self, kept: Tensor) -> HeadForward:  # (M,), indices into the rows
        """The same run, of which some rows count."""
        return replace(self, outputs=self.outputs[kept], features=self.features[kept])

    def cut(self) -> Iterator[tuple[HeadForward, slice]]:
        """All of it, but for so many positions that their covariances would not fit at once."""
        m, c = self.outputs.shape
        step = max(_LEAST, self.budget.count(4 * self.outputs.element_size() * c * c))
        if not self.positions.several or m <= step:
            yield self, _ALL
            return
        for start in range(0, m, step):
            part = slice(start, start + step)
            yield replace(self, outputs=self.outputs[part], features=self.features[part]), part

    def vectors(self, curvature: OutputCurvature) -> Tensor:  # (K, N, C)
        """The vectors whose outer products sum to `curvature`."""
        return curvature.root()

    @property
    def inputs(self) -> list[Tensor]:
        """The input of each uncertain tensor: phi for the weight, a constant (1, 1) for the bias."""
        one = self.features.new_full((1, 1), self.constant)
        return [self.features if len(shape) > 1 else one for shape in self.weights.layout.shapes]

    @property
    def held(self) -> int:
        return self.outputs.numel() + self.features.numel()

    def moments(self, curvature: OutputCurvature) -> Iterator[HeadMoments]:
        """Second moments for all the vectors behind `curvature` at once."""
        kept = [a.clone() for a in self.inputs]  # held back for a while, when the batch's own memory may be reused
        yield HeadMoments(kept, curvature, self.outputs.shape[0])

    def sent(self, v: Tensor) -> list[Outer]:
        """The gradients v phi^T."""
        g = v.unsqueeze(2).unsqueeze(4)  # (K, N, 1, O, 1)
        weights = (a.expand(len(self.outputs), -1)[:, None, :, None] for a in self.inputs)
        return [Outer(Stored(a), g) for a in weights]

    def hessian(self, loss: Any) -> None:
        """None: in a last layer the Hessian of these likelihoods is the GGN, in closed form."""
        return

    def jacobian(self, outputs: Tensor | None = None) -> Any:
        """The Jacobian, whose rows are phi (x) e_c."""
        whole = HeadJacobian(self.inputs, self.outputs.shape[0], self.outputs.shape[1])
        return whole if outputs is None else Chosen(whole, outputs)

    def linearised(self, steps: Tensor) -> Tensor:
        """The outputs are linear in the last layer: sum of step_W phi + step_b, (S, P) -> (S, N, C)."""
        return _along(self.inputs, steps, *self.outputs.shape)

    def perturbed(self, steps: Tensor) -> Tensor:
        """The network with moved weights: exact, from the features of this one run."""
        return self.outputs + self.linearised(steps)


@dataclass(frozen=True)
class HeadMoments:
    """Second moments of G = v phi^T in closed form."""

    features: Sequence[Tensor]
    curvature: OutputCurvature
    n: int

    @property
    def held(self) -> int:
        return self.n * (sum(a.shape[1] for a in self.features) + self.curvature.held)

    def merged(self, others: Sequence[Any]) -> HeadMoments:
        parts = [self, *others]
        features = [
            torch.cat([part.features[i].expand(part.n, -1) for part in parts]) if len(a) > 1 or self.n == 1 else a
            for i, a in enumerate(self.features)
        ]
        curvature = OutputCurvature.joined([part.curvature for part in parts])
        return HeadMoments(features, curvature, sum(part.n for part in parts))

    @property
    def parameters(self) -> list[HeadMomentsOf]:
        shared = functools.cache(self.curvature.gram)
        return [HeadMomentsOf(a.expand(self.n, -1), self.curvature, self.n, shared) for a in self.features]

    def gram(self) -> Tensor:
        """sum over n of Lambda_n (x) (phi phi^T), (P, P), some examples at a time."""
        vectors = 1 if self.curvature.vectors is None else len(self.curvature.vectors)
        width = vectors * self.curvature.n_outputs * sum(a.shape[1] for a in self.features)
        step = max(1, _ROWS // width)
        parts = (self._part(slice(start, min(start + step, self.n))) for start in range(0, self.n, step))
        total = next(parts)._gram()
        for part in parts:
            total += part._gram()
        return total

    def products(self, vectors: Tensor) -> Tensor:
        """sum over n of J_n^T Lambda_n J_n u, some examples at a time."""
        vectors = in_sums(vectors.to(self.features[0]))
        step = max(1, _ROWS // (len(vectors) * self.curvature.n_outputs))
        total = torch.zeros_like(vectors)
        for start in range(0, self.n, step):
            part = self._part(slice(start, min(start + step, self.n)))
            features = [a.to(vectors) for a in part.features]
            sent = part.curvature.times(_along(features, vectors, part.n, self.curvature.n_outputs)).mT
            total += torch.cat([(sent @ a.expand(part.n, -1)).flatten(1) for a in features], 1)
        return total

    def trace(self) -> Tensor:
        return sum((m.squares().sum() for m in self.parameters), start=self.features[0].new_zeros(()))

    def gram_along(self, steps: Sequence[Tensor]) -> Tensor:  # (r, r)
        """sum over n of (J_n U)^T Lambda_n (J_n U), some examples at a time."""
        c, total = self.curvature.n_outputs, torch.zeros((), dtype=torch.float64, device=steps[0].device)
        step = max(1, _CHUNK // (c * len(steps[0])))
        for start in range(0, self.n, step):
            part = self._part(slice(start, min(start + step, self.n)))
            jacobians = [HeadJacobianOf(a.double(), part.n, c) for a in part.features]
            moved = torch.stack([j.along(u.double()) for j, u in zip(jacobians, steps, strict=True)]).sum(0)
            total = total + part.curvature.between(moved)
        return total

    def _part(self, part: slice) -> HeadMoments:
        if (part.start, part.stop) == (0, self.n):
            return self
        features = [a if a.shape[0] != self.n else a[part] for a in self.features]
        return HeadMoments(features, self.curvature.part(part), part.stop - part.start)

    def _gram(self) -> Tensor:
        """One product of rows u (x) phi, and one of d-weighted features."""
        total = None
        if self.curvature.vectors is not None:  # in float64: the difference of two such matrices is nearly singular
            u = self.curvature.vectors.flatten(0, 1).double()
            k = self.curvature.vectors.shape[0]
            rows = torch.cat([_outer(u, a.expand(self.n, -1).repeat(k, 1)) for a in self.features], 1)
            total = gram(rows) if self.curvature.sign > 0 else gram(rows).neg_()
        if self.curvature.diagonal is not None:
            total = self._add_diagonal(total, self.curvature.exact_diagonal())
        assert total is not None
        return total

    def _add_diagonal(self, total: Tensor | None, d: Tensor) -> Tensor:
        """The part of diag(d): output c of one tensor meets only output c of another."""
        n_outputs = d.shape[1]
        widths = [a.shape[1] for a in self.features]
        ends = torch.tensor([n_outputs * w for w in widths]).cumsum(0).tolist()
        starts = [0, *ends[:-1]]
        total = d.new_zeros(ends[-1], ends[-1]) if total is None else total
        for a, i, iw in zip(self.features, starts, widths, strict=True):
            left = d.T.unsqueeze(1) * a.T  # (C, I, N)
            for b, j, jw in zip(self.features, starts, widths, strict=True):
                block = total[i : i + n_outputs * iw, j : j + n_outputs * jw].unflatten(0, (n_outputs, iw))
                block.unflatten(2, (n_outputs, jw)).diagonal(dim1=0, dim2=2).add_(
                    (left @ b.expand(self.n, -1).double()).permute(1, 2, 0)
                )
        return total


@dataclass(frozen=True)
class HeadMomentsOf:
    """Second moments of one tensor of the last layer."""

    features: Tensor  # (N, I)
    curvature: OutputCurvature
    n: int
    shared: Callable[[], Tensor]  # (O, O), computed once for weight and bias

    def outputs(self) -> Tensor:
        return self.shared().unsqueeze(0)

    def output_squares(self) -> Tensor:
        return self.curvature.squares().sum(0, keepdim=True)

    form, first, positions, inputs_left, diagonal_inputs = "kron", True, 1, False, False

    def input_rows(self) -> None:
        return None

    @property
    def weights(self) -> int:
        return self.features.shape[1] * self.curvature.n_outputs

    @property
    def factors(self) -> tuple[int, int, int]:
        return 1, self.weights // self.features.shape[1], self.features.shape[1]

    def inputs(self) -> tuple[Tensor, float]:
        counts = self.curvature.counts
        if counts is None:
            return gram(self.features).unsqueeze(0), self.n
        return gram(self.features * counts.sqrt().unsqueeze(1)).unsqueeze(0), float(counts.double().sum())

    def gram(self) -> Tensor:
        return HeadMoments([self.features], self.curvature, self.n).gram()

    def squares(self) -> Tensor:
        return (self.curvature.squares().T @ self.features.square()).flatten()

    def squares_in(self, left: Basis | None, right: Basis | None) -> Tensor:  # (1, O, I)
        """sum over n of (Q_B^T Lambda_n Q_B)_oo (Q_A^T phi)_i^2."""
        assert left is not None
        assert right is not None
        inputs = (self.features @ right.vectors[0]).square()
        return (self.curvature.squares_in(left.vectors[0]).T.to(inputs) @ inputs).unsqueeze(0)


@dataclass(frozen=True)
class HeadJacobian:
    """The Jacobian of the last layer's outputs in its own weights."""

    features: Sequence[Tensor]
    n: int
    c: int
    _parameters: list[HeadJacobianOf] = field(default_factory=list)

    @property
    def parameters(self) -> list[HeadJacobianOf]:
        if not self._parameters:
            self._parameters.extend(HeadJacobianOf(a, self.n, self.c) for a in self.features)
        return self._parameters

    def variance(self, covariance: Covariance) -> Tensor:
        same = torch.arange(self.c, device=covariance.root.device)
        return self._pairs(covariance, same, same)

    def covariance(self, covariance: Covariance) -> Tensor:
        rows, cols = torch.tril_indices(self.c, self.c, device=covariance.root.device).unbind()
        lower = self._pairs(covariance, rows, cols)
        out = lower.new_empty(self.n, self.c, self.c)
        out[:, rows, cols] = lower
        out[:, cols, rows] = lower
        return out

    def joint(self, covariance: Covariance) -> Tensor:
        phi, dense = self._augmented.double(), self._by_output(covariance.matrix)
        return torch.einsum("ni,cidj,mj->ncmd", phi, dense, phi).to(self.features[0])

    def variance_in(self, basis: Tensor, variances: Tensor) -> Tensor:
        phi, q = self._augmented, basis[self._order].unflatten(0, (self.c, -1))  # q: (C, I, P)
        step = max(1, _CHUNK // (self.c * basis.shape[1]))
        parts = [torch.einsum("ni,cip->ncp", part, q).square() @ variances.T for part in phi.split(step)]
        return torch.cat(parts).permute(2, 0, 1)

    def along(self, steps: Tensor) -> Tensor:
        return _along(self.features, steps, self.n, self.c)

    def _pairs(self, covariance: Covariance, rows: Tensor, cols: Tensor) -> Tensor:  # (N, pairs)
        """phi^T S[c, :, d, :] phi for the asked pairs (c, d), in chunks of examples."""
        blocks = self._by_output(covariance.matrix).transpose(1, 2)[rows, cols]  # (pairs, I, I)
        wide = blocks.permute(1, 0, 2).flatten(1)  # (I, pairs * I)
        step = max(1, _CHUNK // wide.shape[1])
        parts = []
        for phi in self._augmented.double().split(step):
            half = (phi @ wide).unflatten(1, (len(rows), -1))
            parts.append((half @ phi.unsqueeze(-1)).squeeze(-1).to(self.features[0]))
        return torch.cat(parts)

    @property
    def _augmented(self) -> Tensor:  # (N, I), the features of all tensors side by side
        return torch.cat([a.expand(self.n, -1) for a in self.features], 1)

    @property
    def _order(self) -> Tensor:  # (C * I,), where (output c, feature i) lies in the vector of all weights
        parts, start = [], 0
        for a in self.features:
            width = a.shape[1]
            parts.append(start + torch.arange(self.c * width).reshape(self.c, width))
            start += self.c * width
        return torch.cat(parts, 1).flatten()

    def _by_output(self, covariance: Tensor) -> Tensor:  # (P, P) -> (C, I, C, I)
        if len(self.features) > 1:
            order = self._order.to(covariance.device)
            covariance = covariance[order][:, order]
        return covariance.unflatten(1, (self.c, -1)).unflatten(0, (self.c, -1))


@dataclass(frozen=True)
class HeadJacobianOf:
    """One tensor's Jacobian: J[n, c, (o, i)] = [c = o] phi[n, i]."""

    features: Tensor  # (N, I), or (1, I) where it is the same for all examples
    n: int
    c: int
    _rotated: dict[Basis | None, Tensor] = field(default_factory=dict)  # squares of the rotated features

    def variance(self, spread: Spread) -> Tensor:
        by_output = spread.by_output(self.n)
        if by_output is not None:
            return (self._squares(spread.right) @ by_output).expand(self.n, self.c)
        assert spread.left is not None
        return (self._weights(spread) @ spread.left.squares[0]).expand(self.n, self.c)

    def covariance(self, spread: Spread) -> Tensor:
        w, left = self._weights(spread), spread.left
        dense = w.diag_embed() if left is None else (left.vectors * w.unsqueeze(1)) @ left.vectors.mT
        return dense.expand(self.n, self.c, self.c)

    def product(self, spread: Spread, v: Tensor) -> Tensor:
        w, left = self._weights(spread), spread.left
        return v * w if left is None else ((v @ left.vectors[0]) * w) @ left.vectors[0].T

    def joint(self, spread: Spread) -> Tensor:
        a, left = self._rotate(spread.right).expand(self.n, -1), spread.left
        inner = torch.einsum("ni,oi,mi->nmo", a, spread.variances[0], a)
        if left is None:
            dense = inner.diag_embed()
        else:
            dense = torch.einsum("co,nmo,do->nmcd", left.vectors[0], inner, left.vectors[0])
        return dense.transpose(1, 2).expand(self.n, self.c, self.n, self.c)

    def along(self, steps: Tensor, part: slice = _ALL) -> Tensor:  # (S, p) -> (S, n, C)
        rows = self.features.expand(self.n, -1)[part]
        return torch.einsum("ni,sci->snc", rows, steps.unflatten(1, (self.c, -1)))

    def alone(self) -> HeadJacobian:
        return HeadJacobian([self.features], self.n, self.c)

    def cross(self, other: Outer) -> Tensor:  # (N, C, M, L)
        return torch.einsum("nm,lmc->ncml", self._input_products(other), other.g[:, :, 0, :, 0])

    def cross_each(self, other: Outer) -> Tensor:  # (C, N, M)
        return self._input_products(other) * other.g[:, :, 0, :, 0].diagonal(dim1=0, dim2=2).T.unsqueeze(1)

    def double(self) -> HeadJacobianOf:
        return HeadJacobianOf(self.features.double(), self.n, self.c)

    def _input_products(self, other: Outer) -> Tensor:  # (N, M)
        a = other.a.read(slice(None))[:, 0, :, 0].to(self.features)
        return (self.features @ a.T).expand(self.n, -1)

    def _weights(self, spread: Spread) -> Tensor:  # (N, O), or (1, O) for a bias
        return self._squares(spread.right) @ spread.variances[0].T

    def _squares(self, right: Basis | None) -> Tensor:  # (N, I)
        if right not in self._rotated:
            self._rotated[right] = self._rotate(right).square()
        return self._rotated[right]

    def _rotate(self, right: Basis | None) -> Tensor:
        return self.features if right is None else self.features @ right.vectors[0]


def _along(features: Sequence[Tensor], steps: Tensor, n: int, c: int) -> Tensor:  # (S, P) -> (S, N, C)
    """J step: sum of step_W phi + step_b."""
    parts = steps.split([c * a.shape[1] for a in features], -1)
    total = steps.new_zeros(())
    for a, part in zip(features, parts, strict=True):
        total = total + a @ part.unflatten(-1, (c, -1)).mT
    return total.expand(len(steps), n, c)


def _outer(u: Tensor, a: Tensor) -> Tensor:  # (M, C), (M, I) -> (M, C * I)
    return (u.unsqueeze(2) * a.unsqueeze(1)).flatten(1)


@dataclass(frozen=True)
class Chosen:
    """Some rows of a Jacobian: what is asked of all outputs is cut to the chosen ones."""

    whole: Any  # Jacobian or JacobianOf
    index: Tensor

    @property
    def parameters(self) -> list[Chosen]:
        return [Chosen(part, self.index) for part in self.whole.parameters]

    def variance(self, of: Any) -> Tensor:
        return self.whole.variance(of)[:, self.index]

    def covariance(self, of: Any) -> Tensor:
        return self.whole.covariance(of)[:, self.index][:, :, self.index]

    def joint(self, of: Any) -> Tensor:
        return self.whole.joint(of)[:, self.index][..., self.index]

    def along(self, steps: Tensor, *part: slice) -> Tensor:
        return self.whole.along(steps, *part)[..., self.index]

    def alone(self) -> Chosen:
        return Chosen(self.whole.alone(), self.index)

    def cross(self, other: Outer) -> Tensor:
        return self.whole.cross(other)[:, self.index]

    def double(self) -> Chosen:
        return Chosen(self.whole.double(), self.index)
