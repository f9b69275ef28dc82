"""Everything densely, in float64, straight from the formulas. Slow and obvious on purpose."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
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


TABLES = (nn.Embedding, nn.EmbeddingBag)
KRONECKER = (nn.Linear, nn.Bilinear, nn.modules.conv._ConvNd, *TABLES)
INPUTS_LEFT = (nn.modules.conv._ConvTransposeNd, *TABLES)  # weights whose rows are inputs: A (x) B


Factors = tuple[Tensor, Tensor, bool]


def kron_all(model: nn.Module, names: list[str], x: Tensor, lam: Tensor, sharing: str = "expand") -> dict[str, Tensor]:
    """The Kronecker block of every weight and bias of Linear, Conv and Embedding modules."""
    blocks = {}
    for name, (b, a, inputs_left) in kron_factors(model, names, x, lam, sharing).items():
        pairs = zip(a, b, strict=True) if inputs_left else zip(b, a, strict=True)
        blocks[name] = torch.block_diag(*[torch.kron(*pair) for pair in pairs])
    return blocks


def kron_factors(
    model: nn.Module, names: list[str], x: Tensor, lam: Tensor, sharing: str = "expand", weights: Tensor | None = None
) -> dict[str, Factors]:
    """B (Gr, O, O), A (Gr, I, I) and whether the block is A (x) B, one example at a time; a bias has A = 1.

    expand: A the mean of a a^T over examples and positions, B the sum of g^T Lambda g over both; reduce: a averaged
    and g summed over positions first. Biases: g summed over positions. Groups give one pair each. A transposed
    convolution is a linear map of every input position. An embedding's a count tokens, A is its diagonal; padding is no
    position. Weights of examples are in Lambda already; A is then their mean with these weights.
    """
    blocks: dict[str, Factors] = {}
    modules = {k: m for k, m in model.named_modules() if isinstance(m, KRONECKER)}
    biases: dict[str, list[Tensor]] = {k: [] for k in modules}  # g (C, O), summed over positions
    seen: dict[str, list[tuple[Tensor, Tensor]]] = {k: [] for k in modules}  # a (T, Gr, I), g (C, T, Gr, O)
    for one in x:
        calls: list[tuple[str, Tensor, Tensor]] = []

        def hook(name: str, args: list[Tensor], out: Tensor, calls: list = calls) -> Tensor:
            calls.append((name, _read(args).detach().clone(), out))
            return out.clone()  # what follows may write to it in place

        handles = [
            m.register_forward_hook(lambda m, a, kw, o, k=k: hook(k, [*a, *kw.values()], o), with_kwargs=True)
            for k, m in modules.items()
        ]
        f = model(one.unsqueeze(0)).squeeze(0)
        for handle in handles:
            handle.remove()
        for k, a, out in calls:
            rows = [torch.autograd.grad(f[c], out, retain_graph=True)[0] for c in range(len(f))]
            seen[k].append(_positions(modules[k], a, torch.stack(rows)))
            channels = 2 if isinstance(modules[k], nn.modules.conv._ConvNd) else -1
            biases[k].append(torch.stack(rows).movedim(channels, 1).flatten(2).sum(2))
    for k, m in modules.items():
        tied = [j for j, other in modules.items() if other.weight is m.weight and seen[j]]
        if not tied or tied[0] != k:
            continue
        if len({isinstance(modules[j], INPUTS_LEFT) for j in tied}) == 1:
            b, a = _factors([seen[j] for j in tied], lam, sharing, weights)
            a = torch.stack([ag.diagonal().diag() for ag in a]) if isinstance(m, TABLES) else a
            blocks[f"{k}.weight"] = b, a, isinstance(m, INPUTS_LEFT)
        for j in [j for j in tied if not isinstance(modules[j], TABLES)]:
            calls = len(biases[j]) // len(x)  # of each example
            each = [torch.stack(biases[j][i : i + calls]).sum(0) for i in range(0, len(biases[j]), calls)]
            b = torch.stack([gn.T @ ln @ gn for gn, ln in zip(each, lam, strict=True)]).sum(0)
            blocks[f"{j}.bias"] = b.unsqueeze(0), b.new_ones(1, 1, 1), False
    return {name: blocks[name] for name in names if name in blocks}


def _read(args: list[Tensor]) -> Tensor:
    """What a layer is linear in: the products of features where there are two inputs."""
    return args[0] if len(args) == 1 else (args[0].unsqueeze(-1) * args[1].unsqueeze(-2)).flatten(-2)


def _per_example(seen: list[list[tuple[Tensor, Tensor]]], n: int) -> list[tuple[Tensor, Tensor]]:
    """All positions of each example: of several calls, and of several modules that share a weight."""
    out = []
    for i in range(n):
        calls = [pair for calls in seen for pair in calls[i * len(calls) // n : (i + 1) * len(calls) // n]]
        out.append((torch.cat([a for a, _ in calls]), torch.cat([g for _, g in calls], 1)))
    return out


def _factors(
    seen: list[list[tuple[Tensor, Tensor]]], lam: Tensor, sharing: str, weights: Tensor | None
) -> tuple[Tensor, Tensor]:
    """B (Gr, O, O) and A (Gr, I, I)."""
    pairs = _per_example(seen, len(lam))
    total = [torch.einsum("ctgo,cd,dsgp->tsgop", g, ln, g) for (_, g), ln in zip(pairs, lam, strict=True)]
    if sharing == "expand":
        b = torch.stack([torch.einsum("ttgop->gop", t) for t in total]).sum(0)
        rows = [a for a, _ in pairs]
    else:
        b = torch.stack([t.sum((0, 1)) for t in total]).sum(0)
        rows = [a.mean(0, keepdim=True) for a, _ in pairs]
    w = torch.ones(len(rows), dtype=b.dtype) if weights is None else weights
    grams = [wn * torch.einsum("mgi,mgj->gij", an, an) for wn, an in zip(w, rows, strict=True)]
    return b, torch.stack(grams).sum(0) / sum(wn * len(an) for wn, an in zip(w, rows, strict=True))


def _positions(module: nn.Module, a: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """(T, Gr, I) and (C, T, Gr, O) of one call on one example; patches are read off by one-hot kernels."""
    if isinstance(module, (nn.Linear, nn.Bilinear)):
        return a.reshape(-1, 1, a.shape[-1]), g.reshape(len(g), -1, 1, g.shape[-1])
    if isinstance(module, TABLES):
        return _looked_up(module, a, g)
    if isinstance(module, nn.modules.conv._ConvTransposeNd):
        return _spread_out(module, a, g)
    probe = type(module)(
        module.in_channels, module.weight[0].numel() * module.groups, module.kernel_size, module.stride,
        module.padding, module.dilation, module.groups, False, module.padding_mode, dtype=a.dtype,
    )  # fmt: skip
    size = module.weight[0].numel()
    with torch.no_grad():
        probe.weight.copy_(torch.eye(size, dtype=a.dtype).repeat(module.groups, 1).reshape(probe.weight.shape))
        patches = probe(a).flatten(2).squeeze(0).unflatten(0, (module.groups, size))  # (Gr, I, T)
    g = g.flatten(3).squeeze(1).unflatten(1, (module.groups, -1))  # (C, Gr, O, T)
    return patches.permute(2, 0, 1), g.permute(0, 3, 1, 2)


def _looked_up(table: nn.Module, ids: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """What each position takes of every row of a table, (T, 1, V), where that is not nothing: its Jacobian."""
    weight = table.weight.detach().clone().requires_grad_()
    out = torch.func.functional_call(table, {"weight": weight}, (ids,)).reshape(-1, table.embedding_dim)
    a = torch.stack([torch.autograd.grad(row[0], weight, retain_graph=True)[0].to_dense()[:, 0] for row in out])
    used = a.ne(0).any(1)
    return a[used].unsqueeze(1), g.reshape(len(g), -1, 1, g.shape[-1])[:, used]


def _spread_out(conv: nn.Module, x: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """The input at each position, (T, Gr, I), and the gradient at what the kernel makes of it, (C, T, Gr, O * K)."""
    per_group = conv.in_channels // conv.groups
    a = x.flatten(2).squeeze(0).T.unflatten(1, (conv.groups, per_group))
    weight = conv.weight.detach().clone().requires_grad_()
    spread = []
    for t in range(len(a)):
        one = torch.zeros_like(x).flatten(2)
        one[:, ::per_group, t] = 1.0
        out = torch.func.functional_call(conv, {"weight": weight}, (one.reshape(x.shape),))
        rows = [torch.autograd.grad(out, weight, gc, retain_graph=True)[0][::per_group].flatten(1) for gc in g]
        spread.append(torch.stack(rows))
    return a, torch.stack(spread, 1)


def curvature_all(
    model: nn.Module, names: list[str], x: Tensor, y: Tensor, task: str, kind: str = "ggn"
) -> tuple[Tensor, Tensor]:
    """Lambda (N, C, C) and the full curvature sum of J^T Lambda J, (P, P)."""
    f = model(x).detach()
    if kind == "ggn":
        lam = hessian_of_loss(task, f, y)
    else:
        s = scores(task, f, y)
        lam = s.unsqueeze(2) * s.unsqueeze(1)
    jac = jacobian_loop(model, names, x)
    return lam, torch.einsum("ncp,ncd,ndq->pq", jac, lam, jac)


def jacobian_loop(model: nn.Module, names: list[str], x: Tensor) -> Tensor:
    """df/dtheta, one example and one output at a time, (N, C, P): slow, and works for any network."""
    parameters = dict(model.named_parameters())
    chosen = [parameters[k] for k in names]
    rows = []
    for one in x:
        f = model(one.unsqueeze(0)).squeeze(0)
        per_output = []
        for c in range(len(f)):
            grads = torch.autograd.grad(f[c], chosen, retain_graph=True, allow_unused=True)
            flat = [torch.zeros_like(p) if g is None else g for g, p in zip(grads, chosen, strict=True)]
            per_output.append(torch.cat([g.to_dense().flatten() for g in flat]))
        rows.append(torch.stack(per_output))
    return torch.stack(rows)


def hessian(task: str, model: nn.Module, names: list[str], x: Tensor, y: Tensor, w: Tensor) -> Tensor:
    """Second derivatives of -sum of w log p(y given f) at unit noise, (P, P), one row at a time."""
    chosen = [dict(model.named_parameters())[name] for name in names]
    loss = -(w * log_probs(task, model(x), y)).sum()

    def slope(value: Tensor) -> Tensor:
        found = torch.autograd.grad(value, chosen, create_graph=True, allow_unused=True)
        return torch.cat([(p * 0 if g is None else g).flatten() for p, g in zip(chosen, found, strict=True)])

    return torch.stack([slope(each) for each in slope(loss)]).detach()


def top_eigenpairs(h: Tensor, rank: int | None = None, tol: float | None = None) -> tuple[Tensor, Tensor]:
    """The `rank` largest eigenvalues of H, or all above `tol` times the largest, and U diag(l) U^T of these."""
    values, vectors = torch.linalg.eigh(h)
    values, vectors = values.flip(0), vectors.flip(1)
    count = rank if tol is None else int((values > tol * values[0]).sum())
    return values[:count], (vectors[:, :count] * values[:count]) @ vectors[:, :count].T


def by_row(h: Tensor, shapes: Sequence[tuple[int, ...]]) -> Tensor:  # (P, P)
    """Return H with zeros between weights that are not in one row of one tensor, an entry of its first dimension."""
    widths = [math.prod(shape[1:]) for shape in shapes for _ in range(shape[0] if shape else 1)]
    return h * torch.block_diag(*[torch.ones(width, width) for width in widths]).to(h)


def in_basis(h: Tensor, basis: Tensor) -> Tensor:
    """The nearest matrix to h that is diagonal in an orthonormal basis (columns): h's own diagonal there."""
    values = (basis.T @ h @ basis).diagonal()
    return (basis * values) @ basis.T


