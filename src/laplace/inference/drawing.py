"""Draw weights, outputs, and what the outputs stand for, from a posterior or any other source."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from laplace.checks import flag, generator_or_none, whole_number
from laplace.inference.arguments import draws_asked, pred_type_named
from laplace.inference.source import FEWER, Answer, Fitted, Part, Source
from laplace.keywords import refuse_unknown_keywords
from laplace.linalg.autocast import plainly
from laplace.network.batches import given_by_name
from laplace.network.inputs import Inputs
from laplace.predictive.mixtures import joined
from laplace.predictive.outputs import OutputSamples
from laplace.predictive.positions import Positions
from laplace.predictive.queries import Functions, Variances
from laplace.predictive.reshape import Reshaper


@refuse_unknown_keywords
@plainly
def functional_samples(
    source: Source,
    /,
    x: Any = None,
    pred_type: str = "glm",
    n_samples: int = 100,
    diagonal_output: bool = False,
    generator: torch.Generator | None = None,
    **model_kwargs: Any,
) -> Tensor:  # (S, N, C)
    """Draw the outputs f, before the softmax temperature and the link.

    One draw of the weights is used for all inputs, so each draw is a smooth function of x.

    Args:
        x: A tensor, a mapping, or a tuple of inputs. A mapping may come by name instead: `**batch`.
        pred_type: 'glm' linearises the network at its weights. 'nn' runs the network with the drawn weights.
        n_samples: How many draws.
        diagonal_output: With 'glm', whether to draw every output independently instead.
        generator: The random generator. torch's global one by default.
        **model_kwargs: Passed on to the network.

    Returns:
        (n_samples, N, C), or n_samples in front of the network's own shape.

    Raises:
        NotFittedError: `fit` was not called yet.
        UnsupportedError: 'nn' with a posterior over functions.
        MemoryBudgetError: the draws would not fit into memory.
    """
    x, model_kwargs = given_by_name(x, model_kwargs)
    frame = source.frame
    pred_type = pred_type_named(pred_type, frame.functional)
    draws = draws_asked(source, source.n_outputs or 1, n_samples, 1, generator)
    diagonal_output = flag(diagonal_output, "diagonal_output")
    inputs, shape = Inputs(x, model_kwargs, frame.keys), Reshaper()
    with torch.set_grad_enabled(frame.enable_backprop):
        if diagonal_output and pred_type == "glm":
            answer = Answer(frame.budget, FEWER, each=draws.n)
            parts = [part.outputs for part in shape.watch(source.outputs(inputs, Variances(), answer))]
            drawn = torch.cat(list(joined(parts).draws(replace(draws, apart=True))), 1)
        else:
            drawn = joined_draws(source.outputs(inputs, Functions(draws, exact=pred_type == "nn")), shape)
        return shape(drawn, lead=1)


@refuse_unknown_keywords
def predictive_samples(
    source: Source,
    /,
    x: Any = None,
    pred_type: str = "glm",
    n_samples: int = 100,
    diagonal_output: bool = False,
    generator: torch.Generator | None = None,
    **model_kwargs: Any,
) -> Tensor:  # (S, N, C)
    """Draw the parameters of the predictive: outputs f for regression, class probabilities, or rates of counts.

    Args:
        x: A tensor, a mapping, or a tuple of inputs. A mapping may come by name instead: `**batch`.
        pred_type: 'glm' linearises the network at its weights. 'nn' runs the network with the drawn weights.
        n_samples: How many draws.
        diagonal_output: With 'glm', whether to draw every output independently.
        generator: The random generator. torch's global one by default.
        **model_kwargs: Passed on to the network.

    Returns:
        (n_samples, N, C), or n_samples in front of the network's own shape.

    Raises:
        NotFittedError: `fit` was not called yet.
        UnsupportedError: 'nn' with a posterior over functions.
        MemoryBudgetError: the draws would not fit into memory.
    """
    drawn = functional_samples(source, x, pred_type, n_samples, diagonal_output, generator, **model_kwargs)
    f = OutputSamples(drawn).scaled(1 / source.softmax_temperature).samples
    at = Positions.of(f[0], source.frame.class_dim)
    return at.shaped(source.likelihood.response.inverse_link(at.rows(f, lead=1)), lead=1)


@refuse_unknown_keywords
@plainly
@torch.no_grad()
def sample(la: Fitted, /, n_samples: int = 100, generator: torch.Generator | None = None) -> Tensor:  # (S, P)
    """Draw the uncertain weights from the posterior.

    Args:
        n_samples: How many draws, S.
        generator: The random generator. torch's global one by default.

    Returns:
        (S, P), in the order of `la.mean`.

    Raises:
        NotFittedError: `fit` was not called yet.
        UnsupportedError: the posterior is over functions and has no weights.
        MemoryBudgetError: the draws would not fit into memory.
    """
    n_samples = whole_number(n_samples, "n_samples")
    mean = la.posterior.fit.mean
    la.runner.spec.budget.require(
        2 * n_samples * mean.nbytes,
        mean.device,
        f"{n_samples:,} draws of {len(mean):,} weights",
        "Ask for fewer at a time.",
    )
    return mean + la.posterior.gaussian.drawn(n_samples, mean, generator_or_none(generator))


def joined_draws(parts: Iterable[Part], shape: Reshaper) -> Tensor:  # (S, N, C)
    """Join draws of whole functions at consecutive inputs."""
    out = joined([part.outputs for part in shape.watch(parts)])
    assert isinstance(out, OutputSamples)
    return out.samples
