"""`laplace.report`: read the data, score every method, judge, and write the page and its JSON."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, Final

from torch import Tensor

from laplace.checks import flag_or_none, shown, whole_number
from laplace.distributed.groups import require_whole
from laplace.errors import OptionError, UnsupportedError
from laplace.evaluation.report.making import Maker, flattened, plain
from laplace.evaluation.report.page import page
from laplace.evaluation.report.reading import LAPLACE, NETWORK, SCALED, Reported
from laplace.evaluation.report.result import Report, page_path
from laplace.evaluation.report.shelves import Show
from laplace.evaluation.report.verdicts import Thresholds
from laplace.inference.source import Source
from laplace.keywords import refuse_unknown_keywords_of
from laplace.linalg.autocast import plainly
from laplace.network.arrays import is_array

FORMAT: Final = 1  # of the JSON
_INSTEAD: Final = {
    **dict.fromkeys(("ood_loader", "ood_loaders", "ood_data"), 'ood={"name": loader}'),
    **dict.fromkeys(("shift", "shift_loader", "shift_loaders"), 'shifts={"name": loader}'),
    **dict.fromkeys(("y", "x"), "laplace.report(la, (x, y))"),
}  # what to write for options that are easily guessed


@refuse_unknown_keywords_of("laplace.report", _INSTEAD)
@plainly
def report(
    la: Reported,
    /,
    test_loader: Any,
    ood: Mapping[str, Any] | None = None,
    val_loader: Any = None,
    train_loader: Any = None,
    shifts: Mapping[str, Any] | None = None,
    out: str | os.PathLike[str] | None = "report.html",
    *,
    sources: Mapping[str, Source] | None = None,
    class_names: Sequence[str] | None = None,
    feature_names: Sequence[str] | None = None,
    examples: Show | None = None,
    title: str = "How far can this network be trusted?",
    thresholds: Thresholds | None = None,
    n_bootstrap: int = 500,
    seed: int = 0,
    progress_bar: bool | None = None,
) -> Report:
    """Say how far a network can be trusted, on one page: verdicts in words, scores side by side, figures, examples.

    The page is one HTML file without scripts, which opens offline; a JSON file beside it has the same numbers. It
    compares the network alone, the network rescaled on validation data (by its softmax temperature or noise), Laplace,
    and further sources. Each loader is read once, and every method predicts every batch once. A part that cannot be
    computed is left out, and the page says why; only unusable test data raises an error.

    Args:
        la: A fitted `Laplace`.
        test_loader: Batches (x, y) that were used neither to train nor to tune, or whole arrays as a tuple (x, y).
        ood: Inputs from outside the distribution, by name: loaders with or without labels, or tensors.
        val_loader: Validation data, to rescale the network. Without it, the comparison is not fair to the network.
        train_loader: The training data, to find test examples that are also in it, and to show the scores on it.
        shifts: Labelled data of a changed kind by name, such as noisy images; or by name and strength:
            `{"noise": {1: loader, 2: loader}}`.
        out: Where to write the page; its JSON gets the same name with `.json`. None writes nothing.
        sources: Further methods to compare by name: another `Laplace`, or any `Source`.
        class_names: The names of the classes, labels or outputs.
        feature_names: The names of the inputs' columns, for examples that are rows of numbers.
        examples: What to show of the test examples: one text each, in order, or a function from an input to a text. If
            left out, images are shown as thumbnails and others by their first numbers.
        title: The heading.
        thresholds: The limits beyond which the report criticises; see `Thresholds`.
        n_bootstrap: How many resamples the intervals use.
        seed: The seed of the resamples and of the draws of predictions.
        progress_bar: Whether to show a progress bar; None shows one in a terminal after a few seconds.

    Returns:
        A `Report`: its verdicts, its numbers as a dict, its page. It prints as a summary.

    Raises:
        NotFittedError: `fit` was not called yet.
        OptionError: an option has a wrong type or value.
        InputError: the test data is empty, or does not fit.
        UnsupportedError: preferences between pairs have no report.
    """
    _require_posterior(la)
    _require_labels(test_loader)
    posterior = la.posterior.detached()
    if la.likelihood.pairs:
        raise UnsupportedError("a report is for single inputs, not for preferences between pairs.")
    limits = _thresholds(thresholds)
    others = _sources(sources)
    path = None if out is None else page_path(out, "out")
    n_bootstrap, seed = whole_number(n_bootstrap, "n_bootstrap", 20, 100_000), whole_number(seed, "seed", 0)
    names = _names(class_names, "class_names"), _names(feature_names, "feature_names")
    show, ood, shifts = _checked_show(examples), _named(ood, "ood"), _named(shifts, "shifts")
    for loader in (test_loader, val_loader, train_loader, *ood.values(), *dict(flattened(shifts)).values()):
        require_whole(loader, "laplace.report")
    if not isinstance(title, str):
        raise OptionError(f"title={shown(title)} must be a string.")
    maker = Maker(la, others, limits, n_bootstrap, seed, flag_or_none(progress_bar, "progress_bar"))
    changed = la.runner.changed(posterior.fit.mean, thoroughly=True)
    data = maker.made(test_loader, ood, val_loader, train_loader, shifts, show, names[0])
    data = {"format": FORMAT, "title": title} | maker.judged(data, changed)
    data |= {"class_names": names[0], "feature_names": names[1]}
    data = plain(data)
    found = Report(data, page(data, maker.pictures))
    if path is not None:
        found.save(path)
    return found


def _require_posterior(la: Any) -> None:
    if hasattr(la, "runner") and hasattr(type(la), "posterior"):
        return
    other = (
        ' It goes beside one: sources={"name": ...}.' if hasattr(la, "outputs") and hasattr(la, "likelihood") else ""
    )
    raise OptionError(
        f"laplace.report takes a fitted Laplace first, and got a {type(la).__name__}.{other} Write "
        "la = Laplace(model, ...).fit(train_loader), then laplace.report(la, test_loader)."
    )


def _require_labels(test: Any) -> None:
    if isinstance(test, Tensor) or is_array(test):
        raise OptionError(
            f"test_loader is a {type(test).__name__}, and the labels are needed, too. Write whole data as one tuple: "
            "laplace.report(la, (x, y))."
        )


def _thresholds(value: Any) -> Thresholds:
    if value is None:
        return Thresholds()
    if not isinstance(value, Thresholds):
        raise OptionError(f"thresholds={shown(value)}: laplace.evaluation.Thresholds(calibration=...) is needed.")
    return value


def _sources(value: Any) -> dict[str, Source]:
    given = _named(value, "sources")
    for name, source in given.items():
        if not hasattr(source, "outputs") or not hasattr(source, "likelihood"):
            raise OptionError(f"sources[{name!r}] is a {type(source).__name__}; a Laplace or another Source is needed.")
        if name in (NETWORK, SCALED, LAPLACE):
            raise OptionError(f"sources[{name!r}]: this name is taken. Choose another.")
    return given


def _named(value: Any, what: str) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, Mapping) or not all(isinstance(name, str) and name for name in value):
        raise OptionError(f"{what}={shown(value)}: a mapping from names is needed, as in {what}={{'name': loader}}.")
    return dict(value)


def _names(value: Any, what: str) -> list[str] | None:
    if value is None:
        return None
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise OptionError(f"{what}={shown(value)}: a list of names is needed.")
    return [str(name) for name in value]


def _checked_show(value: Any) -> Any:
    if value is None or callable(value) or (isinstance(value, Sequence) and not isinstance(value, str)):
        return value
    raise OptionError(f"examples={shown(value)}: a list of texts, or a function from an input to a text, is needed.")
