"""The calls that tune: `la.tune(...)`, laplace-torch's `optimize_prior_precision`, and the evidence itself."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from laplace.checks import choice, flag, flag_or_none, positive, shown
from laplace.distributed import OWN, Group, reduce_over
from laplace.errors import OptionError
from laplace.inference.runner import Runner
from laplace.linalg.autocast import plainly
from laplace.posterior.posterior import Posterior
from laplace.predictive.links import Link
from laplace.spec import refuse_unknown_keywords
from laplace.tuning import methods, result
from laplace.tuning.auto import looked_at
from laplace.tuning.methods import ByEvidence, Method
from laplace.tuning.problem import Problem, Scoring, how_scored, search_of, validation_of
from laplace.tuning.result import KINDS, Tuned
from laplace.tuning.search import log_grid

GROUPS = ("scalar", "layerwise", "diag")


class Tunable(Protocol):
    """A posterior whose hyperparameters can be set.

    Attributes:
        prior: over the weights.
        prior_precision: of the weights.
        sigma_noise: of the observations.
        temperature: of the likelihood.
        softmax_temperature: of predictions.
    """

    prior: Any
    prior_precision: Any
    sigma_noise: Any
    temperature: Any
    softmax_temperature: Any

    @property
    def posterior(self) -> Posterior: ...

    @property
    def runner(self) -> Runner: ...


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

    Without names it tunes the prior precision, and for regression the noise with it. A prior of another kind is tuned
    by the names of its hyperparameters, as 'scale' of a Student-t (its default), by evidence only.

    Without validation data: 'auto' (the default) maximises the evidence and looks at a sample of the training data;
    where the posterior makes the network worse there, it takes a narrower one, and the result says so. 'evidence':
    damped Newton on the log evidence, with a warning where the look finds harm. 'loo': the lowest negative
    log-likelihood of leave-one-out predictions of the training data; it ends near the network itself where the whole
    network was trained on the same data.

    With validation data: 'validation': the lowest score on `val_loader` within `bounds`: a grid of all that is tuned,
    and the way down from its best basins. 'bayesian': the same score by Bayesian optimisation with BoTorch.

    The score is the predictive negative log-likelihood or `loss`; with `ood_loader`, minus `ood_weight` times the
    mean entropy of the predictive there.

    Args:
        *names: which to tune.
        method: 'auto', 'evidence', 'loo', 'validation' or 'bayesian', a name of `laplace.tuning.register_method`, an
            object of a class that inherits `laplace.tuning.Method`, or a function of a `laplace.tuning.Problem`.
        prior_structure: 'scalar', one precision for all weights; 'layerwise', one per tensor (if left out, for
            'bayesian'); or 'diag', one per weight, by evidence only.
        train_loader: of 'auto', 'evidence' and 'loo', the data of `fit`, where that is not known any more (an
            iterator, a file); `la.training_data` if left out.
        val_loader: of validation, batches (x, y) that were not trained on.
        loss: a callable of (probabilities, y) or (mean, variance, y) that returns a mean, lower being better, or a
            metric object, which may say `higher_is_better`.
        ood_loader: inputs from outside the distribution.
        ood_weight: how much these count, in (0, 1].
        pred_type: of the predictions that are scored.
        link_approx: of the predictions that are scored; that of `la.predict` if left out.
        n_samples: of the predictions that are scored; drawn numbers are the same at every point.
        bounds: (low, high) for each of the three, where other than the usual ones are wanted.
        grid_size: of 'loo', 'validation' and 'bayesian', values in the first grid.
        evaluations: of 'bayesian', points looked at after a grid of common values.
        seed: of 'bayesian', what it draws from; of 'loo' and 'auto', which examples of large data are scored.
        n_steps: of 'evidence' and 'auto', steps at most.
        progress_bar: whether runs over the loaders show one; None shows one in a terminal after a few seconds.
        group: the process group of `fit`, if each rank reads its own part of `val_loader` and of the training data. All
            ranks find the same. None tunes on this process alone.

    Returns:
        The best point, all points that were looked at, whether the search converged, and the warnings.

    Raises:
        NotFittedError: before `fit`.
        OptionError: a name, a method or bounds that there are not, or options of another method.
        UnsupportedError: 'temperature' by evidence, a precision per weight by validation.
        InputError: a loader that can be read once only, or whose batches do not fit.
        NumericalError: scores or evidences that are not finite.
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
    reduce = reduce_over(group, _shared(la), val_loader)
    problem = Problem(la, kinds, groups, Scoring(**scoring, progress_bar=progress_bar, reduce=reduce))
    with torch.no_grad(), reduce.session():
        tuned = how.tune(problem)
        if name in ("evidence", "loo"):
            tuned = looked_at(problem, tuned)
    if not isinstance(tuned, Tuned):
        raise OptionError(
            f"method {name!r} returned {shown(tuned)}; a laplace.tuning.Tuned is needed: problem.tuned({name!r})."
        )
    return _take(la, kinds, tuned)


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

    laplace-torch's call, with its defaults: 'gridsearch' scores the paper's probit approximation, as `la(x)` does.
    `la.tune` does more, returns what it found, and scores the predictions of `la.predict`.

    Args:
        pred_type: of the predictions that are scored.
        method: 'marglik', which needs no validation data, or 'gridsearch' (or 'CV'), which scores a grid on
            `val_loader`.
        n_steps: of 'marglik', steps at most; Newton's method takes a few.
        lr: accepted and not needed.
        init_prior_prec: of 'marglik', where it starts.
        prior_structure: 'scalar', 'layerwise' or 'diag'.
        val_loader: of 'gridsearch', batches (x, y) that were not trained on.
        loss: of 'gridsearch', a callable of (probabilities, y) or (mean, variance, y), or a metric object of
            torchmetrics; the predictive negative log-likelihood if left out.
        log_prior_prec_min: the grid's lower end, as a power of `log_prior_prec_base`.
        log_prior_prec_max: the grid's upper end.
        grid_size: how many values it has.
        link_approx: of the predictions that are scored; that of `la(x)`, such as 'probit', if left out.
        n_samples: of the predictions that are scored.
        verbose: whether steps and result are printed.
        progress_bar: whether runs over the loader show one; None shows one in a terminal after a few seconds.
        log_prior_prec_base: the base of the two ends.
        tune_sigma_noise: find the noise of a regression, too.
        group: of 'gridsearch', the process group of `fit`, if each rank reads its own part of `val_loader`.

    Raises:
        NotFittedError: before `fit`.
        OptionError: a method or a prior structure that there is not; 'gridsearch' without `val_loader`.
        UnsupportedError: a precision per weight by validation.
        NumericalError: scores or evidences that are not finite.
    """
    verbose, progress_bar = flag(verbose, "verbose"), flag_or_none(progress_bar, "progress_bar")
    tune_sigma_noise = flag(tune_sigma_noise, "tune_sigma_noise")
    kinds = [*result.names_of((), la.prior, False)] + ["sigma_noise"] * tune_sigma_noise
    groups = choice(prior_structure, GROUPS, "prior_structure")
    if method_named(method) == "marglik":
        start = float(positive(init_prior_prec, "init_prior_prec").double().log().mean().exp())
        with torch.no_grad():
            tuned = ByEvidence(n_steps, start, verbose).tune(Problem(la, kinds, groups))
    else:
        how = how_scored(la, pred_type, link_approx, n_samples, loss, as_in_paper=True)
        grid = log_grid(log_prior_prec_min, log_prior_prec_max, grid_size, log_prior_prec_base)
        grids = {"prior_precision": grid, "sigma_noise": log_grid(-3, 3, grid_size, 10.0)}
        again = groups != "scalar" or tune_sigma_noise
        reduce = reduce_over(group, _shared(la), val_loader)
        with torch.no_grad(), reduce.session():
            validation = validation_of(la, how, val_loader, None, progress_bar, again, reduce)
            search = search_of(Problem(la, kinds, groups), validation, grids, _laplace_torch_option)
            if len(search.grids) == 1:
                search.each_kind()
            else:
                search.descend()
            tuned = search.found("validation")
    _take(la, kinds, tuned)
    if verbose:
        found = tuned.hyperparameters or {"prior precision": tuned.prior_precision}
        listed = ", ".join(f"{name} {value.tolist()}" for name, value in found.items())
        print(f"{listed}, noise {tuned.sigma_noise:.4g}")


def _shared(la: Tunable) -> str | None:
    """Say that the posterior is shared by several ranks, which must tune it together."""
    return f"a posterior that {la.runner.ranks} ranks fitted together" if la.runner.ranks > 1 else None


def _take(la: Tunable, kinds: Sequence[str], tuned: Tuned) -> Tuned:
    """Set the tuned values."""
    if own := _of_prior(kinds):
        la.prior = la.prior.with_hyperparameters(**{name: tuned.hyperparameters[name] for name in own})
    for kind in (kind for kind in kinds if kind in KINDS):
        setattr(la, kind, getattr(tuned, kind))
    return tuned


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
