"""Sources of predictions: anything that gives the distribution of the outputs at some inputs.

A Laplace posterior with its network is one; ensembles, mixtures and SWAG are others (`laplace.rivals`). `predict` and
the functions beside it work with any of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from laplace.backprop.gradients import Forward
from laplace.budget import Budget
from laplace.inference.linearised import contrasted, linearised, sampled, with_products
from laplace.inference.runner import Runner
from laplace.likelihoods import Likelihood
from laplace.linalg.sampling import Draws
from laplace.network.inputs import Inputs, Keys
from laplace.posterior.posterior import Posterior
from laplace.predictive.mixtures import Outputs
from laplace.predictive.outputs import OutputGaussian, OutputSamples
from laplace.predictive.positions import Positions
from laplace.predictive.queries import (
    Contrasts,
    Covariances,
    Functions,
    Joint,
    Products,
    Query,
    Variances,
    with_covariances,
)
from laplace.predictive.reshape import Reshaper

FEWER = "Ask for fewer draws, or for fewer inputs at a time."


@dataclass(frozen=True)
class Part:
    """Holds the outputs at consecutive inputs, with one row for every position of every input.

    Attributes:
        positions: Where the rows are in the network's own outputs.
        outputs: Their distribution.
    """

    positions: Positions
    outputs: Outputs


@dataclass(frozen=True)
class Frame:
    """Says how inputs are read, and holds the limits of a prediction.

    Attributes:
        keys: Which keys of a mapping are the inputs.
        class_dim: Which dimension of the outputs has the classes.
        budget: How much memory a result may take.
        enable_backprop: Whether gradients flow from predictions to the inputs.
        functional: Whether this is a distribution over functions, without weights to draw.
        spread: Whether the posterior's factors are on several processes, which must predict the same inputs together.
        doubt: What a prediction with observation noise warns of.
    """

    keys: Keys
    class_dim: int | None
    budget: Budget
    enable_backprop: bool = False
    functional: bool = False
    spread: bool = False
    doubt: str | None = None


@dataclass
class Answer:
    """Counts the size of a result while the inputs run, and refuses it before memory is full."""

    budget: Budget
    instead: str
    each: int = 1  # results per output, such as draws
    numbers: int = 0

    def on(self, runs: Iterable[Forward], each: int) -> Iterator[Forward]:
        """Yield the same runs. Each of their rows adds `each` numbers to the result."""
        for run in runs:
            self.count(run.outputs, each)
            yield run

    def count(self, f: Tensor, each: int) -> None:  # (N, C)
        """Add `each` numbers for each of these rows. Refuse a result that would not fit into memory."""
        self.numbers += len(f) * each * self.each
        needed = 2 * f.element_size() * self.numbers  # the parts, and the joined result
        self.budget.require(needed, f.device, f"an answer of {self.numbers:,} numbers or more", self.instead)


class Source(Protocol):
    """Gives the distribution of the outputs at some inputs, only as much of it as the query asks for."""

    @property
    def likelihood(self) -> Likelihood:
        """Return the likelihood, which says what the outputs mean."""
        ...

    @property
    def n_outputs(self) -> int | None:
        """Return the number of outputs, C. None before the first run of networks that say nothing about it."""
        ...

    @property
    def frame(self) -> Frame:
        """Return how inputs are read, and the limits of a prediction."""
        ...

    @property
    def noise_level(self) -> Tensor:
        """Return the level of the observation noise, (). It is 1 if there is none."""
        ...

    @property
    def softmax_temperature(self) -> float:
        """Return T of p(y given f / T), by which predictions divide the logits. It is 1 if there are none."""
        ...

    def outputs(self, inputs: Inputs, need: Query, answer: Answer | None = None) -> Iterator[Part]:
        """Yield the outputs f at consecutive parts of the inputs, before the softmax temperature."""
        ...

    def warn_once(self, key: str, message: str) -> None:
        """Warn, but only the first time for each `key`."""
        ...


def scaled_outputs(source: Source, inputs: Inputs, need: Query, answer: Answer | None = None) -> Iterator[Part]:
    """Yield the outputs as predictions see them: N(f / T, S / T^2) with the softmax temperature T."""
    for part in source.outputs(inputs, need, answer):
        yield Part(part.positions, part.outputs.scaled(1 / source.softmax_temperature))


def n_outputs_at(source: Source, inputs: Inputs) -> int:
    """Return the number of outputs. Runs the source on one of the inputs if that is unknown."""
    if source.n_outputs is not None:
        return source.n_outputs
    first = next(iter(source.outputs(inputs.part(0, 1), Variances())))
    return first.positions.c


class Fitted(Protocol):
    """Defines a posterior together with its network."""

    @property
    def posterior(self) -> Posterior: ...

    @property
    def runner(self) -> Runner: ...


def outputs_of(la: Fitted, inputs: Inputs, need: Query, answer: Answer | None = None) -> Iterator[Part]:
    """Yield the distribution of the outputs at consecutive parts of the inputs. All predictions are computed from it.

    Args:
        inputs: what the network is called with.
        need: how much of the distribution is asked for: variances, covariances, products with them, draws.
        answer: counts what the caller keeps, which is refused before it would not fit into memory.

    Raises:
        NotFittedError: `fit` was not called yet.
        MemoryBudgetError: an answer that would not fit into memory.
    """
    posterior, runner = la.posterior, la.runner
    fit, budget = posterior.fit, runner.spec.budget
    if isinstance(need, Joint):
        yield _joint(la, inputs, need)
    elif isinstance(need, Functions):
        answer = answer or Answer(budget, FEWER)
        if fit.structure.functional:
            yield _function_draws(la, inputs, need.draws)
        else:
            yield _weight_draws(la, inputs, need, answer)
    else:
        chosen = None if isinstance(need, (Products, Contrasts)) else need.chosen
        c = fit.n_outputs if chosen is None else len(chosen)
        runs = runner.runs(fit, inputs)
        if answer is not None:
            both = 2 if isinstance(need, Contrasts) and need.beside else 1
            runs = answer.on(runs, both * (c**2 if with_covariances(need) else c))
        for run in runs:
            if isinstance(need, Contrasts):
                yield Part(run.positions, contrasted(posterior, run, need))
                continue
            f = run.outputs if chosen is None else run.outputs[:, chosen]
            jacobian = run.jacobian(chosen)
            if isinstance(need, Products):
                yield Part(run.positions, with_products(posterior, f, jacobian))
            else:
                yield Part(run.positions, linearised(posterior, f, jacobian, isinstance(need, Covariances)))


def _joint(la: Fitted, inputs: Inputs, need: Joint) -> Part:
    """Return mean and covariance of all inputs' outputs together, position after position."""
    posterior, shape = la.posterior, Reshaper()
    (forward,) = shape.watch(la.runner.runs(posterior.fit, inputs, whole=True))
    mean = forward.outputs if need.chosen is None else forward.outputs[:, need.chosen]
    la.runner.spec.budget.require(
        2 * mean.element_size() * mean.numel() ** 2,
        mean.device,
        f"the joint covariance of {mean.numel():,} outputs",
        need.instead,
    )
    covariance = posterior.gaussian.joint(forward.jacobian(need.chosen)).flatten(2).flatten(0, 1)
    variance = covariance.diagonal()
    return Part(shape.positions, OutputGaussian(mean.reshape(1, -1), variance[None], covariance[None]))


