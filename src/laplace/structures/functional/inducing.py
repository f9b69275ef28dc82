"""Choose the locations of inducing points: at data, at the centres of clusters, or where they explain most.

The quality of a set of inducing points Z is the share of the curvature's trace that they explain,

    tr(Kzz^-1 Q) / t,    Q = sum over n of Kzn Lambda_n Knz,    t = sum over n of tr(Lambda_n Knn).

The evidence is at most s/(2 delta) (t - tr(Kzz^-1 Q)) above its variational bound, whatever prior precision delta and
noise are (Burt et al. 2019). Q and t are sums over the data, so that a batch gives gradients without bias.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from laplace.backprop.gradients import Engine
from laplace.backprop.uses import Use
from laplace.errors import InputError
from laplace.linalg.symmetric import cholesky
from laplace.network.batches import Batch
from laplace.network.inputs import Inputs
from laplace.structures.functional.kernel import cross
from laplace.structures.functional.points import Points

_BATCH = 64  # points of the data in a step
_RATE = 0.05  # of Adam, in standard deviations of the inputs; it falls to zero
_ROUNDS = 25  # of k-means
_JITTER = 1e-8  # added to Kzz, relative to its mean diagonal: two points may meet


def given(locations: object, like: Inputs, wanted: int | None) -> Inputs:
    """Return the user's own locations as inputs of the kind that the data has."""
    inputs = replace(like, x=locations, shared=None)
    size = inputs.size
    if size is None:
        raise InputError("the inducing points must have the form of the inputs, one row for each point.")
    if wanted not in (None, size):
        raise InputError(f"n_subset={wanted}, but {size} inducing points were given. Leave n_subset out.")
    own = like.tensors()
    return inputs.map(lambda t: t.detach().to(own[0].device, own[0].dtype if t.is_floating_point() else t.dtype))


def centres(start: Inputs, data: Batch) -> Inputs:
    """Return the centres of clusters of the inputs by k-means, from the points of `start`."""
    x = data.inputs.tensors()[0].flatten(1)  # (N, D)
    z = start.tensors()[0].flatten(1)  # (M, D)
    for _ in range(_ROUNDS):
        nearest = torch.cdist(x, z).argmin(1)
        counts = torch.bincount(nearest, minlength=len(z)).unsqueeze(1).to(x)
        sums = torch.zeros_like(z).index_add_(0, nearest, x)
        moved = torch.where(counts > 0, sums / counts.clamp(min=1), z)
        if torch.equal(moved, z):
            break
        z = moved
    return start.with_tensors([z.reshape(start.tensors()[0].shape)])


def trained(start: Inputs, units: Tensor, data: Batch, engine: Engine, steps: int, seed: int) -> Inputs:
    """Return locations that explain more of the curvature of `data` than those of `start`: Adam on batches of the data.

    Args:
        start: the first locations, M points.
        units: the unit vectors of the outputs, (C, M, C).
        data: points of the data with the vectors behind Lambda, (N, K, C).
        engine: runs the network.
        steps: the number of steps.
        seed: the seed for drawing batches.
    """
    x = data.inputs.tensors()[0]
    generator = torch.Generator().manual_seed(seed)
    with torch.inference_mode(False), torch.enable_grad():
        z = start.tensors()[0].clone()
        spread = x.std(0).where(x.std(0) > 0, torch.ones(()).to(x))
        moves = torch.zeros_like(z).requires_grad_()
        adam = torch.optim.Adam([moves], lr=_RATE)
        schedule = torch.optim.lr_scheduler.LinearLR(adam, 1.0, 0.0, steps)
        for _ in range(steps):
            chosen = torch.randint(len(x), (min(_BATCH, len(x)),), generator=generator)
            adam.zero_grad()
            own = _gradients(start.with_tensors([z + spread * moves]), units, engine, with_grad=True)
            (-_explained(own, _of_rows(data, chosen, engine))).backward()
            adam.step()
            schedule.step()
    end = start.with_tensors([(z + spread * moves).detach()])
    with torch.no_grad():
        whole = _of_rows(data, torch.arange(len(x)), engine)
        before, after = (_explained(_gradients(at, units, engine), whole) for at in (start, end))
    return end if after > before else start


def _explained(inducing: list[Use], data: list[Use]) -> Tensor:  # ()
    """Return tr(Kzz^-1 Q) / t for the gradients of unit vectors at Z and of Lambda's vectors at data."""
    kzz, kxz = _kernel(inducing, inducing), _kernel(data, inducing)
    jitter = _JITTER * kzz.detach().diagonal().mean() * torch.eye(len(kzz), dtype=kzz.dtype, device=kzz.device)
    rows = torch.linalg.solve_triangular(cholesky(kzz + jitter).mT, kxz, upper=True, left=False)
    return rows.square().sum() / torch.stack([use.double().trace() for use in data]).sum()


def _kernel(left: Sequence[Use], right: Sequence[Use]) -> Tensor:
    return torch.stack([cross(one, two) for one, two in zip(left, right, strict=True)]).sum(0)


def _gradients(inputs: Inputs, vectors: Tensor, engine: Engine, with_grad: bool = False) -> list[Use]:
    return [*engine.forward(inputs, with_grad).sent(vectors)]


def _of_rows(data: Batch, index: Tensor, engine: Engine) -> list[Use]:
    """Return the gradients of some points of the data."""
    with torch.no_grad():
        return _gradients(data.inputs.at(index), data.y[index.to(data.y.device)].transpose(0, 1), engine)


def movable(points: Points) -> Batch:
    """Return the points as one batch. Refuse what cannot be moved: words, several tensors, points of several shapes."""
    tensors = [part.inputs.tensors() for part in points.parts]
    shapes = {t.shape[1:] for own in tensors for t in own}
    if len(shapes) > 1 or any(len(own) != 1 or not own[0].is_floating_point() for own in tensors):
        raise InputError(
            "moving inducing points, as inducing='kmeans' and inducing_steps do, needs inputs that are one tensor of "
            "real numbers, all of the same shape. Take inducing='random' with inducing_steps=0."
        )
    inputs = points.parts[0].inputs.with_tensors([torch.cat([own[0] for own in tensors])])
    return Batch(0, inputs, torch.cat([part.y for part in points.parts]))


def as_points(inputs: Inputs, units: Tensor) -> Points:  # units: (C, M, C)
    """Return locations as points of one batch."""
    return Points([Batch(0, inputs, units.transpose(0, 1))], torch.arange(units.shape[1]))
