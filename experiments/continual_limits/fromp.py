"""FROMP (Pan et al. 2020): keep the probabilities at a few memorable points of every task, instead of the weights.

After each task the Laplace approximation of all tasks so far is a Gaussian process over p(x) = softmax f(x), linearised
at the weights w: K_c = P_c J S J^T P_c^T for class c, with the covariance S of the weights and P = d p / d f. The next
task is trained on its own loss plus

    tau / (2 N) sum over earlier tasks s and classes c of (p_c - q_c)^T K_c^-1 (p_c - q_c)

at the memorable points of s, where q are the probabilities before. These points are the training examples with the
largest trace of Lambda = diag(p) - p p^T: those that the curvature is made of.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from experiments.continual_limits.tasks import Tasks
from experiments.continual_limits.training import RATE, Learnt
from experiments.uq.cache import Cache, Tensors
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import CosineAnnealingLR

from laplace import Laplace
from laplace.network.inputs import Inputs
from laplace.posterior.task_prior import CurvedPrior
from laplace.predictive.queries import Joint

JITTER = 1e-4  # of the mean variance, added to each kernel


@dataclass(frozen=True)
class FROMP:
    """How FROMP is trained.

    Attributes:
        points: memorable points of each task.
        tau: the strength of the pull to the earlier functions; 1 is the posterior's own.
        structure: of the Laplace approximation that the kernel is made of.
        epochs: of each task.
        by_curvature: whether the points are those with the largest Lambda, or drawn at random.
        examples: training images of each task.
    """

    points: int = 200
    tau: float = 1.0
    structure: str = "diag"
    epochs: int = 25
    by_curvature: bool = True
    examples: int = 60_000


@dataclass(frozen=True)
class Memory:
    """What is kept of one task.

    Attributes:
        x: its memorable points, (M, 784).
        p: the probabilities there, (M, C).
        inverse: K_c^-1, (C, M, M).
    """

    x: Tensor
    p: Tensor
    inverse: Tensor

    def distance(self, p: Tensor) -> Tensor:  # (M, C) -> ()
        """Return the sum over classes of (p_c - q_c)^T K_c^-1 (p_c - q_c)."""
        offset = (p - self.p).T  # (C, M)
        return torch.einsum("cm,cmk,ck->", offset, self.inverse, offset)


def learn(name: str, fromp: FROMP, first: Learnt, tasks: Tasks, cache: Cache) -> Iterator[Learnt]:
    """Yield what is learnt after each task. The first task is given; its delta is kept for all tasks."""
    model, points, prior = first.model, list[Tensor](), None
    yield first
    for task in range(1, len(tasks.orders)):
        start = time.process_time()
        points.append(memorable(model, tasks, task - 1, fromp))
        prior, memories = remember(model, points, tasks, task - 1, prior, first.precision, fromp)

        def make(task: int = task, memories: list[Memory] = memories, start: float = start) -> Tensors:
            train(model, memories, tasks, task, fromp)
            seconds = torch.tensor(time.process_time() - start)
            return {**model.state_dict(), "seconds": seconds}

        kept = cache.get(f"{name}_{fromp.examples}_seed{tasks.seed}_task{task}", make)
        seconds = float(kept.pop("seconds"))
        model.load_state_dict(kept)
        yield replace(first, model=model, seconds=seconds)


@torch.no_grad()
def memorable(model: nn.Module, tasks: Tasks, task: int, fromp: FROMP) -> Tensor:  # (M, 784)
    """Return the training examples of a task with the largest trace of Lambda, sum_c p_c (1 - p_c)."""
    x = tasks.x[:, tasks.orders[task]]
    if not fromp.by_curvature:
        return x[torch.randperm(len(x), generator=torch.Generator().manual_seed(task))[: fromp.points]]
    p = model(x).softmax(1)
    return x[(p * (1 - p)).sum(1).topk(min(fromp.points, len(x))).indices]


def remember(
    model: nn.Module,
    points: list[Tensor],
    tasks: Tasks,
    task: int,
    prior: CurvedPrior | None,
    precision: Tensor,
    fromp: FROMP,
) -> tuple[CurvedPrior, list[Memory]]:
    """Fit the task that was just learnt on top of the earlier ones; return that, and the memories of all tasks."""
    begin = {"prior_precision": precision} if prior is None else {"prior": prior}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        la = Laplace(model, "classification", "all", fromp.structure, curvature="ggn", **begin)
        la.fit(tasks.training(task))
        return la.as_prior(), [memory(la, x) for x in points]


@torch.no_grad()
def memory(la: Laplace, x: Tensor) -> Memory:
    """Return the probabilities at some points, and the inverse kernel of each class."""
    (part,) = la.outputs(Inputs(x, {}, la.frame.keys), Joint("Take fewer points."))
    f, joint = part.outputs.mean[0].reshape(len(x), -1), part.outputs.covariance[0]
    m, c = f.shape
    p = f.softmax(1)
    slopes = torch.diag_embed(p) - p.unsqueeze(2) * p.unsqueeze(1)  # d p / d f, (M, C, C)
    kernel = torch.einsum("mca,manb,ncb->cmn", slopes, joint.reshape(m, c, m, c), slopes).double()
    variance = kernel.diagonal(dim1=1, dim2=2).mean(1)
    jitter = JITTER * variance.clamp(min=1e-12)[:, None, None] * torch.eye(m, dtype=kernel.dtype)
    return Memory(x, p, torch.linalg.inv(kernel + jitter).to(p))


def train(model: nn.Module, memories: list[Memory], tasks: Tasks, task: int, fromp: FROMP) -> None:
    """Train the next task, with the pull to the functions of the earlier ones."""
    loader, optimizer = tasks.training(task), torch.optim.Adam(model.parameters(), RATE)
    schedule = CosineAnnealingLR(optimizer, fromp.epochs * len(loader))
    everywhere, scale = torch.cat([memory.x for memory in memories]), fromp.tau / (2 * len(tasks.x))
    sizes = [len(memory.x) for memory in memories]
    for _ in range(fromp.epochs):
        for x, y in loader:
            optimizer.zero_grad()
            f = model(torch.cat([x, everywhere]))
            parts = f[len(x) :].softmax(1).split(sizes)
            pull = torch.stack([memory.distance(p) for memory, p in zip(memories, parts, strict=True)]).sum()
            (cross_entropy(f[: len(x)], y) + scale * pull).backward()
            optimizer.step()
            schedule.step()
