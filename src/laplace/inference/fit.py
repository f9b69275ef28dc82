"""Fit: read a loader, and return the sums that a posterior is made of."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import chain
from typing import Any, Protocol

import torch

from laplace.backprop import Network
from laplace.checks import generator_or_none
from laplace.curvature import CURVATURES, Estimator
from laplace.distributed import Reduce, alone
from laplace.distributed.shards import read_alone
from laplace.distributed.together import joined
from laplace.errors import InputError, UnsupportedError, within
from laplace.inference import shared
from laplace.inference.accumulate import Accumulator
from laplace.inference.accumulate_points import SubsetAccumulator
from laplace.inference.accumulate_spread import SpreadAccumulator, require_spreadable
from laplace.inference.coverage import coverage_of
from laplace.inference.progress import Progress
from laplace.inference.rereading import Rereading
from laplace.inference.runner import Runner, dims_of
from laplace.network.batches import Batch
from laplace.network.loaders import examples_in
from laplace.network.watching import unregistered_in, watch_again
from laplace.posterior.posterior import Fit
from laplace.priors.base import Prior
from laplace.weights import All, FoundLastLayer, Selection, Snapshot, mean_of


class Journal(Progress, Protocol):
    """Keeps the partial sums of a fit in a file, which is removed once the fit is complete."""

    def remove(self) -> None:
        """Remove the file."""
        ...


Opens = Callable[[FoundLastLayer | Selection, Estimator, torch.Generator | None], Journal]


def fit(
    runner: Runner,
    loader: Iterable[Any],
    prior: Prior,
    before: Fit | None = None,
    *,
    progress_bar: bool | None = None,
    generator: torch.Generator | None = None,
    journal: Opens | None = None,
    reduce: Reduce = alone,
    shard_factors: bool = False,
) -> Fit:
    """Run the network over the data and return the sums of its curvature at its current weights.

    Args:
        runner: the network and the user's options. After a complete fit it remembers the state of the network.
        loader: the batches, read as often as the structure needs.
        prior: the prior. It is checked against the weights that are found.
        before: the sums of earlier data, to which the new ones are added.
        progress_bar: whether to show a progress bar; None shows one in a terminal after a few seconds.
        generator: the generator for estimates of the curvature. None uses torch's own.
        journal: a function that opens a file for the partial sums of a long fit.
        reduce: the processes that fit together, each with a part of the data. This one alone by default.
        shard_factors: whether the sums of each layer stay on one of these processes.
    """
    shared.require_divisible(runner.spec.structure, reduce.size)
    spread = shard_factors and reduce.size > 1
    with reduce.session(), joined(reduce):
        if shard_factors:
            require_spreadable(runner.spec.structure, journal is not None)
            _require_plain_prior(prior)
        shard = read_alone(loader) if reduce.size == 1 else shared.divided(loader, reduce, runner)
        loader = shard.loader
        runner.require_rereading(loader, before)
        runner.next_tokens = None if before is None else runner.next_tokens
        watch_again(runner.model)

        def read() -> Iterator[Batch]:
            return runner.batches(loader, progress_bar if reduce.rank == 0 else False, "fit")

        spec, stream = runner.spec, read()
        own = first = next(stream, None)
        if reduce.size > 1:
            first = shared.first_of(own, reduce, runner)
        if first is None:
            raise InputError("the training loader gave no example. It must yield batches (x, y), at least one.")
        with within(f"batch {first.index}", runs=True):
            weights = runner.find_weights(first.inputs, keep=before is not None)
            if before is not None:
                runner.require_unchanged(before)
            else:
                runner.require_steady(first.inputs, isinstance(weights, FoundLastLayer))
            engine = runner.engine(weights, runner.plan if before is not None else None)  # after a run was watched
            if before is None and runner.plan is not None and reduce.size == 1 and isinstance(engine, Network):
                engine.keep(runner.plan, first.inputs)
            estimator = runner.chosen_curvature(engine, first.inputs) if before is None else _as_before(runner, before)
        generator = generator_or_none(generator)
        progress = None if journal is None else journal(weights, estimator, generator)
        if generator is None and (spec.structure.passes > 1 or progress is not None):
            generator = torch.Generator().manual_seed(int(torch.randint(2**31, ())))  # a resumed fit draws the same
        parts = (spec.likelihood, spec.structure, weights.layout, estimator, generator, spec.budget, progress)
        kind = SubsetAccumulator if spec.structure.functional else SpreadAccumulator if spread else Accumulator
        sums = kind(engine, *parts, reduce, shard)
        sums.n_outputs = 0 if before is None else before.n_outputs
        mean = mean_of(weights, runner.model)
        prior.check(weights.layout, spec.structure.takes)
        spec.structure.check(weights.layout)
        if reduce.size > 1:
            sums.prepare(first.inputs)
            once = isinstance(loader, Iterator)
            shared.require_same(runner, weights, engine.plan, estimator, once, reduce, shard_factors)
        unread = stream if own is None else chain([own], stream)
        examples = 0 if own is None else examples_in(loader, len(own.y))
        sums.run(unread, None if isinstance(loader, Iterator) else read, examples)
        found = sums.fit(mean)
        if shard.examples is not None and found.n_data < shard.examples and reduce.rank == 0:
            runner.warn_once("fewer", _fewer(found.n_data, shard.examples))
        found = found if before is None else before.plus(found)
        if spec.structure.rereads:
            found = replace(found, training=Rereading.of(runner, loader, found, estimator))
        if note := coverage_of(found, engine.plan).other_forms(spec.structure.name):
            runner.warn_once("coverage", note)
        if isinstance(spec.weights, All) and (others := unregistered_in(runner.model)):
            runner.warn_once("unregistered", _unregistered(others))
        for note in spec.structure.notes(found.sums):
            runner.warn_once(note, note)
        found.factorise_together(reduce)
        snapshot = Snapshot.of(runner.model)  # while the other ranks are there: they may have pieces of the network
    runner.adopt(weights, engine.plan, dims_of(first.inputs), snapshot)
    runner.ranks = reduce.size
    if progress is not None:
        progress.remove()
    return found


def _require_plain_prior(prior: Prior) -> None:
    if prior.curved:
        raise UnsupportedError(
            "shard_factors=True with prior=earlier.as_prior(): the curvature of earlier tasks is whole on every rank. "
            "Leave out shard_factors=True, or take another prior."
        )


def _fewer(read: int, examples: int) -> str:
    return (
        f"the ranks read {read} of the {examples} examples of the data set, and the posterior leaves out the rest. "
        "Leave out drop_last=True; sampler=laplace.distributed.ShardSampler(dataset) gives each example to one rank."
    )


def _unregistered(shapes: list[tuple[int, ...]]) -> str:
    more = f" and {len(shapes) - 1} more" if len(shapes) > 1 else ""
    return (
        f"the network uses a trainable parameter of shape {shapes[0]}{more} that is not in model.parameters(), because "
        "it is kept in a list, a tuple or an object. It is treated as certain. Keep parameters in nn.ParameterList or "
        "as attributes, and layers in nn.ModuleList, or write requires_grad_(False)."
    )


def _as_before(runner: Runner, before: Fit) -> Estimator:
    """Return the estimator of the earlier fit, which that fit may have chosen itself."""
    asked = runner.spec.curvature
    return asked if asked is not None and asked.name == before.kind else CURVATURES[before.kind]()
