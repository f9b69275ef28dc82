"""Learned uncertainty units (Kristiadi, Hein, Hennig 2021): hidden units that change no output, only its variance.

New units have zero outgoing weights, so that the network computes what it did. Their incoming weights are free, and a
Laplace approximation sees them: with the features phi of the last layer, new ones included, and its curvature
beta A, A = mean of phi phi^T over the data, the variance of an output is

    v(x) = phi(x)^T (beta A + delta I)^-1 phi(x)

(exact for regression, where beta = N / sigma^2; for classes beta is the mean eigenvalue of the summed Lambda). The free
weights minimise

    mean of v over the data / v0  -  log(mean of v over outside inputs / v0')

where v0 and v0' are the two means before: what happens on the data is paid for in full, what is gained outside counts
in its logarithm.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from laplace.algebra import cholesky
from laplace.backprop import Head
from laplace.batches import Inputs, Keys, device_of, prediction_batches
from laplace.budget import Budget
from laplace.checks import positive, whole_number
from laplace.errors import InputError, NumericalError, UnsupportedError
from laplace.likelihoods import Likelihood, likelihood_named
from laplace.precision import plainly
from laplace.tuning.units import Chain, widening
from laplace.weights import Last


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
    """A new network with the same outputs, whose Laplace approximation is less certain on inputs like `ood_loader`'s.

    Fit `Laplace` on it as on any other. A chain of linear layers and activations gets `units` more in each hidden
    layer, any other network as many beside the features of its last layer.

    Args:
        model: the trained network; it is never changed.
        likelihood: as of `Laplace`.
        train_loader: batches, as `Laplace.fit` takes them.
        ood_loader: inputs from outside the distribution, as `Laplace.predict` takes them.
        units: how many hidden units are added.
        prior_precision: of the posterior whose variances they are trained for.
        sigma_noise: likewise, of a regression.
        steps: of Adam.
        lr: of Adam.
        max_inputs: how many of each loader are used, at most.
        seed: what the new weights are drawn by.
        dict_key_x: as of `Laplace`.
        dict_key_y: as of `Laplace`.

    Returns:
        The wider network.

    Raises:
        InputError: a loader without an input.
        UnsupportedError: preferences between pairs.
        NumericalError: training of the new units that diverged.
    """
    kind = likelihood_named(likelihood)
    if kind.pairs:
        raise UnsupportedError(f"uncertainty units are for single inputs; {kind.name!r} is of pairs.")
    keys = Keys(dict_key_x, dict_key_y, kind.further)
    units, steps, room = (
        whole_number(value, name) for value, name in ((units, "units"), (steps, "steps"), (max_inputs, "max_inputs"))
    )
    delta, sigma, rate = (
        float(positive(value, name))
        for value, name in ((prior_precision, "prior_precision"), (sigma_noise, "sigma_noise"), (lr, "lr"))
    )
    data = _collect(train_loader, model, keys, room, "training")
    outside = _collect(ood_loader, model, keys, room, "out-of-distribution")
    last = Last(None, None).find(model, data[0])
    wider = widening(model, last, units, torch.Generator().manual_seed(whole_number(seed, "seed", 0)))
    head = Head(model, last, Budget())
    runs, others = [head.forward(inputs) for inputs in data], [head.forward(inputs) for inputs in outside]
    curvature = sum(float(kind.fisher(run.outputs).squares().sum()) for run in runs) / runs[0].outputs.shape[1]
    features, far = torch.cat([run.features for run in runs]), torch.cat([run.features for run in others])
    beta = curvature * float(kind.curvature_scale("ggn", torch.tensor(sigma)))
    before = variances(features, far, beta, delta)
    if isinstance(wider, Chain):  # its new units begin at the input
        features, far = (torch.cat([inputs.tensors()[0] for inputs in part]) for part in (data, outside))
    _train(
        wider.free, lambda: variances(wider.features(features), wider.features(far), beta, delta), before, steps, rate
    )
    return wider.network()


def variances(phi: Tensor, far: Tensor, beta: float, delta: float) -> tuple[Tensor, Tensor]:  # (N, H), (M, H)
    """Means over both sets of phi^T (beta A + delta I)^-1 phi, with A the mean of phi phi^T over the first."""
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


def _collect(loader: Any, model: nn.Module, keys: Keys, room: int, what: str) -> list[Inputs]:
    """The first inputs of a loader, on the network's device."""
    parts, count = [], 0
    for inputs in prediction_batches(loader, keys, {}, progress=False):
        size = inputs.size or 1
        parts.append(inputs.part(0, room - count).to(device_of(model)))
        count += size
        if count >= room:
            break
    if not parts:
        raise InputError(f"the {what} loader gave no batch.")
    return parts
