"""Treat the last linear layer: its input is the features phi, and the gradient at its output is v itself.

So one forward pass without autograd is enough. Every moment and covariance has a closed form in phi and Lambda.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from laplace.backprop.activations import Stored
from laplace.backprop.head_jacobian import HeadJacobian, along
from laplace.backprop.head_moments import HeadMoments
from laplace.backprop.outer import Outer
from laplace.backprop.uses import EVERY
from laplace.budget import Budget
from laplace.errors import ModelError
from laplace.linalg.output_curvature import OutputCurvature
from laplace.network.inputs import Inputs
from laplace.predictive.positions import Positions
from laplace.weights.last_layer import FoundLastLayer, asked, close, is_output, last_of, positions_picked
from laplace.weights.pointwise import Pointwise
from laplace.weights.pointwise import features as features_last

_LEAST = 4096  # runs with fewer rows are not cut: products of many rows are fast


_Call = tuple[Tensor, int, Tensor, int]  # input and output of the layer, with their versions


class Head:
    """Runs a replica of a network up to and through its last layer."""

    linear = True
    plan = None

    def __init__(self, replica: nn.Module, weights: FoundLastLayer, budget: Budget, class_dim: int | None = -1) -> None:
        self.replica, self.weights, self.class_dim, self.budget = replica, weights, class_dim, budget
        self._layer, self._seen = weights.layer(replica), list[_Call]()
        if type(self._layer) is nn.Linear and not _has_own_calls(self._layer):  # a hook takes as long as the layer
            self._layer.__class__ = _Recorded
            self._layer.__dict__["_calls_seen"] = self._seen
        else:
            self._layer.register_forward_hook(partial(_capture, self._seen), with_kwargs=True)

    def room(self) -> int:
        """Return 0: batches are not joined. Their features are small, and are collected before products are taken."""
        return 0

    def most(self, inputs: Inputs) -> int:
        """Return a number that no batch exceeds: no graph is kept."""
        return 2**62

    def chunks(self, inputs: Inputs, n_outputs: int) -> Iterator[Inputs]:
        """Yield the inputs unchanged, since no gradients are kept."""
        yield inputs

    def confirmed(self, inputs: Inputs) -> bool:
        """Return True: nothing was learned that could be wrong. Each run compares its outputs with the layer's."""
        return True

    def forward(self, inputs: Inputs, with_grad: bool = False) -> HeadForward:
        """Return features and outputs of a batch, differentiable in the inputs only `with_grad`."""
        layer, name = self._layer, self.weights.module
        self._seen.clear()
        try:
            with torch.inference_mode(False), torch.enable_grad() if with_grad else torch.no_grad():
                f = inputs.normal_tensors().copied().singles().call(self.replica)  # a network may write to its inputs
            seen = [*self._seen]
        finally:
            self._seen.clear()
        if len(seen) != 1:
            raise ModelError(
                f"the last layer {name!r} was called {len(seen)} times in one run; once is needed. Take "
                "subset_of_weights='all', or the layer's name as subset_of_weights=[name]."
            )
        phi, phi_version, out, version = seen[0]
        at = self._picked(inputs, layer, phi, out, f)
        self._check(out, version, f, at)
        if phi._version != phi_version:
            raise ModelError(
                f"the input of the last layer {name!r} is written to in place after the layer has read it. Replace "
                "that operation (h = h + x instead of h += x)."
            )
        dtype = torch.promote_types(f.dtype, torch.float32)
        with nullcontext() if with_grad else torch.no_grad():
            f, phi = inputs.combined(f), inputs.combined(self.weights.reduce(features_last(layer, phi), at))
            positions = Positions.of(f, self.class_dim)
            rows, features = positions.rows(f).to(dtype), phi.flatten(0, -2).to(dtype)
        if len(features) != len(rows):
            made = -1 if isinstance(layer, nn.Linear) else 1
            raise ModelError(
                f"the outputs {tuple(f.shape)} with class_dim={self.class_dim} are {len(rows)} x {positions.c}; the "
                f"last layer {name!r} gives {out.shape[0]} examples at {len(features) // max(1, out.shape[0])} "
                f"positions. class_dim must name the dimension that the last layer makes: write class_dim={made}."
            )
        return HeadForward(rows, features, self.weights, positions, self.budget, 0.0 if inputs.pairs else 1.0)

    def at_one(self, x: Tensor) -> tuple[Tensor, Tensor] | None:  # (1, ...) -> (1, C), (1, H)
        """Return outputs and features of one example. None if anything about the run is out of the ordinary."""
        seen = self._seen
        seen.clear()
        try:
            out = self.replica(x.clone())  # a network may write to its input
            calls = [*seen]
        finally:
            seen.clear()
        if len(calls) != 1:
            return None
        phi, phi_version, f, version = calls[0]
        ordinary = (
            (out is f or getattr(out, "logits", None) is f)
            and type(f) is type(phi) is Tensor
            and f.dim() == phi.dim() == 2
            and len(f) == len(phi) == 1
            and f._version == version
            and phi._version == phi_version
            and f.dtype is phi.dtype
        )
        return (f, phi) if ordinary else None

    def _picked(self, inputs: Inputs, layer: Pointwise, phi: Tensor, out: Tensor, f: Tensor) -> Tensor | None:  # (N,)
        """Return the position that the network picks of each row, found by its outputs. None if no row has its own."""
        same = positions_picked(out, f) if self.weights.reduction == "pick_last" else None
        if same is None:
            return None
        at, first = last_of(same), same.int().argmax(1)
        h = features_last(layer, phi)
        if close(self.weights.reduce(h, first).detach(), self.weights.reduce(h, at).detach()):
            return at
        same = positions_picked(*asked(self.replica, layer, inputs.normal_tensors().copied()))  # tied outputs
        self._seen.clear()
        return at if same is None else last_of(same)

    def _check(self, out: Tensor, version: int, f: Tensor, at: Tensor | None) -> None:
        if self.weights.reduction is None or out.dim() == 2:
            same = is_output(out, version, f)
        else:
            same = out._version == version and close(self.weights.reduce(out, at), f)
        if not same:
            raise ModelError(
                f"the output of the last layer {self.weights.module!r} {tuple(out.shape)} is not the network's output "
                f"{tuple(f.shape)} on this batch (feature_reduction={self.weights.reduction!r}): something changes it "
                "on the way. The network must return the layer's output itself."
            )


