"""Define the calls that tune: `la.tune(...)`, laplace-torch's `optimize_prior_precision`, and the evidence itself."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor

from laplace.checks import choice, flag, flag_or_none, positive, shown
from laplace.distributed import OWN, Group, alone, reduce_over
from laplace.distributed.groups import Unsaid, reduce_to_tune
from laplace.distributed.together import joined, jointly
from laplace.errors import OptionError
from laplace.inference.runner import Runner
from laplace.inference.settings import require_same_results, require_same_settings
from laplace.inference.values import Values
from laplace.keywords import refuse_unknown_keywords
from laplace.linalg.autocast import plainly
from laplace.network.loaders import held_out_batches
from laplace.posterior.posterior import Posterior
from laplace.predictive.links import Link
from laplace.tuning import methods, result
from laplace.tuning.auto import looked_at
from laplace.tuning.methods import ByEvidence, Method
from laplace.tuning.problem import Problem, Scoring, how_scored, search_of, validation_of
from laplace.tuning.result import KINDS, Tuned
from laplace.tuning.search import log_grid

GROUPS = ("scalar", "layerwise", "diag")


class Tunable(Protocol):
    """Defines a posterior whose hyperparameters can be set.

    Attributes:
        prior: over the weights.
        prior_precision: of the weights.
        sigma_noise: of the observations.
        temperature: of the likelihood.
        softmax_temperature: of predictions.
        values: all of these.
    """

    values: Values
    prior: Any
    prior_precision: Any
    sigma_noise: Any
    temperature: Any
    softmax_temperature: Any

    @property
    def posterior(self) -> Posterior: ...

    @property
    def runner(self) -> Runner: ...


@jointly("la.tune")
@refuse_unknown_keywords
@plainly
def tune(
    la: Tunable,
    /,
    *names: str,
    method: str | Method | Callable[[Problem], Tuned] = "auto",
    prior_structure: str | None = None,
    train_loader: Iterable[Any] | None = None,
    val_loader: Iterable[Any] | None = None,
    loss: Any = None,
    ood_loader: Any = None,
    ood_weight: float = 0.5,
    pred_type: str = "glm",
    link_approx: str | Link | None = None,
    n_samples: int = 100,
    bounds: Mapping[str, tuple[float, float]] | None = None,
    grid_size: int = 21,
    evaluations: int = 30,
    seed: int = 0,
    n_steps: int = 100,
    progress_bar: bool | None = None,
    group: Group = OWN,
) -> Tuned:
    """Tune some of 'prior_precision', 'sigma_noise' and 'temperature', set them, and return the result.

    Without names it tunes the prior precision, and in regression also the noise. Hyperparameters of other priors are
    tuned by their names, such as 'scale' of a Student-t (its default), by evidence only.

    Without validation data: 'auto' (the default) maximises the evidence, and then checks the predictions on a sample of
    the training data. If they are worse than the network's own, it takes a narrower posterior, and the result says so.
    'evidence' maximises the log evidence by damped Newton, and only warns if the check finds harm. 'loo' minimises the
    negative log-likelihood of leave-one-out predictions of the training data; if the whole network was trained on this
    data, the result is close to the network itself.

    With validation data: 'validation' minimises the score on `val_loader` within `bounds`, by a grid over all
    hyperparameters and descents from its best basins. 'bayesian' minimises it by Bayesian optimisation with BoTorch.

    The score is the predictive negative log-likelihood, or `loss`. With `ood_loader`, `ood_weight` times the mean
    predictive entropy on these inputs is subtracted.

    Args:
        *names: the hyperparameters to tune.
        method: 'auto', 'evidence', 'loo', 'validation' or 'bayesian', a name of `laplace.tuning.register_method`, an
            object of a class that inherits `laplace.tuning.Method`, or a function of a `laplace.tuning.Problem`.
        prior_structure: 'scalar', one precision for all weights; 'layerwise', one per tensor (the default of
            'bayesian'); or 'diag', one per weight, by evidence only.
        train_loader: for 'auto', 'evidence' and 'loo', the data of `fit`, if `la` no longer knows it (because it was
            an iterator, or `la` was loaded from a file). By default `la.training_data`.
        val_loader: for 'validation' and 'bayesian', batches (x, y) that were not trained on.
        loss: a callable of (probabilities, y) or (mean, variance, y) that returns a mean, lower being better, or a
            metric object, which may say `higher_is_better`.
        ood_loader: inputs from outside the distribution.
        ood_weight: how much these inputs count, in (0, 1].
        pred_type: the `pred_type` of the predictions that are scored.
        link_approx: the link of the predictions that are scored. By default that of `la.predict`.
        n_samples: the draws of the predictions that are scored. Every point is scored with the same random numbers.
        bounds: (low, high) by name, for hyperparameters whose default bounds should be changed.
        grid_size: for 'loo', 'validation' and 'bayesian', the number of values in the first grid.
        evaluations: for 'bayesian', the number of points that are evaluated after a grid of common values.
        seed: for 'bayesian', the seed of its draws; for 'loo' and 'auto', of the sample of examples in large data.
        n_steps: for 'evidence' and 'auto', the largest number of steps.
        progress_bar: whether runs over the loaders show one; None shows one in a terminal after a few seconds.
        group: the process group of `fit`, if each rank reads its own part of `val_loader` and of the training data. All
            ranks get the same result. None tunes on this process alone.

    Returns:
        The best point, all points that were evaluated, whether the search converged, and the warnings.

    Raises:
        NotFittedError: `fit` was not called yet.
        OptionError: a name, the method or the bounds are unknown, or an option belongs to another method.
        UnsupportedError: 'temperature' by evidence, or a precision per weight by validation.
        InputError: a loader can be read only once, or its batches do not fit.
        NumericalError: a score or an evidence is not finite.
        ImportError: 'bayesian' without BoTorch.
    """
    noise = la.runner.spec.likelihood.tunes_noise
    kinds, progress_bar = result.names_of(names, la.prior, noise), flag_or_none(progress_bar, "progress_bar")
    scoring = {
        "val_loader": val_loader, "loss": loss, "ood_loader": ood_loader, "ood_weight": ood_weight, "bounds": bounds,
        "pred_type": pred_type, "link_approx": link_approx, "n_samples": n_samples, "train_loader": train_loader,
        "seed": seed,
    }  # fmt: skip
    given = scoring | {"grid_size": grid_size, "evaluations": evaluations, "n_steps": n_steps}
    usual = {name: p.default for name, p in inspect.signature(tune).parameters.items()}
    name, how = methods.method_of(method, given, usual)
    groups = choice(how.prior_structure if prior_structure is None else prior_structure, GROUPS, "prior_structure")
    reduce = reduce_to_tune(group, la.runner.ranks, val_loader)
    problem = Problem(la, kinds, groups, Scoring(**scoring, progress_bar=progress_bar, reduce=reduce))
    with torch.no_grad(), reduce.session(), joined(reduce):
        require_same_settings(la, reduce)
        tuned = how.tune(problem)
        if name in ("evidence", "loo"):
            tuned = looked_at(problem, tuned)
        if not isinstance(tuned, Tuned):
            raise OptionError(
                f"method {name!r} returned {shown(tuned)}; a laplace.tuning.Tuned is needed: problem.tuned({name!r})."
            )
        require_same_results(_found(kinds, tuned), "la.tune", reduce)
    _take(la, kinds, tuned)
    if val_loader is not None:
        la.values = replace(la.values, tuning_data=held_out_batches(val_loader))
    return tuned


@jointly("la.optimize_prior_precision")
@refuse_unknown_keywords
@plainly
def optimize_prior_precision(
    la: Tunable,
    /,
    pred_type: str = "glm",
    method: str = "marglik",
    n_steps: int = 100,
    lr: float = 0.1,
    init_prior_prec: float | Tensor = 1.0,
    prior_structure: str = "scalar",
    val_loader: Iterable[Any] | None = None,
    loss: Any = None,
    log_prior_prec_min: float = -4,
    log_prior_prec_max: float = 4,
    grid_size: int = 100,
    link_approx: str | None = None,
    n_samples: int = 100,
    verbose: bool = False,
    progress_bar: bool | None = None,
    log_prior_prec_base: float = 10.0,
    tune_sigma_noise: bool = False,
    *,
    group: Group = OWN,
) -> None:
    """Set the prior precision to the one with the largest evidence, or with the lowest score on validation data.

    This is laplace-torch's call, with its defaults: 'gridsearch' scores the paper's probit approximation, as in
    `la(x)`. `la.tune` does more, returns its result, and scores the predictions of `la.predict`.

    Args:
        pred_type: the `pred_type` of the predictions that are scored.
        method: 'marglik', which needs no validation data, or 'gridsearch' (or 'CV'), which scores a grid on
            `val_loader`.
        n_steps: for 'marglik', the largest number of steps; Newton's method takes a few.
        lr: accepted, but not used.
        init_prior_prec: for 'marglik', the value to start from.
        prior_structure: 'scalar', 'layerwise' or 'diag'.
        val_loader: for 'gridsearch', batches (x, y) that were not trained on.
        loss: for 'gridsearch', a callable of (probabilities, y) or (mean, variance, y), or a metric object of
            torchmetrics. By default the predictive negative log-likelihood.
        log_prior_prec_min: the grid's lower end, as a power of `log_prior_prec_base`.
        log_prior_prec_max: the grid's upper end.
        grid_size: the number of values in the grid.
        link_approx: the link of the predictions that are scored. By default that of `la(x)`, such as 'probit'.
        n_samples: the draws of the predictions that are scored.
        verbose: whether steps and result are printed.
        progress_bar: whether runs over the loader show one; None shows one in a terminal after a few seconds.
        log_prior_prec_base: the base of the two ends.
        tune_sigma_noise: whether to tune the noise of a regression as well.
        group: for 'gridsearch', the process group of `fit`, if each rank reads its own part of `val_loader`; for
            both, after `fit(shard_factors=True)`.

    Raises:
        NotFittedError: `fit` was not called yet.
        OptionError: the method or the prior structure is unknown, or 'gridsearch' has no `val_loader`.
        UnsupportedError: a precision per weight by validation.
        NumericalError: a score or an evidence is not finite.
    """
    verbose, progress_bar = flag(verbose, "verbose"), flag_or_none(progress_bar, "progress_bar")
    tune_sigma_noise = flag(tune_sigma_noise, "tune_sigma_noise")
    kinds = [*result.names_of((), la.prior, False)] + ["sigma_noise"] * tune_sigma_noise
    groups = choice(prior_structure, GROUPS, "prior_structure")
    if method_named(method) == "marglik":
        start = float(positive(init_prior_prec, "init_prior_prec").double().log().mean().exp())
        reduce = alone if isinstance(group, Unsaid) else reduce_over(group, None, None)
        with torch.no_grad(), reduce.session(), joined(reduce):
            require_same_settings(la, reduce)
            tuned = ByEvidence(n_steps, start, verbose).tune(Problem(la, kinds, groups))
            require_same_results(_found(kinds, tuned), "la.optimize_prior_precision", reduce)
    else:
        how = how_scored(la, pred_type, link_approx, n_samples, loss, as_in_paper=True)
        grid = log_grid(log_prior_prec_min, log_prior_prec_max, grid_size, log_prior_prec_base)
        grids = {"prior_precision": grid, "sigma_noise": log_grid(-3, 3, grid_size, 10.0)}
        again = groups != "scalar" or tune_sigma_noise
        reduce = reduce_to_tune(group, la.runner.ranks, val_loader)
        with torch.no_grad(), reduce.session(), joined(reduce):
            require_same_settings(la, reduce)
            validation = validation_of(la, how, val_loader, None, progress_bar, again, reduce)
            search = search_of(Problem(la, kinds, groups), validation, grids, _laplace_torch_option)
            if len(search.grids) == 1:
                search.each_kind()
            else:
                search.descend()
            tuned = search.found("validation")
            require_same_results(_found(kinds, tuned), "la.optimize_prior_precision", reduce)
    _take(la, kinds, tuned)
    if verbose:
        found = tuned.hyperparameters or {"prior precision": tuned.prior_precision}
        listed = ", ".join(f"{name} {value.tolist()}" for name, value in found.items())
        print(f"{listed}, noise {tuned.sigma_noise:.4g}")


def _take(la: Tunable, kinds: Sequence[str], tuned: Tuned) -> Tuned:
    """Set the tuned values."""
    found = _found(kinds, tuned)
    if own := _of_prior(kinds):
        la.prior = la.prior.with_hyperparameters(**{name: found[name] for name in own})
    for kind in (kind for kind in kinds if kind in KINDS):
        setattr(la, kind, found[kind])
    return tuned


def _found(kinds: Sequence[str], tuned: Tuned) -> dict[str, Any]:
    """Return the tuned values by name."""
    return {kind: getattr(tuned, kind) if kind in KINDS else tuned.hyperparameters[kind] for kind in kinds}


def _of_prior(kinds: Sequence[str]) -> tuple[str, ...]:
    """Return the names that are hyperparameters of a prior without precisions."""
    return tuple(kind for kind in kinds if kind not in KINDS)


def _laplace_torch_option(kind: str, side: str) -> str:
    """Say how to ask for a wider grid in `optimize_prior_precision`."""
    if kind != "prior_precision":
        return f"la.tune({kind!r}, method='validation', bounds=...)"
    return "log_prior_prec_min=" if side == "lower" else "log_prior_prec_max="


def method_named(name: str) -> str:
    """Return 'marglik' or 'gridsearch'; the paper's 'CV' is the latter."""
    return choice("gridsearch" if name == "CV" else name, ["marglik", "gridsearch"], "method")