def low_rank_plus_diagonal(h: Tensor, basis: Tensor, k: int) -> Tensor:
    """The k largest of h's variances along a basis, and a diagonal; diag(h) is kept, by shrinking rows if need be."""
    values = (basis.T @ h @ basis).diagonal()
    top = values.argsort(descending=True, stable=True)[:k]
    low = (basis[:, top] * values[top]) @ basis[:, top].T
    r = torch.ones_like(values)
    for j in range(len(h)):
        if low[j, j] > h[j, j]:
            r[j] = (h[j, j] / low[j, j]).sqrt()
    low = r.diag() @ low @ r.diag()
    return low + (h.diagonal() - low.diagonal()).diag()


@dataclass
class Function:
    """A Gaussian over the outputs at some inputs, and log det(s H + D) - log det D."""

    covariance: Tensor  # (N, C, N, C)
    log_det_ratio: Tensor


def gp(jac: Tensor, lam: Tensor, new: Tensor, delta: Tensor, scale: float, independent: bool = False) -> Function:
    """The Gaussian process with kernel J D^-1 J^T on the points with Jacobians (M, C, P) and curvatures (M, C, C).

    K** - K*x (1 + s Lambda K)^-1 s Lambda Kx*, whatever the rank of Lambda; `scale` is s times N / M.
    """
    n, c, p = new.shape
    if independent:
        each = [gp(jac[:, [i]], lam[:, [i]][..., [i]], new[:, [i]], delta, scale) for i in range(c)]
        covariance = torch.stack([g.covariance[:, 0, :, 0] for g in each], -1).diag_embed().transpose(1, 2)
        return Function(covariance, torch.stack([g.log_det_ratio for g in each]).sum())
    rows, at = jac.reshape(-1, p), new.reshape(-1, p)
    big = scale * torch.block_diag(*lam)
    inner = torch.eye(len(rows), dtype=torch.float64) + big @ (rows / delta) @ rows.T
    cross = (at / delta) @ rows.T
    covariance = (at / delta) @ at.T - cross @ torch.linalg.solve(inner, big @ cross.T)
    return Function(covariance.reshape(n, c, n, c), torch.linalg.slogdet(inner).logabsdet)


