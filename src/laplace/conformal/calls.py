"""Calibrate by `la.conformal(cal_loader)`, or on predictions that exist already."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from laplace.checks import flag, flag_or_none, generator_or_none, shown
from laplace.conformal.calibrated import Conformal
from laplace.conformal.examples import AnyPrediction, candidates, labelled, rows_of, targets_of
from laplace.conformal.quantiles import checked_level
from laplace.conformal.rules import RANDOMISED, IntervalRule, rule_of
from laplace.conformal.shards import Found, of_all_ranks
from laplace.distributed import OWN, Group, Reduce, alone
from laplace.distributed.groups import reduce_to_calibrate
from laplace.distributed.shards import Shard, places, read_alone
from laplace.distributed.together import jointly
from laplace.errors import InputError, OptionError, UnsupportedError, warn
from laplace.inference.settings import require_same_settings
from laplace.inference.shared import divided
from laplace.inference.source import Source
from laplace.inference.values import tuning_data
from laplace.keywords import refuse_unknown_keywords
from laplace.linalg.autocast import plainly
from laplace.linalg.sampling import Keyed, seed_from
from laplace.network.loaders import ArrayBatches, held_out_batches
from laplace.network.overlap import overlap
from laplace.predictive.links import Link
from laplace.predictive.prediction import Prediction
from laplace.predictive.reshape import PredictionAtPositions


@jointly("la.conformal")
@refuse_unknown_keywords
@plainly
@torch.no_grad()
def conformal(
    source: Source,
    /,
    cal_loader: Any,
    level: float = 0.9,
    method: str | None = None,
    *,
    y: Any = None,
    class_conditional: bool = False,
    randomized: bool | None = None,
    penalty: float | None = None,
    k_reg: int | None = None,
    pred_type: str = "glm",
    link_approx: str | Link | None = None,
    n_samples: int = 100,
    generator: torch.Generator | None = None,
    progress_bar: bool | None = None,
    group: Group = OWN,
) -> Conformal:
    """Calibrate intervals or sets that contain y with probability at least `level`, for any network and posterior.

    The guarantee is for new examples that are exchangeable with those of `cal_loader`, on average over inputs.
    Take examples that were used neither for training nor for tuning.

    Args:
        cal_loader: Batches (x, y), or mappings; or the inputs of all data, with labels in `y`.
        level: The default level of `interval`, `set` and `coverage_test`, between 0 and 1.
        method: The score. For regression: 'scaled' by the predictive standard deviation, 'absolute', or 'cqr', the
            predictive's quantiles moved by one amount. For counts: 'scaled'. For classes: 'lac', all classes above one
            probability, with the smallest sets; 'aps' and 'raps', with sets that adapt to how hard an input is. For
            labels: 'lac'. The first of these by default.
        y: The labels, if `cal_loader` is the inputs of all data.
        class_conditional: Whether the guarantee holds for each true class separately (Mondrian). It takes as many
            examples of every class as `level` asks for: at least 9 at 0.9, 99 at 0.99.
        randomized: For 'aps' and 'raps': False draws no random numbers, and makes larger sets.
        penalty: For 'raps', how much each class beyond `k_reg` adds to the score; 0.01 by default.
        k_reg: For 'raps', how many classes have no penalty; 5 by default.
        pred_type: As for `predict`.
        link_approx: As for `predict`.
        n_samples: As for `predict`.
        generator: The random generator of 'aps', 'raps' and draws of predictions. torch's global one by default.
        progress_bar: Whether to show a progress bar; None shows one in a terminal after a few seconds.
        group: The process group, if each rank reads its own part of `cal_loader`: all ranks get the thresholds of all
            data. If left out, every rank must read all of it, and nothing is exchanged.

    Returns:
        A `Conformal`, with `interval(x)`, `set(x)`, `coverage_test(loader)`, `save` and `load`.

    Raises:
        OptionError: the level is not between 0 and 1, or the method or an option does not exist for this likelihood.
        InputError: there is no example, or labels do not match.
        UnsupportedError: the likelihood does not predict y, or the network has outputs at several positions.
    """
    likelihood = source.likelihood
    if likelihood.response is not likelihood or likelihood.pairs:
        raise UnsupportedError(
            f"{likelihood.name!r} does not predict y at new inputs, so there is nothing to calibrate. Take "
            "'regression', 'heteroscedastic', 'classification', 'binary', 'multilabel' or 'poisson'."
        )
    if getattr(level, "shape", ()) or isinstance(level, (list, tuple)):
        raise OptionError(
            f"level={shown(level)} must be one number between 0 and 1. If these are the labels, write "
            "la.conformal((x, y))."
        )
    reduce = reduce_to_calibrate(group, cal_loader, "la.conformal")
    generator = generator_or_none(generator)
    options = {"pred_type": pred_type, "link_approx": link_approx, "n_samples": n_samples}
    data = cal_loader if y is None else ArrayBatches(cal_loader, y)
    if shared := overlap(getattr(source, "training_data", None), data):
        warn(
            f"cal_loader {shared}. The network was trained on these labels, so intervals and sets will be too small, "
            "and the guarantee does not hold. Give data that was used neither for training nor for tuning."
        )
    elif shared := overlap(tuning_data(source), held_out_batches(data), "that la was tuned on"):
        warn(
            f"cal_loader {shared}. Predictions were made to fit these labels, so intervals and sets are a little too "
            "small, and the guarantee does not hold. Give data that was used neither for training nor for tuning."
        )
    given = {"randomized": randomized, "penalty": penalty, "k_reg": k_reg}
    progress_bar = flag_or_none(progress_bar, "progress_bar")
    with reduce.session():
        require_same_settings(source, reduce)
        shard = read_alone(data) if reduce.size == 1 else divided(data, reduce, source)
        seed = _seed(method, randomized, generator, reduce)
        examples = labelled(source, shard.loader, options | {"generator": generator}, progress_bar)
        return _calibrated(
            examples, level, method, class_conditional, given, seed, source, options, reduce=reduce, shard=shard
        )


@refuse_unknown_keywords
@torch.no_grad()
def from_predictions(
    prediction: AnyPrediction,
    y: Any,
    level: float = 0.9,
    method: str | None = None,
    *,
    class_conditional: bool = False,
    randomized: bool | None = None,
    penalty: float | None = None,
    k_reg: int | None = None,
    generator: torch.Generator | None = None,
) -> Conformal:
    """Calibrate on predictions that exist already, from any source.

        conformal = from_predictions(la.predict(x_cal), y_cal)
        conformal.interval(la.predict(x_new))

    Args:
        prediction: What `predict` returned for the calibration examples.
        y: Their labels.
        level: The default level of `interval`, `set` and `coverage_test`, between 0 and 1.
        method: As for `la.conformal`.
        class_conditional: Whether the guarantee holds for each true class separately (Mondrian).
        randomized: For 'aps' and 'raps': False draws no random numbers, and makes larger sets.
        penalty: For 'raps', how much each class beyond `k_reg` adds to the score; 0.01 by default.
        k_reg: For 'raps', how many classes have no penalty; 5 by default.
        generator: The random generator of 'aps' and 'raps'. torch's global one by default.

    Returns:
        A `Conformal`, whose calls take predictions instead of inputs.

    Raises:
        OptionError: the level is not between 0 and 1, or the method or an option does not exist for this prediction.
        InputError: there is no example, or labels do not match.
    """
    if not isinstance(prediction, (Prediction, PredictionAtPositions)):
        raise InputError(f"a {type(prediction).__name__} is no prediction. Give what la.predict(x) returns.")
    given = {"randomized": randomized, "penalty": penalty, "k_reg": k_reg}
    seed = _seed(method, randomized, generator_or_none(generator), alone)
    rows = rows_of(prediction)
    return _calibrated([(rows, targets_of(rows, y))], level, method, class_conditional, given, seed, None, None)


def _seed(method: str | None, randomized: Any, generator: torch.Generator | None, reduce: Reduce) -> int:
    """Draw the seed of the scores' random numbers, the same on all ranks. Scores that take none draw no seed."""
    if method not in RANDOMISED or randomized is False:
        return 0
    return reduce.share(0, seed_from(generator, 2**62))


