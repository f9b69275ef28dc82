"""Learned uncertainty units (Kristiadi, Hein, Hennig 2021): hidden units that change no output, only its variance.

New units have zero outgoing weights, so the network computes the same outputs. Their incoming weights are free, and a
Laplace approximation sees them: with the features phi of the last layer, new ones included, and its curvature beta A,
where A is the mean of phi phi^T over the data, the variance of an output is

    v(x) = phi(x)^T (beta A + delta I)^-1 phi(x)

(exact for regression, where beta = N / sigma^2; for classes beta is the mean eigenvalue of the summed Lambda). The free
weights minimise

    mean of v over the data / v0  -  log(mean of v over outside inputs / v0')

where v0 and v0' are the two means before training. More variance on the data costs in proportion; more variance outside
counts only by its logarithm.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from laplace.backprop import Head
from laplace.backprop.head import HeadForward
from laplace.budget import Budget
from laplace.checks import LARGEST, one_positive, whole_number
from laplace.errors import InputError, ModelError, NumericalError, UnsupportedError, within
from laplace.likelihoods import Likelihood, likelihood_named
from laplace.linalg.autocast import plainly
from laplace.linalg.symmetric import cholesky
from laplace.network.batches import device_of, prediction_batches
from laplace.network.inputs import Inputs, Keys
from laplace.network.replica import replicate
from laplace.network.sharing import Sharing
from laplace.tuning.units import Chain, widening
from laplace.weights import LastLayer


@plainly
def with_uncertainty_units(
    model: nn.Module,
    likelihood: Likelihood | str,
    train_loader: Iterable[Any],
    ood_loader: Any,
    units: int = 32,
    *,
    prior_precision: float = 1.0,
    sigma_noise: float = 1.0,
    steps: int = 100,
    lr: float = 1e-2,
    max_inputs: int = 2048,
    seed: int = 0,
    dict_key_x: str = "input_ids",
    dict_key_y: str = "labels",
) -> nn.Module:
    """Return a network with the same outputs whose Laplace approximation is less certain on outside inputs.

    Fit `Laplace` on it as on any other network. A chain of linear layers and activations gets `units` more units in
    each hidden layer. Any other network gets them beside the features of its last layer, which must be an nn.Linear or
    a convolution with a kernel of 1. Outputs may be at positions, (N, T, C) or (N, C, H, W).

    Args:
        model: The trained network. It is never changed.
        likelihood: A likelihood object or name, as in `Laplace`.
        train_loader: Batches, as `Laplace.fit` takes them.
        ood_loader: Inputs from outside the distribution, as `Laplace.predict` takes them.
        units: How many hidden units to add.
        prior_precision: The prior precision of the posterior whose variances the new units are trained for.
        sigma_noise: The observation noise of that posterior, for regression.
        steps: How many steps of Adam.
        lr: The learning rate of Adam.
        max_inputs: How many inputs of each loader to use at most.
        seed: The seed of the new weights.
        dict_key_x: The key of the inputs in batches that are mappings, as in `Laplace`.
        dict_key_y: The key of the labels in batches that are mappings, as in `Laplace`.

    Returns:
        The wider network, a copy.

    Raises:
        InputError: a loader gave no input.
        UnsupportedError: the likelihood is over pairs, or the network does more with its last layer than call it.
        NumericalError: training of the new units diverged.
    """
    kind = likelihood_named(likelihood)
    if kind.pairs:
        raise UnsupportedError(f"uncertainty units are for single inputs; {kind.name!r} compares pairs.")
    keys = Keys(dict_key_x, dict_key_y, kind.further)
    units, steps, room = (
        whole_number(value, name) for value, name in ((units, "units"), (steps, "steps"), (max_inputs, "max_inputs"))
    )
    delta, sigma, rate = (
        one_positive(value, name)
        for value, name in ((prior_precision, "prior_precision"), (sigma_noise, "sigma_noise"), (lr, "lr"))
    )
    data = _collect(train_loader, model, keys, room, "training")
    outside = _collect(ood_loader, model, keys, room, "out-of-distribution")
    last = LastLayer().find(model, data[0])
    wider = widening(model, last, units, torch.Generator().manual_seed(whole_number(seed, "seed", 0, LARGEST)))
    class_dim = -1 if isinstance(last.layer(model), nn.Linear) else 1  # the dimension that the last layer works on
    head = Head(replicate(model), last, Budget(), class_dim)
    runs, others = _runs(head, data, "training"), _runs(head, outside, "out-of-distribution")
    curvature = sum(float(kind.fisher(run.outputs).squares().sum()) for run in runs) / runs[0].outputs.shape[1]
    features, far = torch.cat([run.features for run in runs]), torch.cat([run.features for run in others])  # rows
    beta = curvature * float(kind.curvature_scale("ggn", torch.tensor(sigma)))
    before = variances(features, far, beta, delta)
    read = [features], [far]
    if isinstance(wider, Chain):  # its new units read the inputs themselves
        read = _joined(data), _joined(outside)

    def now() -> tuple[Tensor, Tensor]:
        phi, phi_far = (torch.cat([wider.features(x).flatten(0, -2) for x in part]) for part in read)
        return variances(phi, phi_far, beta, delta)

    _train(wider.free, now, before, steps, rate)
    network = wider.network()
    _require_same_outputs(model, network, data[0], last.module)
    return network


def variances(phi: Tensor, far: Tensor, beta: float, delta: float) -> tuple[Tensor, Tensor]:  # (N, H), (M, H)
    """Return the mean of phi^T (beta A + delta I)^-1 phi over each set; A is the mean of phi phi^T over the first."""
    phi, far = phi.double(), far.double()
    precision = beta / len(phi) * phi.T @ phi + delta * torch.eye(phi.shape[1], dtype=phi.dtype, device=phi.device)
    root = cholesky(precision)
    inside, outside = (torch.linalg.solve_triangular(root, part.T, upper=False) for part in (phi, far))
    return inside.square().sum(0).mean(), outside.square().sum(0).mean()


def _train(
    free: list[Tensor],
    variances_now: Callable[[], tuple[Tensor, Tensor]],
    before: tuple[Tensor, Tensor],
    steps: int,
    lr: float,
) -> None:
    optimizer = torch.optim.Adam(free, lr)
    with torch.enable_grad():
        for step in range(steps):
            optimizer.zero_grad()
            inside, outside = variances_now()
            objective = inside / before[0] - torch.log(outside / before[1])
            if not objective.isfinite():
                raise NumericalError(f"the objective of the new units is {float(objective)} at step {step}: lower lr=.")
            objective.backward()
            optimizer.step()


def _joined(parts: list[Inputs]) -> list[Tensor]:
    """Return the inputs as one tensor, or unchanged if their shapes differ."""
    tensors = [inputs.tensors()[0] for inputs in parts]
    return [torch.cat(tensors)] if len({t.shape[1:] for t in tensors}) == 1 else tensors


def _require_same_outputs(model: nn.Module, wider: nn.Module, inputs: Inputs, name: str) -> None:
    """Refuse a network that does more with its last layer than call it."""
    with torch.no_grad():
        f = inputs.map(torch.clone).call(replicate(model))
        try:
            new = inputs.map(torch.clone).call(replicate(wider))
        except ModelError as error:
            why = f"fails: {error}"
        else:
            if new.shape == f.shape and torch.allclose(new, f, rtol=0, atol=1e-3 * float(f.abs().max())):
                return
            why = "gives other outputs."
    raise UnsupportedError(
        f"with units beside the inputs of its last layer {name!r}, the network {why} Its forward must call the layer "
        "on the features and do nothing else with it."
    )


def _runs(head: Head, batches: list[Inputs], what: str) -> list[HeadForward]:
    runs = []
    for index, inputs in enumerate(batches):
        with within(f"{what} batch {index}"):
            runs.append(head.forward(inputs))
    return runs


def _collect(loader: Any, model: nn.Module, keys: Keys, room: int, what: str) -> list[Inputs]:
    """Return the first inputs of a loader, on the network's device."""
    parts, count, sharing = [], 0, Sharing()
    for _, inputs in prediction_batches(loader, keys, {}, progress=False):
        inputs = sharing.told_apart(inputs.as_tensors(model).to(device_of(model)), model)
        size = inputs.size or 1
        parts.append(inputs.part(0, room - count).copied())
        count += size
        if count >= room:
            break
    if not parts:
        raise InputError(f"the {what} loader gave no batch; give at least one.")
    return parts
