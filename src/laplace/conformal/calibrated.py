"""Provide `Conformal`: sets and intervals that contain y with a guaranteed probability, for predictions of any source.

The guarantee: if the calibration examples and a new example are exchangeable (for instance, drawn independently from
one distribution), the set of the new example contains its y with probability at least `level`, for any network,
posterior and number of examples. It holds on average over inputs, not for each kind of input; with `class_conditional`
it holds for each class.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from laplace.checkpoints import container
from laplace.checks import flag, flag_or_none, generator_or_none, path_of
from laplace.conformal.coverage import CoverageTest, cells_of
from laplace.conformal.examples import candidates, labelled, rows_of, shaped_like, targets_of
from laplace.conformal.fingerprint import Fingerprint
from laplace.conformal.quantiles import checked_level, threshold, told_infinite
from laplace.conformal.rules import IntervalRule, SetRule, options_of_rule, rule_of
from laplace.errors import CheckpointError, InputError, OptionError, StaleWarning, UnsupportedError, warn
from laplace.inference.predict import predict
from laplace.inference.source import Source
from laplace.network.loaders import ArrayBatches
from laplace.predictive.prediction import Prediction
from laplace.predictive.reshape import PredictionAtPositions

KIND = "conformal predictor"


class Conformal:
    """Makes sets and intervals with guaranteed coverage. Created by `la.conformal(cal_loader)` or `from_predictions`.

    Attributes:
        rule: The score, with its options.
        level: The default level of calls.
        kind: What is predicted: 'classes', 'labels', 'regression' or 'counts'.
        class_conditional: Whether each class has its own threshold.
        source: What predicts; None if predictions are given.
        options: What `predict` is called with.

    Args:
        kept: What is kept of the calibration examples: (n, G, K) for numbers, the scores (n, G) for classes.
        labels: Their true classes, (n, G), if each class has a threshold of its own.
        n_classes: How many classes there are; 0 for numbers.
        fingerprint: Of the source that was calibrated, from a file.
    """

    def __init__(
        self,
        rule: IntervalRule | SetRule,
        kept: Tensor,  # (n, G, K) of numbers; (n, G) of classes
        labels: Tensor | None,  # (n, G) true classes, where the thresholds go by class
        n_classes: int,
        kind: str,
        level: float,
        source: Source | None = None,
        options: dict[str, Any] | None = None,
        fingerprint: str | None = None,
    ) -> None:
        self.rule, self.level, self.kind = rule, level, kind
        self.class_conditional = labels is not None
        self.source, self.options = source, options or {}
        self._kept, self._labels, self._n_classes = kept, labels, n_classes
        self._told: set[float] = set()  # levels whose thresholds are infinite, which was said once
        self._made_for = Fingerprint(fingerprint)
        if source is not None and fingerprint is None:
            self._made_for.take(source)

    @property
    def method(self) -> str:
        """Return the name of the score: 'scaled', 'absolute', 'cqr', 'lac', 'aps' or 'raps'."""
        return self.rule.name

    @property
    def n_calibration(self) -> int:
        """Return how many calibration examples there are."""
        return len(self._kept)

    def threshold(self, level: float | None = None) -> Tensor:  # (G,) or (G, K)
        """Return the largest score that still belongs to a set, for each output or label; and each class, if asked.

        Args:
            level: Between 0 and 1; that of the object by default.

        Returns:
            (G,), or (G, K) with `class_conditional`. Infinite, with a warning once for each level, where there are too
                few calibration examples.

        Raises:
            OptionError: the level is not between 0 and 1.
        """
        level = self._level(level)
        scores = self.rule.scores(self._kept, level) if isinstance(self.rule, IntervalRule) else self._kept
        columns = scores.unbind(1)
        if self._labels is None:
            q = torch.stack([threshold(column, level) for column in columns])
        else:
            by_class = [
                torch.stack([threshold(column[own == k], level) for k in range(self._n_classes)])
                for column, own in zip(columns, self._labels.unbind(1), strict=True)
            ]
            q = torch.stack(by_class)
        message = told_infinite(q, level, self.n_calibration, isinstance(self.rule, IntervalRule))
        if message is not None and level not in self._told:
            self._told.add(level)
            warn(message)
        return q

    def interval(self, x: Any, level: float | None = None, **model_kwargs: Any) -> tuple[Tensor, Tensor]:
        """Return intervals that contain y with probability at least `level`, for each output separately.

        Args:
            x: Inputs as `predict` takes them, a DataLoader included, or a prediction that was made already.
            level: Between 0 and 1; that of the object by default.
            **model_kwargs: Passed on to the network.

        Returns:
            The lower and the upper end, in the shape of the prediction's mean. Infinite where there are too few
                calibration examples for the level; ends of counts are whole numbers from 0 up.

        Raises:
            UnsupportedError: y is a class; write `set`.
            OptionError: the level is not between 0 and 1.
        """
        if not isinstance(self.rule, IntervalRule):
            raise UnsupportedError(f"a prediction of {self.kind} has no interval. Write .set(x).")
        level = self._level(level)
        prediction = self._predicted(x, model_kwargs)
        low, high = self._ends(rows_of(prediction), level)
        return shaped_like(prediction, low), shaped_like(prediction, high)

    def set(
        self,
        x: Any,
        level: float | None = None,
        *,
        allow_empty: bool = True,
        generator: torch.Generator | None = None,
        **model_kwargs: Any,
    ) -> Tensor:  # (N, K) or (N, C, 2)
        """Return sets of classes that contain the true class with probability at least `level`.

        Args:
            x: Inputs as `predict` takes them, a DataLoader included, or a prediction that was made already.
            level: Between 0 and 1; that of the object by default.
            allow_empty: Whether sets may be empty: then no class fits the prediction as well as promised. False adds
                the most probable class to these, which can only raise the coverage.
            generator: The random generator of 'aps' and 'raps', unless randomized=False. torch's global one by default.
            **model_kwargs: Passed on to the network.

        Returns:
            Whether each class belongs to the set, (N, K); for labels, whether 0 and 1 do, (N, C, 2).

        Raises:
            UnsupportedError: y is a number; write `interval`.
            OptionError: the level is not between 0 and 1.
        """
        if not isinstance(self.rule, SetRule):
            raise UnsupportedError(f"a prediction of {self.kind} has no set of classes. Write .interval(x).")
        level, allow_empty = self._level(level), flag(allow_empty, "allow_empty")
        p = candidates(rows_of(self._predicted(x, model_kwargs)))
        found = self._members(p, level, generator_or_none(generator))
        if not allow_empty:
            top = torch.zeros_like(found).scatter_(-1, p.argmax(-1, keepdim=True), True)
            found = found | (top & ~found.any(-1, keepdim=True))
        return found.squeeze(1) if self.kind == "classes" else found

    @torch.no_grad()
    def coverage_test(
        self,
        test_loader: Any,
        y: Any = None,
        level: float | None = None,
        generator: torch.Generator | None = None,
        progress_bar: bool | None = None,
    ) -> CoverageTest:
        """Measure the coverage on labelled examples, and compare it with that of exchangeable examples.

        Args:
            test_loader: Batches (x, y) that were used neither for training nor for calibration; or inputs, with labels
                beside them; or a prediction, with labels beside it.
            y: Labels, if `test_loader` has none.
            level: Between 0 and 1; that of the object by default.
            generator: The random generator of 'aps' and 'raps'.
            progress_bar: Whether to show a progress bar; None shows one in a terminal after a few seconds.

        Returns:
            A `CoverageTest` with coverage, mean size and the p-value of so low a coverage.

        Raises:
            InputError: labels do not match the predictions, or there is no example.
        """
        level, generator = self._level(level), generator_or_none(generator)
        progress_bar = flag_or_none(progress_bar, "progress_bar")
        hits, sizes, labels = [], [], []
        for rows, target in self._labelled(test_loader, y, generator, progress_bar):
            if isinstance(self.rule, IntervalRule):
                low, high = self._ends(rows, level)
                hits.append((low <= target) & (target <= high))
                sizes.append(high - low)
            else:
                members = self._members(candidates(rows), level, generator)
                hits.append(members.gather(-1, target.unsqueeze(-1)).squeeze(-1))
                sizes.append(members.sum(-1))
                labels.append(target)
        if not hits:
            raise InputError("the data to test on holds no example; give at least one.")
        covered, size = torch.cat(hits), torch.cat(sizes).double()
        own = torch.cat(labels) if self.class_conditional else None
        cells = cells_of(covered, own, self._counts(), level)
        return CoverageTest(level, covered.double().mean().item(), size.mean().item(), cells)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the calibration scores and the options to a file of safetensors: no code, no inputs, no network.

        The file has one number per calibration example and output (two for 'cqr'), and the true classes if thresholds
        go by class. The posterior is saved by itself: `la.save`.

        Args:
            path: The file; one of that name is replaced once the new one is whole.

        Raises:
            UnsupportedError: predictions use a link of your own, which a file cannot hold.
        """
        if not isinstance(self.options.get("link_approx"), (str, type(None))):
            raise UnsupportedError("a link of your own cannot be saved. Write link_approx= with a name.")
        contents = {
            "rule": self.rule.name,
            "rule_options": options_of_rule(self.rule),
            "kept": self._kept,
            "labels": self._labels,
            "n_classes": self._n_classes,
            "kind": self.kind,
            "level": self.level,
            "options": self.options,
            "fingerprint": self._made_for.value,
        }
        container.write(path_of(path, "path"), KIND, contents)

    @classmethod
    def load(cls, path: str | os.PathLike[str], source: Source | None = None) -> Conformal:
        """Read what `save` wrote. Runs no code.

        Args:
            path: The file.
            source: What predicts, such as `Laplace.load(...)`. If left out, calls need predictions instead of inputs.

        Returns:
            The same predictor. It warns if the source is another one than it was calibrated for.

        Raises:
            CheckpointError: the file is damaged, or holds something else.
        """
        found = container.read(path_of(path, "path"), KIND)
        try:
            rule = rule_of(found["rule"], found["kind"], found["rule_options"])
            labels = None if found["labels"] is None else found["labels"].clone()
            made = cls(
                rule,
                found["kept"].clone(),
                labels,
                int(found["n_classes"]),
                found["kind"],
                checked_level(found["level"]),
                source,
                dict(found["options"]),
                found["fingerprint"] or "",
            )
        except (KeyError, TypeError, AttributeError, OptionError) as error:
            raise CheckpointError(f"{str(path)!r} is damaged: {error!r}.") from error
        made._require_current()
        return made

    def __repr__(self) -> str:
        by_class = ", class_conditional=True" if self.class_conditional else ""
        return f"Conformal({self.method!r}, level={self.level:g}, {self.n_calibration} calibration examples{by_class})"

    # ---- inside ---------------------------------------------------------------------------------------------------

    def _ends(self, rows: Prediction, level: float) -> tuple[Tensor, Tensor]:  # (N, G) each
        assert isinstance(self.rule, IntervalRule)
        mean = rows.mean.double()
        q = self.threshold(level).to(mean.device)
        half = self.rule.half_width(rows.std.double(), q, level)
        low, high = mean - half, mean + half
        if self.kind == "counts":  # only whole numbers count, and none below zero
            low, high = low.clamp_min(0).ceil(), high.floor()
        return low, high

    def _members(self, p: Tensor, level: float, generator: torch.Generator | None) -> Tensor:  # (N, G, K)
        assert isinstance(self.rule, SetRule)
        q = self.threshold(level).to(p.device)
        scores = self.rule.scores(p, self.rule.random(p, generator))
        return scores <= (q if self.class_conditional else q.unsqueeze(-1))

    def _level(self, level: float | None) -> float:
        return self.level if level is None else checked_level(level)

    def _counts(self) -> list[list[int]]:
        groups = self._kept.shape[1]
        if self._labels is None:
            return [[self.n_calibration]] * groups
        return [torch.bincount(own, minlength=self._n_classes).tolist() for own in self._labels.unbind(1)]

    def _labelled(
        self, data: Any, y: Any, generator: torch.Generator | None, progress_bar: bool | None
    ) -> Iterable[tuple[Prediction, Tensor]]:
        if isinstance(data, (Prediction, PredictionAtPositions)):
            if y is None:
                raise InputError("a prediction has no labels. Write coverage_test(prediction, y).")
            rows = rows_of(self._predicted(data, {}))
            return [(rows, targets_of(rows, y))]
        self._require_current()
        data = data if y is None else ArrayBatches(data, y)
        return labelled(self._required_source(), data, self.options | {"generator": generator}, progress_bar)

    def _predicted(self, x: Any, model_kwargs: dict[str, Any]) -> Prediction | PredictionAtPositions:
        if isinstance(x, (Prediction, PredictionAtPositions)):
            if x.kind != self.kind:
                raise InputError(
                    f"this is a prediction of {x.kind}; calibration was with one of {self.kind}. Give a prediction of "
                    "the posterior that was calibrated."
                )
            groups = rows_of(x).mean.shape[1]
            expected = self._n_classes if self.kind == "classes" else self._kept.shape[1]
            if groups != expected:
                raise InputError(
                    f"the prediction has {groups} outputs; calibration was with {expected}. Give a prediction of the "
                    "posterior that was calibrated."
                )
            return x
        self._require_current()
        return predict(self._required_source(), x, **self.options, **model_kwargs)

    def _required_source(self) -> Source:
        if self.source is None:
            raise InputError(
                "there is nothing to predict with. Give a prediction instead of inputs, or load with the posterior: "
                "Conformal.load(path, la)."
            )
        return self.source

    def _require_current(self) -> None:
        if self.source is not None and not self._made_for.fits(self.source):
            warn(
                "the posterior is not the one that was calibrated (other weights, prior, noise or temperature): "
                "nothing is guaranteed. Call la.conformal(cal_loader) again.",
                StaleWarning,
            )