def nystrom(jac: Tensor, h: Tensor, new: Tensor, delta: Tensor, scale: float, rank: int) -> Function:
    """J U (s U^T H U + U^T D U)^-1 U^T J^T with U the top right singular vectors of the points' Jacobians (M, C, P)."""
    n, c, p = new.shape
    u = torch.linalg.svd(jac.reshape(-1, p), full_matrices=False).Vh[:rank].T
    prior = u.T @ (delta.unsqueeze(1) * u)
    precision = scale * u.T @ h @ u + prior
    at = new.reshape(-1, p) @ u
    covariance = at @ torch.linalg.solve(precision, at.T)
    return Function(covariance.reshape(n, c, n, c), torch.logdet(precision) - torch.logdet(prior))


def variational(at: Tensor, h: Tensor, new: Tensor, delta: float, scale: float) -> Function:
    """The best sparse posterior (Titsias 2009) given the outputs at inducing points with Jacobians (M, C, P).

    cov = K** - K*z Kzz^-1 Kz* + K*z (Kzz + s Q)^-1 Kz* with Q = sum of Kzn Lambda_n Knz. In place of the
    log-determinant stands its bound, log det(1 + s Kzz^-1 Q) + s sum of tr(Lambda_n (Knn - Knz Kzz^-1 Kzn)).
    """
    n, c, p = new.shape
    z, x = at.reshape(-1, p), new.reshape(-1, p)
    kzz, q, cross = z @ z.T / delta, z @ h @ z.T / delta**2, x @ z.T / delta
    inverse = torch.linalg.pinv(kzz, hermitian=True)
    best = torch.linalg.pinv(kzz + scale * q, hermitian=True)
    covariance = x @ x.T / delta + cross @ (best - inverse) @ cross.T
    inner = torch.eye(len(z), dtype=torch.float64) + scale * inverse @ q
    missed = scale * (h.trace() / delta - (inverse @ q).trace())
    return Function(covariance.reshape(n, c, n, c), torch.linalg.slogdet(inner).logabsdet + missed)


