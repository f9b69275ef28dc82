"""Everything densely, in float64, straight from the formulas. Slow and obvious on purpose."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev, vmap


def jacobian(model: nn.Module, names: list[str], x: Tensor) -> Tensor:
    """df/dtheta by autograd through the whole network, (N, C, P)."""
    parameters = {k: p.detach() for k, p in model.named_parameters()}
    tracked = {k: parameters[k] for k in names}

    def f(chosen: dict[str, Tensor], one: Tensor) -> Tensor:
        return functional_call(model, {**parameters, **chosen}, (one.unsqueeze(0),)).squeeze(0)

    blocks = vmap(jacrev(f), (None, 0))(tracked, x)
    return torch.cat([blocks[k].flatten(2) for k in names], 2)


def log_prob(task: str, f: Tensor, y: Tensor, sigma: Tensor | float = 1.0) -> Tensor:
    """log p(y given f) of one example."""
    if task == "classification":
        return f.log_softmax(-1)[y]
    sigma = torch.as_tensor(sigma, dtype=f.dtype)
    return (-0.5 * ((y - f) / sigma) ** 2 - sigma.log() - 0.5 * math.log(2 * math.pi)).sum()


def hessian_of_loss(task: str, f: Tensor, y: Tensor) -> Tensor:
    """-d2 log p / df2 by autograd, (N, C, C)."""
    return torch.stack(
        [-torch.autograd.functional.hessian(lambda g, y=b: log_prob(task, g, y), a) for a, b in zip(f, y, strict=True)]
    )


def scores(task: str, f: Tensor, y: Tensor) -> Tensor:
    """d log p / df by autograd, (N, C)."""
    rows = []
    for a, b in zip(f, y, strict=True):
        a = a.clone().requires_grad_()
        rows.append(torch.autograd.grad(log_prob(task, a, b), a)[0])
    return torch.stack(rows)


@dataclass
class Dense:
    """A dense posterior N(mean, (s H + D)^-1)."""

    task: str
    sizes: list[int]
    mean: Tensor  # (P,)
    h: Tensor  # (P, P), at unit noise
    loglik: object  # sigma -> log p(D given mean)
    power: int = 2  # of 1/sigma in the curvature

    def precision(self, delta: Tensor, sigma: float | Tensor = 1.0, temperature: float = 1.0) -> Tensor:
        return (
            self.h * (sigma**-self.power / temperature if self.task == "regression" else 1 / temperature) + delta.diag()
        )

    def covariance(self, delta: Tensor, **kw: float) -> Tensor:
        return torch.linalg.inv(self.precision(delta, **kw))

    def evidence(
        self, delta: Tensor, mu: Tensor | float = 0.0, sigma: float | Tensor = 1.0, temperature: float = 1.0
    ) -> Tensor:
        offset = self.mean - mu
        scatter = (offset**2 * delta).sum()
        ratio = torch.logdet(self.precision(delta, sigma, temperature)) - delta.log().sum()
        return self.loglik(sigma) / temperature - 0.5 * (scatter + ratio)  # type: ignore[operator]

    def expand(self, delta: float | list[float] | Tensor) -> Tensor:
        """A scalar, per-tensor or per-weight precision as one value per weight."""
        delta = torch.as_tensor(delta, dtype=torch.float64).reshape(-1)
        if len(delta) == 1:
            return delta.expand(sum(self.sizes)).clone()
        if len(delta) == len(self.sizes):
            return torch.cat([d.expand(s) for d, s in zip(delta, self.sizes, strict=True)])
        return delta


def fit(
    model: nn.Module, names: list[str], x: Tensor, y: Tensor, task: str, structure: str, curvature: str = "ggn"
) -> Dense:
    """The posterior's ingredients for all the data at once."""
    f = model(x).detach()
    jac = jacobian(model, names, x)
    shapes = [dict(model.named_parameters())[k].shape for k in names]
    sizes = [s.numel() for s in shapes]
    if curvature == "ggn":
        lam = hessian_of_loss(task, f, y)
    else:
        s = scores(task, f, y)
        lam = s.unsqueeze(2) * s.unsqueeze(1)
    h = torch.einsum("ncp,ncd,ndq->pq", jac, lam, jac)
    if structure == "diag":
        h = h.diag().diag()
    elif structure == "kron":
        h = kron_last_layer(model, names, x, lam)
    mean = torch.cat([dict(model.named_parameters())[k].detach().flatten() for k in names])

    def loglik(sigma: float | Tensor) -> Tensor:
        return torch.stack([log_prob(task, a, b, sigma) for a, b in zip(f, y, strict=True)]).sum()

    return Dense(task, sizes, mean, h, loglik, 4 if curvature == "ef" else 2)


def kron_last_layer(model: nn.Module, names: list[str], x: Tensor, lam: Tensor) -> Tensor:
    """Per tensor of the last layer, (sum of Lambda) (x) (mean of phi phi^T); a bias has phi = 1."""
    module = model.get_submodule(names[0].rpartition(".")[0])
    seen: list[Tensor] = []
    handle = module.register_forward_pre_hook(lambda m, args: seen.append(args[0].detach()))
    model(x)
    handle.remove()
    phi, b, blocks = seen[0], lam.sum(0), []
    for name in names:
        a = phi.T @ phi / len(phi) if name.endswith("weight") else torch.ones(1, 1, dtype=phi.dtype)
        blocks.append(torch.kron(b, a))
    return torch.block_diag(*blocks)


def softmax_gaussian_integral(f: Tensor, covariance: Tensor, order: int = 40) -> Tensor:
    """E[softmax(f)] by Gauss-Hermite quadrature over the root of the covariance, for up to three classes."""
    nodes, weights = (torch.from_numpy(a) for a in __import__("numpy").polynomial.hermite_e.hermegauss(order))
    c = len(f)
    grid = torch.cartesian_prod(*[nodes] * c).reshape(-1, c)
    w = torch.cartesian_prod(*[weights / weights.sum()] * c).reshape(-1, c).prod(1)
    values, vectors = torch.linalg.eigh(covariance)
    return w @ (f + grid @ (vectors * values.clamp(min=0).sqrt()).T).softmax(-1)
