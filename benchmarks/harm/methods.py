"""The methods: the network as it is, its temperature, and posteriors tuned in each way and read through each link."""

from __future__ import annotations

import inspect
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import laplace
from laplace import Laplace

from . import scores
from .scores import Classes, Values
from .tasks import Prepared, Splits

BATCH = 500
MOST_FULL = 3000  # weights of a last layer whose full precision is kept
SKETCH_FROM = 5000  # training examples from which the curvature of all weights is sketched
Batches = list[tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Sizes:
    """How many examples are scored."""

    test: int = 5000
    outside: int = 1000
    test_all: int = 2000  # with all weights uncertain
    outside_all: int = 500


@dataclass(frozen=True)
class Tuning:
    """A way to set the hyperparameters, and the links that are then read; None is the default of `la.predict`."""

    name: str
    run: Callable[[Laplace, Batches, bool], object]
    links: tuple[str | None, ...] = (None,)


def _by(method: str, la: Laplace, val: Batches, regression: bool) -> object:
    names = ("prior_precision", "sigma_noise") if regression else ("prior_precision",)
    return la.tune(*names, method=method)


TUNINGS = (
    Tuning("evidence", partial(_by, "evidence"), ("probit", "mc", "one_vs_rest")),
    Tuning("loo", partial(_by, "loo")),
    Tuning("auto", lambda la, val, regression: la.tune()),
    Tuning("calibrate", lambda la, val, regression: la.calibrate(val)),
    Tuning("calibrate-best", lambda la, val, regression: la.calibrate(val, rule="best")),
)


def missing(tuning: Tuning) -> str | None:
    """Return why this version of the library cannot run a tuning, or None."""
    if tuning.name.startswith("calibrate") and not hasattr(Laplace, "calibrate"):
        return "there is no la.calibrate"
    if tuning.name in ("loo", "auto") and inspect.signature(Laplace.tune).parameters["method"].default != "auto":
        return "la.tune has no method 'auto'"
    return None


def key(weights: str, tuning: str, link: str | None) -> str:
    """Return the name of a column and its posterior: 'last kron / evidence probit'."""
    return f"{weights} / {tuning}{' ' + link if link else ''}"


def network_rows(prepared: Prepared, regression: bool, sizes: Sizes) -> Iterator[tuple[str, dict]]:
    """Score the network, and the network with one number fitted to the validation data, on what posteriors see."""
    yield from _network_rows("last", prepared, regression, sizes.test, sizes.outside)
    if prepared.whole:
        yield from _network_rows("all", prepared, regression, sizes.test_all, sizes.outside_all)


def _network_rows(
    which: str, prepared: Prepared, regression: bool, n_test: int, n_outside: int
) -> Iterator[tuple[str, dict]]:
    splits, head = prepared.features, prepared.head
    x, y = splits.test_x[:n_test], splits.test_y[:n_test]
    outside = {name: other[:n_outside] for name, other in splits.outside.items()}
    with torch.no_grad():
        f, f_val = head(splits.train_x), head(splits.val_x)
        if regression:
            for name, out, target in (("network", f, splits.train_y), ("temperature", f_val, splits.val_y)):
                noise = (out - target).square().mean().sqrt()
                found = Values(head(x), noise.expand(len(x), 1))
                yield f"{which} / {name}", scores.of_values(found, y) | {"sigma_noise": float(noise)}
            return
        for name, t in (("network", 1.0), ("temperature", best_temperature(f_val, splits.val_y))):
            row = scores.of_classes(lambda inputs, t=t: Classes((head(inputs) / t).softmax(-1)), x, y, outside)
            yield f"{which} / {name}", row | {"softmax_temperature": t}


def best_temperature(logits: Tensor, y: Tensor) -> float:
    """Return the T > 0 that minimises the NLL of softmax(f / T): golden section in log T."""

    def loss(t: float) -> float:
        return float(cross_entropy(logits.double() / t, y))

    low, high, golden = -3.0, 3.0, (5**0.5 - 1) / 2
    while high - low > 1e-4:
        left, right = high - golden * (high - low), low + golden * (high - low)
        if loss(2.718281828**left) < loss(2.718281828**right):
            high = right
        else:
            low = left
    return 2.718281828 ** ((low + high) / 2)


def posterior_rows(
    prepared: Prepared,
    weights: str,
    regression: bool,
    sizes: Sizes,
    wanted: Callable[[str], bool],
    seed: int,
    tunings: Sequence[Tuning] = TUNINGS,
) -> Iterator[tuple[str, dict]]:
    """Fit once; tune in each way, and score what each link says. A row says what was tuned, and what was warned of."""
    todo = [
        (tuning, [link for link in _links(tuning, regression) if wanted(key(weights, tuning.name, link))])
        for tuning in tunings
        if missing(tuning) is None
    ]
    if not any(links for _, links in todo):
        return
    model, splits, structure, curvature, n_test, n_outside = _parts(prepared, weights, regression, sizes)
    subset = "all" if weights.startswith("all") else "last_layer"
    start = time.process_time()
    la = Laplace(
        model, "regression" if regression else "classification", subset, structure, **curvature,
    ).fit(_batches(splits.train_x, splits.train_y))  # fmt: skip
    fitting = time.process_time() - start
    val = _batches(splits.val_x, splits.val_y)
    x, y = splits.test_x[:n_test], splits.test_y[:n_test]
    outside = {name: other[:n_outside] for name, other in splits.outside.items()}
    for tuning, links in todo:
        if not links:
            continue
        _reset(la)
        start = time.process_time()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            tuning.run(la, val, regression)
        tuned = {"tuning_seconds": time.process_time() - start, "fit_seconds": fitting, **_hyperparameters(la)}
        tuned["warned"] = [str(warning.message).split("\n")[0] for warning in caught]
        for link in links:
            start = time.process_time()
            if regression:
                found = la.predict(x)
                row = scores.of_values(Values(found.mean, found.total.sqrt()), y)
            else:
                row = scores.of_classes(partial(_classes, la, link, seed), x, y, outside)
            yield key(weights, tuning.name, link), row | tuned | {"predict_seconds": time.process_time() - start}


def weights_of(prepared: Prepared) -> list[str]:
    """Return which posteriors are made for a task."""
    n = sum(p.numel() for p in prepared.head.parameters())
    whole = ["all kron"] if prepared.whole else []
    return ["last kron", *(["last full"] if n <= MOST_FULL else []), *whole]


def _links(tuning: Tuning, regression: bool) -> Sequence[str | None]:
    if regression:
        return (None,)
    known = laplace.Categorical().response.links
    return [link for link in tuning.links if link is None or link in known]


def _parts(
    prepared: Prepared, weights: str, regression: bool, sizes: Sizes
) -> tuple[nn.Module, Splits, str, dict, int, int]:
    """Return the network, its data, the structure, the curvature's options and the numbers of examples to score.

    A last layer of classes is fitted to its features. That of a regression is fitted with the whole network: `auto`
    takes into account that the body was trained, too.
    """
    which, structure = weights.split()
    if which == "last" and regression:
        assert prepared.whole is not None
        return *prepared.whole(), structure, {}, sizes.test, sizes.outside
    if which == "last":
        return prepared.head, prepared.features, structure, {}, sizes.test, sizes.outside
    assert prepared.whole is not None
    model, splits = prepared.whole()
    sketched = len(splits.train_x) > SKETCH_FROM and splits.train_y.dim() == 1
    curvature = {"curvature": "sketch"} if sketched else {}
    return model, splits, structure, curvature, sizes.test_all, sizes.outside_all


def _batches(x: Tensor, y: Tensor) -> Batches:
    return list(zip(x.split(BATCH), y.split(BATCH), strict=True))


def _reset(la: Laplace) -> None:
    la.prior_precision = 1.0
    if "sigma_noise" in _hyperparameters(la):
        la.sigma_noise = 1.0
    if hasattr(la, "softmax_temperature"):
        la.softmax_temperature = 1.0


def _hyperparameters(la: Laplace) -> dict[str, float]:
    names = ["prior_precision", *(["sigma_noise"] if type(la.likelihood).__name__ == "Gaussian" else [])]
    names += ["softmax_temperature"] if hasattr(la, "softmax_temperature") else []
    return {name: float(torch.as_tensor(getattr(la, name)).reshape(-1)[0]) for name in names}


def _classes(la: Laplace, link: str | None, seed: int, x: Tensor) -> Classes:
    found = la.predict(x, link_approx=link, generator=torch.Generator().manual_seed(seed))
    return Classes(found.mean, found.epistemic)