def indices_of(model: nn.Module, takes: Callable[[str, int], bool]) -> Tensor:
    """Where the weights lie that `takes(name, number in its tensor)`, in the vector of all trainable parameters.

    What is true of these weights alone is the whole truth indexed: H[i][:, i], J[..., i].
    """
    trainable = [(k, p) for k, p in model.named_parameters() if p.requires_grad]
    marks = [takes(k, j) for k, p in trainable for j in range(p.numel())]
    return torch.tensor(marks).nonzero().flatten()


def evidence_after(
    loglik: Tensor,  # log p(D_t given theta) / T
    theta: Tensor,  # (P,)
    mu: Tensor,  # (P,), of the earlier tasks
    h: Tensor,  # (P, P), the posterior's curvature: s_t H_t and the earlier ones
    earlier: Tensor,  # (P, P), the curvature of the earlier tasks
    delta: Tensor,  # (P,)
) -> Tensor:
    """log p(D_t given D_1, ..., D_t-1)."""
    prior, posterior = earlier + delta.diag(), h + delta.diag()
    scatter = (theta - mu) @ prior @ (theta - mu)
    return loglik - 0.5 * (scatter + torch.logdet(posterior) - torch.logdet(prior))


def kron_over_time(tasks: list[tuple[nn.Module, Tensor, Tensor, float]], names: list[str]) -> Tensor:
    """Kronecker factors of linear layers added over tasks (model, x, Lambda, s): (sum of s B) (x) (mean of a a^T)."""
    blocks = []
    for name in names:
        layer, _, kind = name.rpartition(".")
        b, a, count = 0.0, 0.0, 0
        for model, x, lam, s in tasks:
            seen: list[tuple[Tensor, Tensor]] = []
            handle = model.get_submodule(layer).register_forward_hook(
                lambda m, args, out, seen=seen: seen.append((args[0].detach(), out))
            )
            f = model(x)
            handle.remove()
            inputs, out = seen[0]
            rows = [torch.autograd.grad(f[:, c].sum(), out, retain_graph=True)[0] for c in range(f.shape[1])]
            g = torch.stack(rows, 1)  # (N, C, O)
            b = b + s * torch.einsum("nco,ncd,ndp->op", g, lam, g)
            inputs = inputs if kind == "weight" else torch.ones(len(x), 1, dtype=x.dtype)
            a, count = a + inputs.T @ inputs, count + len(x)
        blocks.append(torch.kron(b, a / count))
    return torch.block_diag(*blocks)


