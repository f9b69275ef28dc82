"""The methods that are compared on a task, and their scores."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

import torch
from experiments.shift.sets import INSIDE, Labelled, Task
from experiments.uq.methods import Method
from experiments.uq.scores import averaged, scores
from torch import Tensor, nn

from laplace import Laplace
from laplace.evaluation import gaussian_nll, gaussian_pit, interval_coverage, quantile_calibration_error, rmse
from laplace.rivals import Ensemble, Mixture

BATCH = 1000


def methods(task: Task) -> Iterator[Method]:
    """Yield everything that is compared. The first network stands for a single one."""
    single = task.networks[:1]
    yield _ensemble("MAP", single, task)
    yield _scaled("noise scaling" if task.regression else "temperature", single, task)
    yield _ensemble("ensemble", task.networks, task)
    yield _scaled("ensemble, scaled", task.networks, task)
    for options in ({}, *([{"subset_of_weights": "all"}] if task.regression else [])):
        of = "LA, all weights" if options else "LA"
        for name, tuned in ((of, _by_training_data), (f"{of}, calibrated", _by_validation)):
            members = [_posterior(name, network, task, tuned, options) for network in task.networks]
            yield members[0]
            mixed = Mixture([member.source for member in members])
            yield Method(f"mixture of {name}", mixed, None, sum(member.seconds for member in members))


def scores_of(tasks: list[Task]) -> dict[str, dict]:
    """Return the scores of each method, averaged over tasks. With several, the median NLL and that of each, too."""
    rows: dict[str, list[dict]] = {}
    for task in tasks:
        for method in methods(task):
            rows.setdefault(method.name, []).append(scored(method, task))
    found = {name: rounded(averaged(each)) for name, each in rows.items()}
    if len(tasks) > 1:
        for name, each in rows.items():
            for which, own in found[name]["sets"].items():
                nlls = [round(row["sets"][which]["nll"], 3) for row in each]
                own["median_nll"] = median(nlls)
                found[name][f"nll_{which}_of_each"] = nlls
    return found


def rounded(values: Any) -> Any:
    """Return the numbers of a nested dict with five digits behind the point."""
    return {key: rounded(value) for key, value in values.items()} if isinstance(values, dict) else round(values, 5)


def scored(method: Method, task: Task) -> dict:
    """Return the scores on both labelled sets, and on inputs from outside."""
    if task.regression:
        found = {name: _of_numbers(method, *pair) for name, pair in task.labelled.items()}
        out: dict[str, Any] = {"sets": found, "ood": {}}
    else:
        out = scores(method, task.labelled, task.outside, INSIDE)
    return out | {"fit_seconds": method.seconds, "found": method.found}


def _of_numbers(method: Method, x: Tensor, y: Tensor) -> dict[str, float]:
    p = method.predict(x)
    mean, variance = p.mean.double(), p.variance.double()
    low, high = p.interval(0.9)
    return {
        "nll": gaussian_nll(mean, variance, y),
        "rmse": rmse(mean, y),
        "calibration_error": quantile_calibration_error(gaussian_pit(mean, variance, y)),
        "coverage_90": float(interval_coverage(low, high, y)),
    }


def _kind(task: Task) -> str:
    return "regression" if task.regression else "classification"


def _noise(networks: list[nn.Module], data: Labelled) -> float:
    """Return the root mean square of the residuals."""
    with torch.no_grad():
        return float(torch.stack([(net(data[0]) - data[1]).square().mean() for net in networks]).mean().sqrt())


def _ensemble(name: str, networks: list[nn.Module], task: Task) -> Method:
    """Return networks as they are; a regression's noise is that of the training residuals."""
    noise = {"sigma_noise": _noise(networks, task.train)} if task.regression else {}
    return Method(name, Ensemble(networks, _kind(task), **noise), None, 0.0, noise)


def _scaled(name: str, networks: list[nn.Module], task: Task) -> Method:
    """Return networks with one temperature, or one noise, by validation data."""
    start, source = time.process_time(), _ensemble(name, networks, task).source
    source.calibrate(task.validation)
    key = "sigma_noise" if task.regression else "softmax_temperature"
    return Method(name, source, None, time.process_time() - start, {key: float(getattr(source, key))})


def _by_training_data(la: Laplace, task: Task) -> None:
    la.tune()


def _by_validation(la: Laplace, task: Task) -> None:
    la.calibrate(task.validation)


def _posterior(
    name: str, network: nn.Module, task: Task, tune: Callable[[Laplace, Task], None], options: dict
) -> Method:
    start = time.process_time()
    batches = list(zip(*(part.split(BATCH) for part in task.train), strict=True))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # tuning warns where it may do harm: that is what is measured
        la = Laplace(network, _kind(task), **options).fit(batches)
        tune(la, task)
    found = {"prior_precision": float(la.prior_precision.reshape(-1)[0])}
    key = "sigma_noise" if task.regression else "softmax_temperature"
    found[key] = float(getattr(la, key))
    return Method(name, la, None, time.process_time() - start, found)