def _calibrated(
    examples: Iterable[tuple[Prediction, Tensor]],
    level: float,
    method: str | None,
    class_conditional: bool,
    given: dict[str, Any],
    seed: int,
    source: Source | None,
    options: dict[str, Any] | None,
    *,
    reduce: Reduce = alone,
    shard: Shard | None = None,
) -> Conformal:
    level, by_class = checked_level(level), flag(class_conditional, "class_conditional")
    rule, kind, n_classes = None, "", 0
    kept: list[Tensor] = []
    labels: list[Tensor] = []
    n = 0
    for rows, target in examples:
        if rule is None:
            rule, kind = rule_of(method, rows.kind, given), rows.kind
        if isinstance(rule, IntervalRule):
            if by_class:
                raise OptionError(f"class_conditional=True is for classes; this is a prediction of {kind}.")
            kept.append(rule.kept((target - rows.mean.double()).abs(), rows.std.double()))
            continue
        p = candidates(rows)
        n_classes = p.shape[-1]
        keyed = Keyed(seed, places(shard or Shard(()), reduce, n, len(p)))
        n += len(p)
        kept.append(rule.scores(p, rule.random(p, keyed)).gather(-1, target.unsqueeze(-1)).squeeze(-1))
        labels.append(target)
    if reduce.size > 1:
        found = of_all_ranks(Found(rule, kind, n_classes, kept, labels), reduce)
        rule, kind, n_classes, kept, labels = found.rule, found.kind, found.n_classes, found.kept, found.labels
    if rule is None or not sum(map(len, kept)):
        raise InputError("the data to calibrate on holds no example; give at least one.")
    scores = torch.cat(kept).cpu()
    if not scores.isfinite().all():
        raise InputError(
            "a score of a calibration example is NaN or infinite: its predicted standard deviation may be zero. Take "
            "method='absolute', which does not divide by it, or look at the labels."
        )
    own = torch.cat(labels).cpu() if by_class else None
    made = Conformal(rule, scores, own, n_classes, kind, level, source, options)
    made.threshold()  # warns if there are too few examples for the level
    return made