class _Recorded(nn.Linear):
    """Records the calls of a replica's linear layer."""

    def forward(self, input: Tensor) -> Tensor:
        output = nn.functional.linear(input, self.weight, self.bias)
        self.__dict__["_calls_seen"].append((input, input._version, output, output._version))
        return output


def _has_own_calls(layer: nn.Linear) -> bool:
    """Return whether calling a layer is more than its class says: a `forward` of its own, or hooks."""
    return "forward" in layer.__dict__ or bool(layer._forward_hooks or layer._forward_pre_hooks)


def _capture(
    seen: list[_Call], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor
) -> None:
    """Record a call of the layer."""
    phi = args[0] if args else kwargs["input"]
    seen.append((phi, phi._version, output, output._version))


@dataclass(frozen=True)
class HeadForward:
    """Holds one run: outputs f = W phi + b."""

    outputs: Tensor  # (N, C), or a row for each position that counts
    features: Tensor  # (N, H)
    weights: FoundLastLayer
    positions: Positions
    budget: Budget
    constant: float = 1.0  # input of the bias; 0 for the difference of two inputs, where it cancels

    def copied(self) -> HeadForward:
        """Return a copy. Features may be the inputs themselves, which a loader may refill."""
        return replace(self, outputs=self.outputs.clone(), features=self.features.clone())

    def counting(self, kept: Tensor) -> HeadForward:  # (M,), indices into the rows
        """Return the same run with only some rows counted."""
        return replace(self, outputs=self.outputs[kept], features=self.features[kept])

    def cut(self) -> Iterator[tuple[HeadForward, slice]]:
        """Yield the run, in parts if it has so many positions that their covariances would not fit at once."""
        m, c = self.outputs.shape
        step = max(_LEAST, self.budget.count(4 * self.outputs.element_size() * c * c))
        if not self.positions.several or m <= step:
            yield self, EVERY
            return
        for start in range(0, m, step):
            part = slice(start, start + step)
            yield replace(self, outputs=self.outputs[part], features=self.features[part]), part

    def vectors(self, curvature: OutputCurvature) -> Tensor:  # (K, N, C)
        """Return the vectors whose outer products sum to `curvature`."""
        return curvature.root()

    @property
    def inputs(self) -> list[Tensor]:
        """Return the input of each uncertain tensor: phi for the weight, a constant (1, 1) for the bias."""
        one = self.features.new_full((1, 1), self.constant)
        return [self.features if len(shape) > 1 else one for shape in self.weights.layout.shapes]

    @property
    def held(self) -> int:
        return self.outputs.numel() + self.features.numel()

    def moments(self, curvature: OutputCurvature) -> Iterator[HeadMoments]:
        """Yield second moments for all vectors of `curvature` at once."""
        kept = [a.clone() for a in self.inputs]  # kept for a while, and the batch's memory may be reused
        yield HeadMoments(kept, curvature, self.outputs.shape[0])

    def sent(self, v: Tensor) -> list[Outer]:
        """Return the gradients v phi^T."""
        g = v.unsqueeze(2).unsqueeze(4)  # (K, N, 1, O, 1)
        weights = (a.expand(len(self.outputs), -1)[:, None, :, None] for a in self.inputs)
        return [Outer(Stored(a), g) for a in weights]

    def hessian(self, loss: Any) -> None:
        """Return None: in the last layer the Hessian of these likelihoods equals the GGN, in closed form."""
        return

    def jacobian(self, outputs: Tensor | None = None, centred: bool = False) -> HeadJacobian:
        """Return the Jacobian, whose rows are phi (x) e_c; that of contrasts has phi (x) (e_c - 1/C)."""
        n, c = self.outputs.shape
        return HeadJacobian(self.inputs, n, c, outputs, centred)

    def linearised(self, steps: Tensor) -> Tensor:
        """Return sum of step_W phi + step_b, (S, P) -> (S, N, C): the outputs are linear in the last layer."""
        return along(self.inputs, steps, *self.outputs.shape)

    def perturbed(self, steps: Tensor) -> Tensor:
        """Return the network's outputs with moved weights. Exact, from the features of this one run."""
        return self.outputs + self.linearised(steps)
