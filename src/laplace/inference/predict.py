"""Predict with any source of outputs: `la(x)`, `la.predict(x)`, `la.preference(a, b)`.

Inputs run in chunks, and the results are joined.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from laplace.checks import flag, flag_or_none
from laplace.distributed import OWN, Group, alone, reduce_over
from laplace.distributed.groups import Unsaid
from laplace.distributed.shards import Shard
from laplace.distributed.together import joined as joined_ranks
from laplace.distributed.together import jointly
from laplace.errors import InputError, UnsupportedError, within
from laplace.inference.arguments import FEW_DRAWS, chosen_outputs, draws_asked, pred_type_named
from laplace.inference.drawing import joined_draws
from laplace.inference.linked import linked, needed_by
from laplace.inference.one_input import at_one_input
from laplace.inference.predict_shards import divided_inputs, in_step, marked, parts_in_order, same_draws
from laplace.inference.settings import require_same_settings
from laplace.inference.source import Answer, Source, n_outputs_at, scaled_outputs
from laplace.keywords import refuse_unknown_keywords
from laplace.linalg.autocast import plainly
from laplace.linalg.sampling import Draws
from laplace.network.batches import given_by_name, prediction_batches
from laplace.network.datasets import is_shuffled
from laplace.network.inputs import Inputs
from laplace.predictive.links import Link
from laplace.predictive.mixtures import Outputs, joined
from laplace.predictive.outputs import OutputGaussian, OutputSamples, require_finite
from laplace.predictive.prediction import Prediction
from laplace.predictive.queries import Contrasts, Covariances, Functions, Joint, Query, Variances, with_covariances
from laplace.predictive.reshape import PredictionAtPositions, Reshaper
from laplace.predictive.response import Response

_MAX_COVARIANCE = 32  # with more outputs than this, `predict` computes covariances only if asked to


@refuse_unknown_keywords
@plainly
def call(
    source: Source,
    /,
    x: Any = None,
    pred_type: str = "glm",
    joint: bool = False,
    link_approx: str | Link | None = None,
    n_samples: int = 100,
    diagonal_output: bool = False,
    generator: torch.Generator | None = None,
    outputs: Any = None,
    **model_kwargs: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """Return the predictive at `x`, in laplace-torch's form.

    Outputs at positions come in the network's own shape, covariances as (N, *positions, C, C).

    Args:
        x: A tensor, a mapping, or a tuple of inputs. A mapping may come by name instead: `**batch`.
        pred_type: 'glm' linearises the network at its weights. 'nn' averages the network itself over `n_samples` draws
            of the weights.
        joint: Whether to return one covariance over all inputs. Regression only.
        link_approx: One of `la.likelihood.links`, or a `Link` of your own. If left out, the first of them: for classes
            and labels 'probit', as in the paper and in laplace-torch. (`la.predict` has a closer one.) For classes:
            'probit', 'one_vs_rest', 'mc', 'bridge', 'bridge_norm' or 'delta'.
        n_samples: How many draws, for link 'mc' and for 'nn'.
        diagonal_output: Whether to return variances instead of covariances between outputs.
        generator: The random generator. torch's global one by default.
        outputs: Indices of the wanted outputs, all by default. Regression only.
        **model_kwargs: Passed on to the network.

    Returns:
        Classification, multi-label and count models return probabilities or rates, (N, C). Regression and reward models
            return the mean (N, C) and the covariance (N, C, C) of f, without observation noise. With `diagonal_output`,
            or with 'nn', variances (N, C) come instead of covariances. With `joint`, the mean is (N C,) and the
            covariance (N C, N C).

    Raises:
        NotFittedError: `fit` was not called yet.
        OptionError: the link or the `pred_type` is unknown, or `outputs` are not valid indices.
        UnsupportedError: `joint` with classes or 'nn', or 'nn' with a posterior over functions.
        InputError: the network's outputs have another shape than in `fit`, or are not finite.
        ModelError: the network fails on these inputs.
        MemoryBudgetError: the result would not fit into memory.
    """
    if (
        type(x) is Tensor
        and type(pred_type) is str
        and pred_type == "glm"
        and (joint is diagonal_output is False)
        and (generator is outputs is None)
        and not model_kwargs
        and n_samples == 100
    ):
        found = at_one_input(source, x, link_approx, as_in_paper=True)
        if found is not None:
            return found.mean
    x, model_kwargs = given_by_name(x, model_kwargs)
    frame, response = source.frame, source.likelihood.response
    pred_type = pred_type_named(pred_type, frame.functional)
    (link, how), sampled = response.link_of(link_approx, as_in_paper=True), pred_type == "nn"
    inputs, shape = Inputs.of(x, model_kwargs, frame.keys), Reshaper()
    n_outputs = n_outputs_at(source, inputs)
    draws = draws_asked(source, n_outputs, n_samples, 2 if sampled and not link else 1, generator)
    joint, diagonal_output = flag(joint, "joint"), flag(diagonal_output, "diagonal_output")
    if joint and (link or sampled):
        raise UnsupportedError(
            "joint=True is for regression with pred_type='glm'. Otherwise write functional_samples(x)."
        )
    chosen = chosen_outputs(source, n_outputs, outputs, bool(link) or sampled)
    with torch.set_grad_enabled(frame.enable_backprop):
        if sampled:
            parts = scaled_outputs(source, inputs, Functions(draws, exact=True))
            samples = response.inverse_link(joined_draws(parts, shape))
            samples = require_finite(samples, "the mean of the draws", 1)
            return shape(samples.mean(0)) if link else (shape(samples.mean(0)), shape(samples.var(0)))
        if joint:
            need = Joint("Take fewer inputs, or outputs=[...], or leave out joint=True.", chosen)
            (whole,) = scaled_outputs(source, inputs, need)
            assert isinstance(whole.outputs, OutputGaussian)
            assert whole.outputs.covariance is not None
            return whole.outputs.mean[0], whole.outputs.covariance[0]
        if how is not None:
            parts = shape.watch(scaled_outputs(source, inputs, needed_by(how, diagonal_output)))
            return shape(torch.cat([linked(source, link, how, part, draws, diagonal_output) for part in parts]))
        answer = Answer(frame.budget, "Take fewer inputs at a time, or diagonal_output=True.")
        need = Variances(chosen) if diagonal_output else Covariances(chosen)
        out = joined([part.outputs for part in shape.watch(scaled_outputs(source, inputs, need, answer))])
        spread = shape(out.variance) if out.covariance is None else shape.covariance(out.covariance)
        return shape(out.mean), spread


@jointly("la.predict")
@refuse_unknown_keywords
@plainly
def predict(
    source: Source,
    /,
    x: Any = None,
    pred_type: str = "glm",
    link_approx: str | Link | None = None,
    n_samples: int = 100,
    diagonal_output: bool | None = None,
    generator: torch.Generator | None = None,
    progress_bar: bool | None = None,
    group: Group = OWN,
    **model_kwargs: Any,
) -> Prediction | PredictionAtPositions:
    """Return p(y given x, data) with observation noise, its summaries, and both kinds of uncertainty.

    Args:
        x: A tensor, a mapping, a tuple of inputs, or a DataLoader (its labels are not used). A mapping may come by
            name instead: `**batch`.
        pred_type: 'glm' linearises the network at its weights. 'nn' runs the network with `n_samples` draws of the
            weights.
        link_approx: One of `la.likelihood.links`, or a `Link` of your own. If left out, `la.likelihood.default_link`:
            'one_vs_rest' for classes, 'quadrature' for labels and ordered classes. `la(x)` keeps the paper's 'probit'.
        n_samples: How many draws of the outputs. The epistemic part for classes comes from draws with every link.
        diagonal_output: Whether to leave out covariances between outputs. If not given, they are left out for more than
            32 outputs, unless link 'mc' needs them.
        generator: The random generator. torch's global one by default.
        progress_bar: Whether a DataLoader shows a progress bar; None shows one in a terminal after a few seconds.
        group: The process group, if each rank predicts its own part of a loader: all get the predictions of all, in the
            order of the data. If left out, nothing is exchanged. After `fit(shard_factors=True)`, all ranks must give
            the same inputs, and each adds the variances of its own layers.
        **model_kwargs: Passed on to the network.

    Returns:
        A `Prediction`. For a network with outputs at positions, or with one number per example, a
            `PredictionAtPositions`.

    Raises:
        NotFittedError: `fit` was not called yet.
        OptionError: the link or the `pred_type` is unknown.
        InputError: the network's outputs have another shape than in `fit`, or are not finite, or the loader is empty.
        ModelError: the network fails on these inputs.
        MemoryBudgetError: the result would not fit into memory.
    """
    if (
        type(x) is Tensor
        and type(pred_type) is str
        and pred_type == "glm"
        and (diagonal_output is progress_bar is generator is None)
        and group is OWN
        and not model_kwargs
        and type(n_samples) is int
        and 2 <= n_samples <= FEW_DRAWS
    ):
        found = at_one_input(source, x, link_approx)
        if found is not None:
            return found.prediction(source, Draws(n_samples))
    x, model_kwargs = given_by_name(x, model_kwargs)
    frame, response = source.frame, source.likelihood.response
    pred_type = pred_type_named(pred_type, frame.functional)
    link, how = response.link_of(link_approx)
    draws = draws_asked(source, source.n_outputs or 1, n_samples, 2, generator)
    if frame.doubt is not None:
        source.warn_once("noise", frame.doubt)
    progress = flag_or_none(progress_bar, "progress_bar")
    if diagonal_output is not None:
        diagonal_output = flag(diagonal_output, "diagonal_output")
    if pred_type == "nn" and draws.generator is None:
        draws = Draws(draws.n, torch.Generator().manual_seed(int(torch.randint(2**31, ()))))
    state = None if draws.generator is None else draws.generator.get_state()
    parts: list[tuple[Outputs, Tensor | None]] = []
    marks: list[float] = []
    shape, needed = Reshaper(), how is not None and with_covariances(how.needs())
    independent, need = diagonal_output, None
    answer = Answer(frame.budget, "Predict fewer inputs at a time, or with diagonal_output=True, or fewer n_samples.")
    reduce = alone if isinstance(group, Unsaid) else reduce_over(group, None, None)
    with reduce.session(), joined_ranks(reduce), torch.set_grad_enabled(frame.enable_backprop):
        apart = reduce.size > 1 and not frame.spread  # each rank has inputs of its own
        require_same_settings(source, reduce)
        shard = divided_inputs(x, reduce, source) if apart else Shard(x)
        if reduce.size == 1 and is_shuffled(x):
            source.warn_once(
                "shuffled",
                "the loader shuffles, so the rows of the prediction are in a random order, not that of the dataset. "
                "Write DataLoader(..., shuffle=False).",
            )
        unseeded = draws
        if reduce.size > 1 or (draws.generator is None and isinstance(x, DataLoader)):
            draws = same_draws(draws, reduce)  # before the loader draws a seed for its workers, or not
            state = None if draws.generator is None else draws.generator.get_state()
        batches = prediction_batches(shard.loader, frame.keys, model_kwargs, progress)
        if apart:
            batches = marked(batches, marks)
        for where, inputs in batches if apart or reduce.size == 1 else in_step(batches, reduce):
            with within(where):
                if pred_type == "nn":
                    if draws.generator is not None and state is not None:
                        draws.generator.set_state(state)  # the same draws of the weights for every batch
                    here = Reshaper()
                    drawn = scaled_outputs(source, inputs, Functions(draws, exact=True), answer)
                    samples = OutputSamples(joined_draws(drawn, here))
                    shape.add(here)
                    parts.append((samples, response.inverse_link(samples.samples).mean(0) if link else None))
                    continue
                if independent is None:
                    independent = n_outputs_at(source, inputs) > _MAX_COVARIANCE and not needed
                need = need or _wanted(response, independent)
                for part in shape.watch(scaled_outputs(source, inputs, need, answer), further=True):
                    mean = None if how is None else linked(source, link, how, part, draws, independent)
                    parts.append((part.outputs, mean))
        if apart:
            parts, shape = parts_in_order(parts, shape, shard, marks, reduce)
        if not parts:
            raise InputError("the loader to predict on gave no batch; give at least one.")
        outputs = joined([outputs for outputs, _ in parts])
        if not len(outputs.mean):
            raise InputError("the inputs to predict on hold no example.")
        p = torch.cat([p for _, p in parts if p is not None]) if link else None
        draws = unseeded if unseeded.generator is None else draws
        return shape.prediction(response.prediction(outputs, p, source.noise_level, link, draws))


@refuse_unknown_keywords
@plainly
def preference(
    source: Source, /, a: Any, b: Any, link_approx: str | None = None, n_samples: int = 100, **model_kwargs: Any
) -> Tensor:  # (N, *positions)
    """Return the probability that each input of `a` beats its counterpart in `b`. For 'reward_modeling' only.

    What the two rewards have in common cancels, such as the uncertain offset of all rewards.

    Args:
        a: N inputs, as the network takes them.
        b: N inputs to compare with them, one each.
        link_approx: 'probit', 'mc' or 'quadrature'. By default 'quadrature', which is exact.
        n_samples: How many draws, for 'mc'. They are seeded: every call uses the same.
        **model_kwargs: Passed on to the network.

    Returns:
        (N,), or the shape of the network's positions.

    Raises:
        UnsupportedError: the posterior has another likelihood.
        NotFittedError: `fit` was not called yet.
    """
    likelihood = source.likelihood
    if not likelihood.pairs:
        raise UnsupportedError(
            f"preference(a, b) compares rewards; this posterior is for {likelihood.name!r}. Write "
            "Laplace(model, 'reward_modeling')."
        )
    draws = draws_asked(source, source.n_outputs or 1, n_samples, 1, torch.Generator().manual_seed(0))
    inputs, shape = Inputs.paired(b, a, model_kwargs, source.frame.keys), Reshaper()
    link = likelihood.link_named(link_approx)
    how = likelihood.links[link]
    with torch.set_grad_enabled(source.frame.enable_backprop):
        parts = shape.watch(scaled_outputs(source, inputs, how.needs()))
        return shape.each(torch.cat([linked(source, link, how, part, draws) for part in parts]).squeeze(1))


def _wanted(response: Response, independent: bool) -> Query:
    """Return the query of a full prediction."""
    if response.only_differences:
        return Contrasts(covariances=not independent, beside=True)
    return Variances() if independent else Covariances()