CUTS = [-1.0, 0.5, 1.0]  # of the oracle's ordinal likelihood, four classes


def log_probs(task: str, f: Tensor, y: Tensor) -> Tensor:
    """log p(y given f) for rows f (M, C) and y (M, ...), of every likelihood, from its definition."""
    if task == "classification":
        return (f.exp() / f.exp().sum(-1, keepdim=True)).gather(1, y[:, None])[:, 0].log()
    if task == "regression":
        return torch.distributions.Normal(f, 1.0).log_prob(y).sum(-1)
    if task in ("binary", "multilabel", "reward_modeling"):
        p = 1 / (1 + (-f).exp())
        return (y * p.log() + (1 - y) * (1 - p).log()).sum(-1)
    if task == "poisson":
        return torch.distributions.Poisson(f.exp()).log_prob(y).sum(-1)
    if task == "heteroscedastic":
        c = f.shape[1] // 2
        return torch.distributions.Normal(f[:, :c], (f[:, c:] / 2).exp()).log_prob(y).sum(-1)
    assert task == "ordinal"
    below = 1 / (1 + (f - torch.tensor(CUTS, dtype=f.dtype)).exp())  # P(y <= k)
    cumulative = torch.cat([torch.zeros_like(f), below, torch.ones_like(f)], 1)
    return cumulative.diff(dim=1).gather(1, y[:, None])[:, 0].log()


def score_rows(task: str, f: Tensor, y: Tensor) -> Tensor:
    """d log p / df of each row, by autograd."""
    f = f.clone().requires_grad_()
    return torch.autograd.grad(log_probs(task, f, y).sum(), f)[0]


def normal_nodes(c: int, order: int = 40) -> tuple[Tensor, Tensor]:
    """Nodes (M, c) and weights (M,) of Gauss and Hermite for c independent standard normal numbers."""
    nodes, weights = (torch.from_numpy(a) for a in __import__("numpy").polynomial.hermite_e.hermegauss(order))
    grid = torch.cartesian_prod(*[nodes] * c).reshape(-1, c)
    return grid, torch.cartesian_prod(*[weights / weights.sum()] * c).reshape(-1, c).prod(1)