def _function_draws(la: Fitted, inputs: Inputs, draws: Draws) -> Part:  # (S, N, C)
    """Draw the outputs at all inputs together from a posterior over functions."""
    whole = _joint(la, inputs, Joint("Take fewer inputs, or diagonal_output=True."))
    drawn = torch.cat(list(whole.outputs.draws(replace(draws, apart=True))), 1).squeeze(1)
    return Part(whole.positions, OutputSamples(drawn.unflatten(1, (-1, la.posterior.fit.n_outputs))))


def _weight_draws(la: Fitted, inputs: Inputs, need: Functions, answer: Answer) -> Part:  # (S, N, C)
    """Return outputs under draws of the weights. If f is linear in the weights, one run is used for all draws."""
    posterior, shape, runner = la.posterior, Reshaper(), la.runner
    fit, each = posterior.fit, need.draws.n * posterior.fit.n_outputs
    if fit.linear:
        kept = list(answer.on(shape.watch(runner.runs(fit, inputs, whole=True)), each))
        return Part(shape.positions, OutputSamples(sampled(posterior, lambda: kept, need.draws, need.exact)))
    before = answer.numbers

    def runs() -> Iterator[Forward]:
        answer.numbers = before  # the same inputs again, for the next draws
        return answer.on(shape.watch(runner.runs(fit, inputs)), each)

    drawn = sampled(posterior, runs, need.draws, need.exact)
    return Part(shape.positions, OutputSamples(drawn))
