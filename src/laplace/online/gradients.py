"""Compute the gradients of a training step, averaged over the processes that train together."""

from __future__ import annotations

from torch import Tensor, autograd, nn, stack

from laplace.distributed import Reduce
from laplace.errors import noting
from laplace.network.batches import device_of


def send_back(objective: Tensor, model: nn.Module, network: nn.Module, reduce: Reduce, where: str) -> None:
    """Add the gradients of an objective, the mean over all ranks, to `.grad` of the parameters.

    `DistributedDataParallel` adds gradients in the midst of the backward pass, and would wait there for a rank that
    fails. So gradients are computed first, all ranks tell how that went, and then it gets them: p * g has the gradient
    g by p.

    Args:
        objective: of this rank's batch.
        model: the network.
        network: what was called: the network, or a wrapper that adds gradients over the ranks.
        reduce: the ranks.
        where: the batch, for errors.
    """
    own = [p for p in model.parameters() if p.requires_grad]
    if network is model or any(p._backward_hooks for p in own):  # hooks of the user must not run twice
        with noting(where):
            objective.backward()
        if network is model:
            _add_up(model, reduce)
        return
    found: list[tuple[Tensor | None, ...]] = []

    def compute() -> None:
        with noting(where):
            found.append(autograd.grad(objective, own, allow_unused=True))

    reduce.agree(compute)
    stack([(p * g).sum() for p, g in zip(own, found[0], strict=True) if g is not None]).sum().backward()


def _add_up(model: nn.Module, reduce: Reduce) -> None:
    """Average the gradients over the ranks."""
    if reduce.size == 1:
        return
    there = {name: p for name, p in model.named_parameters() if p.requires_grad}
    own = {name: p.grad for name, p in there.items() if p.grad is not None}
    for name, total in reduce.total(own, device_of(model)).items():
        there[name].grad = total / reduce.size