def all_labels(task: str, f: Tensor) -> tuple[Tensor, Tensor]:
    """For one example's outputs (C,): labels (M, ...) and their probabilities, all of them or a quadrature's nodes."""
    c = len(f)
    if task in ("regression", "heteroscedastic"):
        c = c if task == "regression" else c // 2
        z, weights = normal_nodes(c)
        return f[:c] + (z if task == "regression" else z * (f[c:] / 2).exp()), weights
    if task in ("classification", "ordinal"):
        y = torch.arange(c if task == "classification" else len(CUTS) + 1)
    else:
        most = 60 if task == "poisson" else 2
        y = torch.cartesian_prod(*[torch.arange(float(most), dtype=f.dtype)] * c).reshape(-1, c)
    return y, log_probs(task, f.expand(len(y), -1), y).exp()


def fisher(task: str, f: Tensor) -> Tensor:
    """E over y of score score^T for rows f (N, C), by adding up over all labels, (N, C, C)."""
    out = []
    for row in f:
        y, p = all_labels(task, row)
        s = score_rows(task, row.expand(len(y), -1), y)
        out.append(torch.einsum("m,mc,md->cd", p, s, s))
    return torch.stack(out)


def bend_rows(task: str, f: Tensor, y: Tensor) -> Tensor:
    """-d2 log p / df2 of each row, by autograd, (N, C, C)."""
    return -torch.stack(
        [
            torch.autograd.functional.hessian(lambda g, y=b: log_probs(task, g[None], y[None])[0], a)
            for a, b in zip(f, y, strict=True)
        ]
    )


def weighted_fit(
    model: nn.Module, names: list[str], x: Tensor, y: Tensor, task: str, weights: Tensor, pairs: bool = False
) -> Dense:
    """The posterior's ingredients from the likelihood's definition, example n counted weights[n] times.

    With `pairs`, x is (N, 2, ...) and f the second's output minus the first's.
    """
    if pairs:
        f = (model(x[:, 1]) - model(x[:, 0])).detach()
        jac = jacobian(model, names, x[:, 1]) - jacobian(model, names, x[:, 0])
    else:
        f, jac = model(x).detach(), jacobian(model, names, x)
    parameters = dict(model.named_parameters())
    h = torch.einsum("n,ncp,ncd,ndq->pq", weights, jac, fisher(task, f), jac)
    mean = torch.cat([parameters[k].detach().flatten() for k in names])
    loglik = (weights * log_probs(task, f, y)).sum()
    return Dense(task, [parameters[k].numel() for k in names], mean, h, lambda sigma: loglik)


def at_positions(
    model: nn.Module,
    names: list[str],
    data: list[tuple[Tensor, Tensor]],  # one example and its labels each, of any length
    task: str,
    class_dim: int | None = -1,
    curvature: str = "ggn",
) -> tuple[Tensor, Tensor, Tensor]:
    """The curvature (P, P) of outputs at positions, log p(D given mean) at unit noise, and B = sum of Lambda (C, C).

    One example, one position and one output at a time; a label of -100 (or NaN, for regression) counts for nothing.
    Within an example Lambda has a block for each position; the empirical Fisher squares the sum of all scores.
    """
    chosen = [dict(model.named_parameters())[k] for k in names]
    h, loglik, b = 0.0, torch.zeros((), dtype=torch.float64), 0.0
    for x, y in data:
        f = model(x.unsqueeze(0)).squeeze(0)
        f = f.unsqueeze(-1) if class_dim is None else f.movedim(class_dim if class_dim < 0 else class_dim - 1, -1)
        f = f.reshape(-1, f.shape[-1])
        if task == "regression":
            y = y.unsqueeze(-1) if class_dim is None else y.movedim(class_dim if class_dim < 0 else class_dim - 1, -1)
        labels = y.reshape(len(f), -1) if task == "regression" else y.reshape(-1)
        score = 0.0
        for row, label in zip(f, labels, strict=True):
            if bool(label.isnan().any()) if task == "regression" else int(label) == -100:
                continue
            rows = [torch.autograd.grad(one, chosen, retain_graph=True, allow_unused=True) for one in row]
            jac = torch.stack(
                [
                    torch.cat(
                        [(torch.zeros_like(p) if g is None else g).flatten() for g, p in zip(r, chosen, strict=True)]
                    )
                    for r in rows
                ]
            )
            own = row.detach()
            loglik = loglik + log_prob(task, own, label)
            if curvature == "ef":
                score = score + scores(task, own[None], label[None])[0] @ jac
            else:
                lam = hessian_of_loss(task, own[None], label[None])[0]
                h, b = h + jac.T @ lam @ jac, b + lam
        if curvature == "ef" and isinstance(score, Tensor):
            h = h + torch.outer(score, score)
    assert isinstance(h, Tensor)
    return h, loglik, torch.as_tensor(b)


