"""Make the numbers of a report, one section after the other. What cannot be computed is named in `missing`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, Final

import numpy as np

from laplace.errors import InputError, LaplaceError, OptionError
from laplace.evaluation.report import curves, outside
from laplace.evaluation.report.answers import LEVELS
from laplace.evaluation.report.case import Case
from laplace.evaluation.report.identity import Identity
from laplace.evaluation.report.judging import judge
from laplace.evaluation.report.prior_curve import prior_curve
from laplace.evaluation.report.provenance import Stopwatch, provenance
from laplace.evaluation.report.reading import (
    LAPLACE,
    NETWORK,
    SCALED,
    Reader,
    Reading,
    Reported,
    Scale,
    first_of,
    found_scale,
    training_batches_of,
)
from laplace.evaluation.report.scores import measure, point_values, scores_of, too_many
from laplace.evaluation.report.shelves import OUTSIDE, SHELVES, Shelves, Show, facts_of
from laplace.evaluation.report.verdicts import Thresholds, headline, next_steps, ordered
from laplace.inference.inspection import coverage
from laplace.inference.source import Source
from laplace.inference.values import tuning_data
from laplace.likelihoods.custom import ByAutograd
from laplace.network.loaders import held_out_batches
from laplace.network.overlap import overlap

_TRAINING: Final = 5000  # training examples that are scored, at most
_ROWS: Final = 40  # tensors of la.coverage() that are listed, at most


class Maker:
    """Makes the numbers of a report, one section after the other."""

    def __init__(
        self,
        la: Reported,
        others: Mapping[str, Source],
        limits: Thresholds,
        n_bootstrap: int,
        seed: int,
        bar: bool | None | None,
    ) -> None:
        self.la, self.others, self.limits = la, others, limits
        self.n_bootstrap, self.seed, self.bar = n_bootstrap, seed, bar
        self.missing: dict[str, str] = {}
        self.identities: dict[str, Identity] = {}
        self.pictures: dict[str, list[str]] = {}
        self.watch = Stopwatch()
        self.scale: Scale | None = None
        self.detected: list[outside.Detected] = []
        self.in_common: int | None = None
        self.validated = False
        self.reused = ""
        self.validating = 0

    def made(
        self,
        test: Any,
        ood: dict[str, Any],
        val: Any,
        train: Any,
        shifts: dict[str, Any],
        show: Show | None,
        names: list[str] | None,
    ) -> dict[str, Any]:
        """Return all sections but the verdicts."""
        self._rescale(val)
        kinds = Shelves(SHELVES[_kind(self.la)], show)
        self.test = self._reader().read(test, "test", kinds)
        self._require_same_kind()
        self._require_a_name_each(names)
        self._look_for_reuse(test)
        self.identities = {"test": self.test.identity} | self.identities
        self.watch.lap("test data")
        self.measured = measure(self.test, self.limits.level, self.n_bootstrap, self.seed)
        if too_many(self.test.answers[LAPLACE]):
            self.missing["classwise_ece"] = "there are too many classes and examples to resample it."
        self.watch.lap("bootstrap")
        data = {
            "kind": self.test.kind,
            "level": self.limits.level,
            "methods": self._methods(),
            "scores": _estimates(self.measured.values),
            "gains": _estimates(self.measured.gains),
            "score_info": {
                key: {"label": s.label, "better": s.better, "share": s.share, "note": s.note}
                for key, s in scores_of(self.test.answers[LAPLACE], self.limits.level).items()
            },
            "figures": self._figures(),
            "per_output": self._per_output(),
            "outside": self._outside(ood),
            "shifts": self._shifts(shifts, train),
            "examples": self._examples(self.test),
            "prior": self._prior(),
            "kept": self._kept(),
            "refer": self._refer(),
        }
        self.watch.lap("other")
        return data

    def judged(self, data: dict[str, Any], changed: str | None) -> dict[str, Any]:
        """Return the data with the verdicts in front, and where they come from at the end."""
        case = Case(
            self.la,
            self.test,
            self.measured,
            self.limits,
            self.validated,
            changed,
            self.in_common,
            self.reused,
            self.validating,
            data["prior"],
            self.detected,
        )
        verdicts = ordered(judge(case))
        grade, text = headline(verdicts)
        front = {
            "headline": {"grade": grade, "text": text},
            "next": next_steps(verdicts, data["refer"]),
            "verdicts": [vars(verdict) for verdict in verdicts],
            "thresholds": vars(self.limits),
        }
        cost = {name: seconds / self.test.n for name, seconds in self.test.seconds.items() if name != NETWORK}
        cost = {NETWORK: self.test.seconds[NETWORK], **cost}
        back = {
            "seconds_per_example": cost,
            "missing": self.missing,
            "provenance": provenance(self.la, self.identities, self.seed, self.n_bootstrap, self.watch.seconds),
        }
        return front | data | back

    def _reader(self) -> Reader:
        return Reader(self.la, self.others, self.scale, self.seed, self.bar)

    def _rescale(self, val: Any) -> None:
        if val is None:
            self.missing[SCALED] = "there is no validation data: give val_loader=."
            return
        try:
            found = found_scale(self.la, val, self.bar)
        except LaplaceError as error:
            found = f"the validation data cannot be used: {error}"
        if isinstance(found, str):
            self.missing[SCALED] = found
        else:
            self.scale, self.validated = found, True
            self.identities["validation"] = found.identity
        self.watch.lap("validation data")

    def _look_for_reuse(self, test: Any) -> None:
        """Find out whether the test data is that of the fit or of the tuning, or among the validation data."""
        test = held_out_batches(test)
        trained, tuned = getattr(self.la, "training_data", None), tuning_data(self.la)
        self.reused = overlap(trained, test) or overlap(tuned, test, "that la was tuned on")
        if self.scale is not None:
            self.validating = self.test.identity.in_common(self.scale.identity)

    def _require_same_kind(self) -> None:
        for name, answers in self.test.answers.items():
            if answers.kind != self.test.kind or len(answers) != len(self.test.examples):
                raise OptionError(
                    f"sources: {name!r} predicts {answers.kind} at {len(answers)} rows, and the posterior "
                    f"{self.test.kind} at {len(self.test.examples)}. Only predictions of the same labels are compared."
                )

    def _require_a_name_each(self, names: list[str] | None) -> None:
        columns = self.test.answers[LAPLACE].columns
        column = columns.get("p", columns.get("mean"))
        if names is not None and column is not None and len(names) != column.shape[-1]:
            what = {"classes": "class", "labels": "label"}.get(self.test.kind, "output")
            raise OptionError(
                f"class_names: one name for each {what} is needed, in order. There are {len(names)} names, and "
                f"the network's predictions are of {column.shape[-1]}."
            )

    def _methods(self) -> list[dict[str, str]]:
        about = {NETWORK: "the trained network alone, without a posterior"}
        if self.scale is not None:
            what = "softmax temperature" if self.scale.name == "softmax_temperature" else "noise"
            about[SCALED] = f"with {what} {self.scale.value:.3g}, found on {self.scale.examples:,} validation examples"
        about[LAPLACE] = "the posterior, by la.predict"
        return [{"name": name, "about": about.get(name, "given by you")} for name in self.test.answers]

    def _figures(self) -> dict[str, Any]:
        answers, kind = self.test.answers, self.test.kind
        if kind == "other":
            self.missing["figures"] = "of this likelihood only log-probabilities are known."
            return {}
        mine = answers[LAPLACE]
        found: dict[str, Any] = {}
        if kind in ("classes", "labels"):
            found["reliability"] = {name: curves.reliability(each) for name, each in answers.items()}
        else:
            found["pit"] = {name: curves.pit(each) for name, each in answers.items()}
            found["coverage"] = {name: curves.coverage(each) for name, each in answers.items()}
            found["scatter"] = curves.scatter(mine, LEVELS.index(self.limits.level), self.seed)
        found["risk"] = {name: curves.risk(each) for name, each in answers.items()}
        found["risk"][f"{LAPLACE}, by epistemic"] = curves.risk(mine, "epistemic")
        found["error"] = {
            name: curves.error_by_epistemic(each) for name, each in answers.items() if each["epistemic"].max() > 0
        }
        return found

    def _per_output(self) -> list[dict[str, Any]]:
        """Return the scores of Laplace for each output, if there are several."""
        mine = self.test.answers[LAPLACE]
        if self.test.kind not in ("regression", "counts") or mine["mean"].shape[1] < 2:
            return []
        at, rows = LEVELS.index(self.limits.level), []
        for c in range(mine["mean"].shape[1]):
            y, lower, upper = mine["y"][:, c], mine["lower"][:, c, at], mine["upper"][:, c, at]
            rows.append(
                {
                    "output": c,
                    "rmse": float(np.sqrt(np.square(y - mine["mean"][:, c]).mean())),
                    "coverage": float(((lower <= y) & (y <= upper)).mean()),
                    "width": float((upper - lower).mean()),
                }
            )
        return rows

    def _outside(self, ood: dict[str, Any]) -> dict[str, Any]:
        found, missing = dict[str, Reading](), dict[str, str]()
        if not ood:
            self.missing["outside"] = "no inputs from elsewhere were given: ood={'name': loader}."
        if self.test.kind == "other":
            ood, self.missing["outside"] = {}, "of this likelihood only log-probabilities are known."
        for name, loader in ood.items():
            try:
                found[name] = self._reader().read(loader, name, Shelves(dict(OUTSIDE)), labelled=False)
                self.detected.append(outside.Detected(name, self.test, found[name], self.n_bootstrap, self.seed))
            except LaplaceError as error:
                found.pop(name, None)
                missing[name] = str(error)
            else:
                self.identities[name] = found[name].identity
        for name, reading in found.items():
            for shelf, placed in reading.shelves.shelves.items():
                self.pictures[f"{name}: {shelf}"] = [each.shown.picture for each in placed]
        self.watch.lap("outside data")
        return {
            "rows": outside.table(self.detected),
            "figures": outside.drawn(self.test, found) if found else {},
            "examples": {f"{name}: {s}": e for name, r in found.items() for s, e in self._placed(r).items()},
            "missing": missing,
        }

    def _shifts(self, shifts: dict[str, Any], train: Any) -> list[dict[str, Any]]:
        rows = list(self._training(train)) if train is not None else []
        for name, loader in flattened(shifts):
            try:
                reading = self._reader().read(loader, name, Shelves({}))
            except LaplaceError as error:
                rows.append({"name": name, "missing": str(error)})
                continue
            self.identities[name] = reading.identity
            rows.append(self._shift_row(name, reading))
        self.watch.lap("shifted data")
        return rows

    def _shift_row(self, name: str, reading: Reading) -> dict[str, Any]:
        return {"name": name, "examples": reading.n, "scores": point_values(reading.answers, self.limits.level)}

    def _training(self, train: Any) -> Iterator[dict[str, Any]]:
        """Score some of the training data, and find out which test examples are among it."""
        identity, runner = Identity(), self.la.runner
        try:
            loader = training_batches_of(train)
            if isinstance(loader, Iterator):
                raise InputError("the training loader can be read once only; give a DataLoader or a list of batches.")
            for batch in runner.batches(loader, self.bar, "training"):
                identity.add(batch.inputs, batch.y, len(batch.y))
            if not identity.n:
                raise InputError("the training loader has no example; give at least one.")
            most = min(_TRAINING, self.test.n)
            reading = self._reader().read(first_of(loader, most, self.la.frame.keys.y), "training", Shelves({}))
        except LaplaceError as error:
            self.missing["training"] = str(error)
            return
        self.identities["training"] = identity
        if identity.rows and self.test.identity.rows:
            self.in_common = self.test.identity.in_common(identity)
        part = f"the first {reading.n:,} of {identity.n:,}" if reading.n < identity.n else f"{reading.n:,}"
        yield self._shift_row(f"training data, {part} examples", reading) | {"of": identity.n}

    def _placed(self, reading: Reading) -> dict[str, list[dict[str, Any]]]:
        mine = reading.answers[LAPLACE]
        return {
            shelf: [facts_of(mine, each) for each in placed]
            for shelf, placed in reading.shelves.shelves.items()
            if placed
        }

    def _examples(self, reading: Reading) -> dict[str, list[dict[str, Any]]]:
        found = self._placed(reading)
        if not found:
            self.missing["examples"] = "the outputs are at positions, or no example could be taken out of a batch."
        for shelf in found:
            self.pictures[shelf] = [each.shown.picture for each in reading.shelves.shelves[shelf]]
        return found

    def _prior(self) -> dict[str, Any] | None:
        try:
            found = prior_curve(self.la.posterior.detached())
        except LaplaceError as error:
            found = str(error)
        if isinstance(found, str):
            self.missing["prior"] = found
            return None
        return found

    def _kept(self) -> dict[str, Any]:
        found = coverage(self.la)
        rows = [
            {
                "name": row.name,
                "shape": list(row.shape),
                "weights": row.weights,
                "rule": row.rule,
                "kept": row.kept,
                "bytes": row.bytes,
            }
            for row in found
        ]
        other = found.other_forms(self.la.posterior.fit.structure.described)
        return {
            "tensors": len(rows),
            "weights": sum(row.weights for row in found),
            "bytes": found.bytes,
            "rows": rows[:_ROWS],
            "note": other,
        }

    def _refer(self) -> dict[str, float] | None:
        mine = self.test.answers[LAPLACE]
        if mine.kind not in ("classes", "regression") or not mine["epistemic"].max() > 0 or self.test.n < 20:
            return None
        epistemic = mine["epistemic"] if mine.kind == "classes" else np.square(mine["epistemic"])
        if mine.kind == "regression" and mine["mean"].shape[1] > 1:
            return None
        return {"share": 0.05, "epistemic": float(np.quantile(epistemic, 0.95))}


def _kind(la: Reported) -> str:
    """Return which shelves the examples go to, before the first prediction."""
    if isinstance(la.likelihood, ByAutograd):
        return "other"
    return "classes" if la.likelihood.has_logits or la.likelihood.name == "ordinal" else "regression"


def _estimates(values: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, dict[str, float]]]:
    return {name: {key: dict(vars(each)) for key, each in scores.items()} for name, scores in values.items()}


def plain(value: Any) -> Any:
    """Return the data as JSON can hold it: what is not finite becomes None."""
    if isinstance(value, Mapping):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    if isinstance(value, (float, np.floating)):
        return float(value) if math.isfinite(value) else None
    return int(value) if isinstance(value, np.integer) else value


def flattened(shifts: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the shifts one by one; those of several strengths with the strength behind their name."""
    for name, loader in shifts.items():
        if isinstance(loader, Mapping):
            yield from ((f"{name} {strength}", each) for strength, each in loader.items())
        else:
            yield name, loader
