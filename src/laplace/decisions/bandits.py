"""Contextual bandits: choose one of several options by a posterior over their rewards."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from laplace.checks import choice, generator_or_none, one_positive
from laplace.decisions.arrays import inputs_for, require_source
from laplace.errors import InputError, ModelError, UnsupportedError
from laplace.inference.drawing import functional_samples
from laplace.inference.predict import call
from laplace.inference.source import Source, n_outputs_at
from laplace.keywords import refuse_unknown_keywords
from laplace.linalg.autocast import plainly
from laplace.network.inputs import Inputs

RULES: Final = ("thompson", "ucb", "greedy")


@refuse_unknown_keywords
@plainly
@torch.no_grad()
def choose(
    la: Source,
    options: Tensor,  # (B, K, ...)
    rule: str = "thompson",
    *,
    beta: float = 2.0,
    generator: torch.Generator | None = None,
) -> Tensor:  # (B,)
    """Choose one of K options in each of B contexts, to earn a large reward.

    Args:
        la: A fitted posterior of a regression with one output, the reward.
        options: What the network is called with for each option, (B, K, ...): the context together with the option. A
            tensor or an array.
        rule: 'thompson', the best under one draw of the weights, which all contexts of a call share; 'ucb', the largest
            mean plus `beta` standard deviations of the mean reward; 'greedy', the largest mean.
        beta: For 'ucb', how many standard deviations.
        generator: For 'thompson', the random generator. torch's global one by default.

    Returns:
        The index of the chosen option in each context, (B,).

    Raises:
        OptionError: `la` is no posterior, the rule is unknown, or `beta` is not positive.
        UnsupportedError: the posterior is no regression with one output.
        InputError: there is no dimension of options, or no option.
    """
    require_source(la)
    rule, beta, generator = choice(rule, RULES, "rule"), one_positive(beta, "beta"), generator_or_none(generator)
    options = inputs_for(la, options)
    if not isinstance(options, Tensor) or options.dim() < 2 or not options.shape[:2].numel():
        came = tuple(options.shape) if isinstance(options, Tensor) else type(options).__name__
        raise InputError(f"options are {came}; a tensor (contexts, options, ...) is needed, with at least one of each.")
    try:
        return _values(la, options.flatten(0, 1), rule, beta, generator).reshape(options.shape[:2]).argmax(1)
    except ModelError as error:
        if options.dim() > 2:
            raise
        raise ModelError(
            f"{error}. The options {tuple(options.shape)} were read as {options.shape[1]} options in each of "
            f"{options.shape[0]} contexts. For the options of one context write options.unsqueeze(0)."
        ) from error


def _values(
    la: Source,
    rows: Tensor,  # (B K, ...)
    rule: str,
    beta: float,
    generator: torch.Generator | None,
) -> Tensor:  # (B K, 1)
    """Return what the rule compares, of each option."""
    response, n_outputs = la.likelihood.response, n_outputs_at(la, Inputs(rows, {}, la.frame.keys))
    located = response.location_outputs(n_outputs)
    if response.links or len(range(n_outputs)[located]) != 1:
        raise UnsupportedError(
            f"options are compared by one reward each; {la.likelihood.name!r} has {n_outputs} outputs. Take "
            "Laplace(model, 'regression') of a network that maps a context with an option to its reward, (N, 1)."
        )
    if rule == "thompson":
        return functional_samples(la, rows, n_samples=1, generator=generator).reshape(len(rows), -1)[:, located]
    mean, variance = call(la, rows, diagonal_output=True)
    return mean if rule == "greedy" else mean + beta * variance.sqrt()