def rows_jacobian(model: nn.Module, names: list[str], x: Tensor, class_dim: int | None = -1) -> Tensor:
    """df/dtheta of each position of each example, (N, *positions, C, P)."""
    chosen = [dict(model.named_parameters())[k] for k in names]
    f = model(x)
    f = f.unsqueeze(-1) if class_dim is None else f.movedim(class_dim, -1)
    flat = [
        torch.cat([(torch.zeros_like(p) if g is None else g).flatten() for g, p in zip(grads, chosen, strict=True)])
        for grads in (torch.autograd.grad(one, chosen, retain_graph=True, allow_unused=True) for one in f.flatten())
    ]
    return torch.stack(flat).reshape(*f.shape, -1)


def weighted_at_positions(
    model: nn.Module, names: list[str], x: Tensor, y: Tensor, task: str, weights: Tensor, class_dim: int | None = -1
) -> tuple[Tensor, Tensor]:
    """The GGN (P, P) and the log-likelihood at unit noise of labels y (M, ...), one for each position of each example.

    Each position counts as `weights`, (N, *positions), say; positions of weight 0 may have any label.
    """
    f = model(x).detach()
    f = f.unsqueeze(-1) if class_dim is None else f.movedim(class_dim, -1)
    w, f, counted = weights.flatten(), f.flatten(0, -2), weights.flatten() > 0
    jac = rows_jacobian(model, names, x, class_dim).flatten(0, -3)
    w, f, jac, y = w[counted], f[counted], jac[counted], y[counted]
    h = torch.einsum("n,ncp,ncd,ndq->pq", w, jac, fisher(task, f), jac)
    return h, (w * log_probs(task, f, y)).sum()


def linear_regression(x: Tensor, y: Tensor, delta: float, sigma: float) -> tuple[Tensor, Tensor]:
    """The posterior mean (D, C) of the weights of y = x w + noise, and their covariance (D, D), the same per output."""
    precision = x.T @ x / sigma**2 + delta * torch.eye(x.shape[1], dtype=x.dtype)
    return torch.linalg.solve(precision, x.T @ y / sigma**2), torch.linalg.inv(precision)


def refits(x: Tensor, y: Tensor, delta: float, sigma: float) -> tuple[Tensor, Tensor]:
    """Mean (N, C) and variance (N,) of each example's outputs in a linear regression on all the others: N fits."""
    means, variances = [], []
    for n in range(len(x)):
        others = torch.arange(len(x)) != n
        w, covariance = linear_regression(x[others], y[others], delta, sigma)
        means.append(x[n] @ w)
        variances.append(x[n] @ covariance @ x[n])
    return torch.stack(means), torch.stack(variances)


def without_example(
    jac: Tensor,  # (N, C, P)
    precision: Tensor,  # (P, P), of the posterior with all examples
    f: Tensor,  # (N, C)
    lam: Tensor,  # (N, C, C), of each example as the posterior counts it: with noise, temperature and weight
    gradient: Tensor,  # (N, C), of its negative log-likelihood, counted likewise
) -> tuple[Tensor, Tensor]:
    """Mean (N, C) and covariance (N, C, C) of each example's outputs, after one Newton step without it.

    The example's curvature is taken from the precision, and its gradient from that of the loss, which was zero.
    """
    means, covariances = [], []
    for j, fn, ln, gn in zip(jac, f, lam, gradient, strict=True):
        left = torch.linalg.inv(precision - j.T @ ln @ j)
        means.append(fn + j @ (left @ (j.T @ gn)))
        covariances.append(j @ left @ j.T)
    return torch.stack(means), torch.stack(covariances)


