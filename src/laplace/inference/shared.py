"""Begin a fit on many processes alike: the same network, options and plan on every rank, each example on one."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import nn

from laplace.backprop import Plan
from laplace.backprop.audit import EXAMPLES
from laplace.curvature import Estimator
from laplace.distributed import Reduce
from laplace.distributed.shards import Shard, reads_all_of, shard_of
from laplace.errors import InputError, ModelError, OptionError, UnsupportedError
from laplace.inference.runner import Runner
from laplace.network.batches import Batch, device_of, require_iterable
from laplace.network.digests import Digest, differing, of_state
from laplace.network.pieces import whole
from laplace.network.pytree import tensors_in
from laplace.structures import Structure
from laplace.weights import FoundLastLayer, Selection

_LARGE = 2**30  # bytes of weights above which only those that are uncertain are compared, and the buffers


class Warns(Protocol):
    """Warns of each thing once. A `Runner` and every `Source` do."""

    def warn_once(self, key: str, message: str) -> None: ...


def divided(loader: Iterable[Any], reduce: Reduce, who: Warns, counted: str = "would count") -> Shard:
    """Return the part of the data that this rank reads. Refuse data that every rank reads whole.

    `counted` says what would happen to it several times.
    """
    require_iterable(loader)
    shard = shard_of(loader, reduce)
    if shard.note is not None and reduce.rank == 0:
        who.warn_once("repeats", shard.note)
    facts = reduce.agree(lambda: (shard.examples, _of_dataset(loader) if shard.examples is None else None))
    if len({examples for examples, _ in facts}) > 1:
        told = ", ".join(
            f"rank {rank} {'has no sampler that divides one' if n is None else f'divides one of {n} examples'}"
            for rank, (n, _) in enumerate(facts)
        )
        raise InputError(f"all ranks must divide the same data set, and {told}. Give all a loader of the same kind.")
    whole = [dataset for _, dataset in facts if dataset is not None]
    if len(whole) > 1 and len(whole) == reduce.size and len(set(whole)) == 1:
        raise InputError(
            f"every rank reads the whole data set of {whole[0][0]} examples, which {counted} {reduce.size} times. "
            "Give each rank its own part: DataLoader(dataset, batch_size, "
            "sampler=laplace.distributed.ShardSampler(dataset)); or write group=None, and each rank works alone."
        )
    return shard


def _of_dataset(loader: Any) -> tuple[int, str] | None:
    """Return the size of a data set that is read from end to end, and a digest of its first example."""
    dataset = reads_all_of(loader)
    if dataset is None or not len(dataset):
        return None
    return len(dataset), Digest().add(*tensors_in(dataset[0])).hex()


def require_divisible(structure: Structure, ranks: int) -> None:
    """Refuse a structure that several ranks cannot fit together."""
    if structure.rereads and ranks > 1:
        raise UnsupportedError(
            f"hessian_structure={structure.name!r} reads all data again for every answer, and does so in one process. "
            "Fit with group=None on all data, or take hessian_structure='kron' or 'ekfac'."
        )


def first_of(own: Batch | None, reduce: Reduce, runner: Runner) -> Batch | None:
    """Return a few examples of the first rank that has data, on all ranks. None if no rank has any.

    All ranks learn about the network from them, so that all have the same plan, and ranks without data have one.
    """
    facts = reduce.agree(lambda: None if own is None else (Digest().add(*own.tensors()).hex(), runner.next_tokens))
    there = {rank: fact for rank, fact in enumerate(facts) if fact is not None}
    if not there:
        return None
    shifts = {fact[1] for fact in there.values()} - {None}
    if len(shifts) > 1:
        raise InputError(
            "some ranks have labels that must be shifted to the next token, others not. Give all the same."
        )
    runner.next_tokens = shifts.pop() if shifts else runner.next_tokens
    source = min(there)
    few = None if own is None or reduce.rank != source else _few(own)
    batch = reduce.share(source, few)
    assert batch is not None
    return replace(batch, inputs=batch.inputs.to(device_of(runner.model)))


def _few(batch: Batch) -> Batch:
    """Return the inputs of a few examples, on the CPU."""
    inputs = batch.inputs.part(0, EXAMPLES).to(torch.device("cpu"))
    return replace(batch, inputs=inputs.map(torch.clone), y=batch.y[:0].cpu(), given={})


def require_same(
    runner: Runner,
    weights: FoundLastLayer | Selection,
    plan: Plan | None,
    estimator: Estimator,
    once: bool,
    reduce: Reduce,
    shard_factors: bool = False,
) -> None:
    """Refuse ranks that differ in their options, their plan, or the values of their networks."""
    layout = weights.layout
    facts: dict[str, Any] = runner.spec.described(estimator.name) | {
        "curvature_samples": estimator.vectors,
        "last_layer": weights.module,
        "weights": [[name, *shape] for name, shape in zip(layout.names, layout.shapes, strict=True)],
        "a loader that can be read only once": once,
        "shard_factors": shard_factors,
        "rules": None if plan is None else [plan.rule_of(name) for name in layout.names],
    }
    theirs = reduce.share(0, facts)
    differ = [key for key in facts if facts[key] != theirs.get(key)]
    reduce.agree(_raising(differ, f"rank {reduce.rank} and rank 0 differ in {', '.join(differ)}"))
    require_same_values(runner.model, weights, reduce)


def require_same_values(model: nn.Module, weights: FoundLastLayer | Selection | None, reduce: Reduce) -> None:
    """Refuse ranks whose networks have other values than that of rank 0."""
    values = _values(model, weights)
    said = differing(reduce.share(0, values), values)
    reduce.agree(
        _raising(
            said,
            f"the networks of rank 0 (there) and rank {reduce.rank} (here) differ: {said}. Give all ranks the same "
            "before the fit: for t in (*model.parameters(), *model.buffers()): torch.distributed.broadcast(t.data, 0). "
            "(After training with DistributedDataParallel, the running statistics of BatchNorm differ.)",
            ModelError,
        )
    )


def _raising(differ: Any, message: str, kind: type[Exception] = OptionError) -> Callable[[], None]:
    def check() -> None:
        if differ:
            raise kind(message if kind is ModelError else f"{message}. All ranks must make the same call.")

    return check


def _values(model: nn.Module, weights: FoundLastLayer | Selection | None) -> dict[str, dict[str, Any]]:
    """Return digests of the network's values; of a large network, only of the uncertain weights and the buffers."""
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    if size <= _LARGE or weights is None:
        return of_state(model)
    own = dict(zip(weights.layout.names, weights.tensors(model), strict=True)) | dict(model.named_buffers())
    return {
        name: {"shape": list(t.shape), "dtype": str(t.dtype), "digest": Digest().add(whole(t)).hex()}
        for name, t in own.items()
    }
