"""The rivals that are trained in their own way, by maintained libraries: variational Bayes, IVON, cyclical SGHMC."""

from __future__ import annotations

import copy
import math
import time
import warnings
from collections.abc import Iterator

import torch
from benchmarks.harm.networks import lenet
from experiments.uq.shuffled import Shuffled
from experiments.uq_mnist.networks import BATCH, DECAY
from torch import Tensor, nn
from torch.distributions import Normal, kl_divergence
from torch.func import functional_call
from torch.nn.functional import cross_entropy, softplus

CYCLES, KEPT = 4, 3  # of SGHMC, and the networks kept at the end of each
STEP, FRICTION = 0.1, 1.0  # as SGD with a learning rate of .01 and momentum .9
RATE, HESSIAN, MEMORY = 0.3, 0.1, 0.999  # of IVON: the best of five settings by validation NLL, on another seed
Labelled = tuple[Tensor, Tensor]
States = list[dict[str, Tensor]]


def variational(start: nn.Module, data: Labelled, epochs: int, seed: int, draws: int) -> tuple[States, float]:
    """Train a mean-field Gaussian by flipout from the trained network, and draw networks from it.

    Its prior is that of the network's weight decay, N(0, 1 / (N decay)).
    """
    from bayesian_torch.models.dnn_to_bnn import dnn_to_bnn

    torch.manual_seed(seed)
    begun, n = time.process_time(), len(data[0])
    model, deviation = copy.deepcopy(start), (n * DECAY) ** -0.5
    options = {"prior_mu": 0.0, "prior_sigma": deviation, "posterior_mu_init": 0.0, "posterior_rho_init": -4.0}
    dnn_to_bnn(model, options | {"type": "Flipout", "moped_enable": True, "moped_delta": 0.1})
    steps = epochs * n // BATCH
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(epochs):
        for x, y in Shuffled(data, n, seed, BATCH):
            optimizer.zero_grad()
            (cross_entropy(model(x), y) + divergence(model, deviation) / n).backward()
            optimizer.step()
            schedule.step()
    return [_drawn(model, start) for _ in range(draws)], time.process_time() - begun


def divergence(model: nn.Module, deviation: float) -> Tensor:
    """Return the KL divergence of the variational posterior from the prior N(0, deviation^2), summed over all weights.

    The library's own `get_kl_loss` takes the mean over each tensor, which makes the prior too weak by its size.
    """
    params, prior = dict(model.named_parameters()), Normal(0.0, deviation)
    pairs = [(mu, params[name.replace("mu_", "rho_")]) for name, mu in params.items() if ".mu_" in name]
    return torch.stack([kl_divergence(Normal(mu, softplus(rho)), prior).sum() for mu, rho in pairs]).sum()


def _drawn(model: nn.Module, like: nn.Module) -> dict[str, Tensor]:
    """Draw the weights of a plain network from the variational posterior."""
    found, kernels = {}, {"weight": ("kernel", "weight"), "bias": ("bias",)}
    for name, p in like.named_parameters():
        layer, which = name.rsplit(".", 1)
        own = dict(model.get_submodule(layer).named_parameters())
        kind = next(k for k in kernels[which] if f"mu_{k}" in own)
        deviation = softplus(own[f"rho_{kind}"])
        found[name] = (own[f"mu_{kind}"] + deviation * torch.randn_like(p)).detach()
    return found


def online(data: Labelled, epochs: int, seed: int, draws: int) -> tuple[States, float]:
    """Train a mean-field Gaussian from the start by IVON, an optimiser in place of Adam, and draw networks from it.

    Its prior is that of the other networks' weight decay, N(0, 1 / (N decay)).
    """
    from ivon import IVON

    torch.manual_seed(seed)
    begun, network, n = time.process_time(), lenet(), len(data[0])
    optimizer = IVON(network.parameters(), RATE, ess=n, hess_init=HESSIAN, beta2=MEMORY, weight_decay=DECAY)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * -(-n // BATCH))
    for _ in range(epochs):
        for x, y in Shuffled(data, n, seed, BATCH):
            with optimizer.sampled_params(train=True):
                optimizer.zero_grad()
                cross_entropy(network(x), y).backward()
            optimizer.step()
            schedule.step()
    found: States = []
    for _ in range(draws):
        with optimizer.sampled_params():
            found.append({name: p.detach().clone() for name, p in network.named_parameters()})
    return found, time.process_time() - begun


def cyclical(data: Labelled, epochs: int, seed: int) -> tuple[States, float]:
    """Sample by SGHMC with a learning rate that falls in cycles; noise is added in the second half of each.

    `epochs` is the length of one cycle.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        from posteriors.sgmcmc import sghmc

    torch.manual_seed(seed)
    begun, network, n = time.process_time(), lenet(), len(data[0])
    length = epochs * (n // BATCH)

    def log_posterior(params: dict[str, Tensor], batch: Labelled) -> tuple[Tensor, Tensor]:
        x, y = batch
        f = functional_call(network, params, (x,))
        decay = sum(p.square().sum() for p in params.values())
        return -cross_entropy(f, y) - DECAY / 2 * decay, f

    def share(step: int) -> float:
        return (int(step) % length) / length

    transform = sghmc.build(
        log_posterior,
        lr=lambda step: STEP * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * share(step)))),
        alpha=FRICTION,
        temperature=lambda step: 1 / n if share(step) > 0.5 else 0.0,
        momenta=0.0,
    )
    state = transform.init({name: p.detach().clone() for name, p in network.named_parameters()})
    at = {length - 1 - k * max(1, length // 20) for k in range(KEPT)}
    found: States = []
    for step, batch in zip(range(CYCLES * length), _endless(data, seed), strict=False):
        state, _ = transform.update(state, batch)
        if step % length in at:
            found.append({name: p.clone() for name, p in state.params.items()})
    return found, time.process_time() - begun


def _endless(data: Labelled, seed: int) -> Iterator[Labelled]:
    order = Shuffled(data, len(data[0]) // BATCH * BATCH, seed, BATCH)
    while True:
        yield from order


def packed(states: States, seconds: float) -> dict[str, Tensor]:
    """Return the tensors of a cache file."""
    return {key: torch.stack([s[key] for s in states]) for key in states[0]} | {"seconds": torch.tensor(seconds)}


def unpacked(kept: dict[str, Tensor]) -> tuple[list[nn.Module], float]:
    """Return the networks of a cache file, and the CPU seconds."""
    kept = dict(kept)
    seconds, networks = float(kept.pop("seconds")), []
    for k in range(len(next(iter(kept.values())))):
        network = lenet()
        network.load_state_dict({key: value[k] for key, value in kept.items()})
        networks.append(network.eval())
    return networks, seconds