def rescaled_losses(
    dense: Dense, jac: Tensor, f: Tensor, y: Tensor, delta: Tensor | None, scale: float
) -> Tensor:  # (N,)
    """-log p(y given x, data) of each example, with the scale T of softmax (probit link) or sigma of the noise.

    delta (P,) is the prior precision; None is the network itself.
    """
    classes = dense.task == "classification"
    if delta is None:
        s = torch.zeros(*f.shape, f.shape[1], dtype=f.dtype)
    else:
        s = jac @ dense.covariance(delta, **({} if classes else {"sigma": scale})) @ jac.mT
    if classes:
        logits = f / scale / (1 + math.pi / 8 * s.diagonal(dim1=1, dim2=2) / scale**2).sqrt()
        return -logits.log_softmax(-1).gather(1, y[:, None]).squeeze(1)
    noisy = s + scale**2 * torch.eye(f.shape[1], dtype=f.dtype)
    return -torch.distributions.MultivariateNormal(f, covariance_matrix=noisy).log_prob(y)


def softmax_of_independent(f: Tensor, u: Tensor, width: float = 8.0, step: float = 0.2) -> Tensor:  # (C,), (C,)
    """E[softmax(f)] of independent f_c ~ N(f_c, u_c), by brute force.

    Softmax is the law of the largest of f_c + g_c with Gumbel variates g, so that p_k is the integral over y of
    E[e^(x - e^x)] at x = f_k - y, times the product over the others of E[exp(-e^x)] at x = f_j - y.
    """
    roots = u.sqrt()
    low, high = float((f - width * roots).max()) - 5, float((f + width * roots).max()) + 30
    y = torch.linspace(low, high, 1 + int((high - low) / step), dtype=f.dtype)
    below, density = [], []
    for mean, root in zip(f, roots, strict=True):
        eps = torch.linspace(-width, width, 81 + int(2 * width * float(root) / step), dtype=f.dtype)
        weights = (-eps.square() / 2).softmax(0)
        x = mean + root * eps - y.unsqueeze(1)
        below.append((-x.exp()).exp() @ weights)
        density.append((x - x.exp()).exp() @ weights)
    below, density = torch.stack(below), torch.stack(density)
    logs = below.clamp(min=1e-300).log()
    return ((logs.sum(0) - logs).exp() * density).sum(1) * (y[1] - y[0])


def evidence_of_parts(
    model: nn.Module,
    names: list[str],
    parts: list[tuple[Tensor, Tensor]],
    task: str,
    delta: Tensor,
    sigma: float | Tensor = 1.0,
    temperature: float = 1.0,
    curvature: str = "ggn",
    each_vector: bool = False,
) -> Tensor:
    """The evidence of the full GGN, but with log det(1 + s K) summed over parts of the data, K of a part alone.

    With `each_vector`, the columns of the Cholesky factor of Lambda are parts of their own within each batch.
    """
    log_lik = ratio = torch.zeros((), dtype=torch.float64)
    for x, y in parts:
        dense = fit(model, names, x, y, task, "full", curvature)
        log_lik = log_lik + dense.loglik(sigma) / temperature  # type: ignore[operator]
        scale = sigma**-dense.power / temperature if task == "regression" else 1 / temperature
        jac = jacobian(model, names, x)
        if not each_vector:
            ratio = ratio + torch.logdet(torch.eye(len(delta), dtype=delta.dtype) + scale * dense.h / delta)
            continue
        lam = hessian_of_loss(task, model(x).detach(), y)
        root = torch.linalg.cholesky(lam + 1e-14 * torch.eye(lam.shape[-1], dtype=lam.dtype))
        for column in root.unbind(2):
            rows = torch.einsum("nc,ncp->np", column, jac)
            ratio = ratio + torch.logdet(torch.eye(len(x), dtype=delta.dtype) + scale * (rows / delta) @ rows.T)
    mean = torch.cat([dict(model.named_parameters())[k].detach().flatten() for k in names])
    return log_lik - 0.5 * ((delta * mean.square()).sum() + ratio)
