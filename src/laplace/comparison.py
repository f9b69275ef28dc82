"""`laplace.compare`: evidence, effective parameters, leave-one-out and validation scores of several posteriors.

Not all of these numbers are comparable. The evidence takes all weights but the uncertain ones as given: evidences of
last layers on different features answer different questions. Numbers that are not comparable are shown in brackets,
with the reason, and `best` refuses them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import combinations
from textwrap import wrap
from typing import Any, Final

import torch
from torch import Tensor

from laplace.checks import choice, shown
from laplace.errors import OptionError, UnsupportedError
from laplace.keywords import refuse_unknown_keywords
from laplace.laplace import Laplace
from laplace.likelihoods import Likelihood, Targets
from laplace.linalg.autocast import plain
from laplace.posterior.posterior import Posterior
from laplace.priors.gaussian import GaussianPrior
from laplace.tuning.loo import LeaveOneOut, sample_size
from laplace.tuning.problem import how_scored, validation_of
from laplace.tuning.scores import Predicted
from laplace.tuning.training_data import Sample

_COLUMNS: Final = {
    "evidence": "log evidence",
    "effective": "effective parameters",
    "loo": "leave-one-out NLL",
    "validation": "validation NLL",
}
_LOWER: Final = ("loo", "validation")  # where lower is better


@dataclass(frozen=True)
class Compared:
    """Holds the numbers of one posterior, at its current hyperparameters.

    Attributes:
        name: its name in the table.
        weights: how many weights are uncertain.
        structure: what is kept of the curvature.
        evidence: log evidence; larger is better.
        effective: effective number of parameters, P - tr(D Sigma); None for a prior that is not Gaussian, and for a
            posterior over functions.
        loo: mean negative log-likelihood of leave-one-out predictions; None without training data.
        loo_error: its standard error.
        validation: mean negative log-likelihood on the validation data; None without.
        validation_error: its standard error.
    """

    name: str
    weights: int
    structure: str
    evidence: float
    effective: float | None
    loo: float | None = None
    loo_error: float | None = None
    validation: float | None = None
    validation_error: float | None = None


@dataclass(frozen=True)
class Comparison:
    """Shows several posteriors side by side. Prints as a table; `comparison["name"]` is one of them.

    Attributes:
        rows: a `Compared` for each.
        refused: by column, why its numbers are not comparable; columns that are not listed are comparable.
        notes: remarks on the comparison.
    """

    rows: tuple[Compared, ...]
    refused: dict[str, tuple[str, ...]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def __iter__(self) -> Iterator[Compared]:
        return iter(self.rows)

    def __getitem__(self, name: str) -> Compared:
        rows = {row.name: row for row in self.rows}
        return rows[choice(name, rows, "name")]

    def best(self, by: str) -> Compared:
        """Return the best posterior by one of the numbers.

        Args:
            by: 'evidence', 'loo' or 'validation'.

        Raises:
            OptionError: these numbers were not computed for all posteriors.
            UnsupportedError: the numbers are not comparable; the message says why.
        """
        by = choice(by, ["evidence", *_LOWER], "by")
        if by in self.refused:
            others = [f"best({other!r})" for other in _LOWER if other not in self.refused and self._has(other)]
            instead = f" Take {' or '.join(others)}." if others else " Give val_loader=, and take best('validation')."
            raise UnsupportedError(f"the {_COLUMNS[by]} may not be compared: {'; '.join(self.refused[by])}.{instead}")
        if not self._has(by):
            needed = {"loo": "train_loader=", "validation": "val_loader="}[by]
            raise OptionError(f"there is no {_COLUMNS[by]} for all posteriors: give compare(..., {needed}).")
        return (min if by in _LOWER else max)(self.rows, key=lambda row: getattr(row, by))

    def _has(self, column: str) -> bool:
        return all(getattr(row, column) is not None for row in self.rows)

    def __repr__(self) -> str:
        columns = [column for column in _COLUMNS if any(getattr(row, column) is not None for row in self.rows)]
        table = [("", "weights", "structure", *(_COLUMNS[column] for column in columns))]
        for row in self.rows:
            cells = (self._cell(row, column) for column in columns)
            table.append((row.name, f"{row.weights:,}", row.structure, *cells))
        widths = [max(len(line[i]) for line in table) for i in range(len(table[0]))]
        lines = [
            "  ".join(f"{cell:<{w}}" if i in (0, 2) else f"{cell:>{w}}" for i, (cell, w) in enumerate(each)).rstrip()
            for each in (list(zip(line, widths, strict=True)) for line in table)
        ]
        said = [f"May not be compared, {_COLUMNS[key]}: {'; '.join(why)}." for key, why in self.refused.items()]
        text = [part for note in [*said, *self.notes] for part in wrap(note, 100)]
        return "\n".join([lines[0], "-" * max(map(len, lines)), *lines[1:], "", *text])

    def _cell(self, row: Compared, column: str) -> str:
        value = getattr(row, column)
        if value is None:
            return "-"
        text = f"{value:.4g}" if column == "effective" else f"{value:.2f}" if column == "evidence" else f"{value:.4f}"
        error = getattr(row, f"{column}_error", None)
        text += "" if error is None else f" ± {error:.4f}"
        return f"({text})" if column in self.refused else text


@refuse_unknown_keywords
@torch.no_grad()
def compare(
    posteriors: Sequence[Laplace],
    val_loader: Iterable[Any] | None = None,
    train_loader: Iterable[Any] | None = None,
    names: Sequence[str] | None = None,
) -> Comparison:
    """Compare fitted posteriors at their current hyperparameters. Tune each of them before, all by the same method.

    The log evidence needs no data. Leave-one-out predictions need the training data, or 5,000 examples of it.

    Args:
        posteriors: two or more, fitted.
        val_loader: batches (x, y) that were not trained on.
        train_loader: the data that all were fitted to; the `training_data` of each by default.
        names: their names; numbers by default.

    Returns:
        A table that says which numbers are comparable; `best` refuses the others.

    Raises:
        OptionError: fewer than two posteriors, other objects, or names that do not fit.
        NotFittedError: one of them is not fitted.
    """
    las = list(posteriors) if isinstance(posteriors, Sequence) else []
    if len(las) < 2 or not all(isinstance(la, Laplace) for la in las):
        raise OptionError(f"compare({shown(posteriors)}): a list of two or more Laplace objects is needed.")
    called = [f"{i}" for i in range(len(las))] if names is None else list(names)
    if len(called) != len(las) or len({*called}) < len(called) or not all(isinstance(name, str) for name in called):
        raise OptionError(
            f"names={shown(names)}: a name of its own for each of {len(las)} posteriors is needed. Give {len(las)} "
            "different strings."
        )
    with plain():
        measured = [_measured(la, val_loader, train_loader) for la in las]
    rows = tuple(Compared(name, **numbers) for name, (numbers, _) in zip(called, measured, strict=True))
    sights = [_Sight(name, la, labels) for name, la, (_, labels) in zip(called, las, measured, strict=True)]
    same_data = train_loader is not None
    refused = {
        "evidence": _reasons(sights, partial(_evidences_differ, same_data=same_data)),
        "loo": _reasons(sights, partial(_data_differ, same_data=same_data)),
        "validation": _reasons(sights, _likelihoods_differ),
    }
    return Comparison(rows, {key: why for key, why in refused.items() if why}, _notes(sights, rows, train_loader))


def _measured(la: Laplace, val_loader: Any, train_loader: Any) -> tuple[dict[str, Any], Tensor | None]:
    """Return the numbers of a posterior, and the labels of the training examples that were scored."""
    posterior, likelihood, runner = la.posterior, la.likelihood, la.runner
    numbers: dict[str, Any] = {
        "weights": posterior.fit.layout.n_params,
        "structure": posterior.fit.structure.described,
        "evidence": float(posterior.log_evidence),
        "effective": _effective(posterior),
    }
    how, labels = how_scored(la, "glm", None, 100, None), None
    data = la.training_data if train_loader is None else train_loader
    if data is not None:
        sample = Sample(data, sample_size(posterior.fit.n_outputs, 1))
        scorer = LeaveOneOut(how, partial(sample.runs, runner, posterior, "training"), runner.spec.budget)
        scores, seen = _Scores(likelihood), []
        for forward, targets in scorer.runs:
            scores.add(next(scorer.predictions([posterior], forward, targets)), targets, posterior)
            seen.append(targets.y.detach().cpu())
        numbers |= {"loo": scores.mean, "loo_error": scores.error}
        labels = torch.cat(seen)
    if val_loader is not None:
        validation, scores = validation_of(la, how, val_loader, None, False, again=True), _Scores(likelihood)
        for forward, targets in validation.inside:
            scores.add(next(validation.predictions([posterior], forward)), targets, posterior)
        numbers |= {"validation": scores.mean, "validation_error": scores.error}
    return numbers, labels


class _Scores:
    """Holds negative log-likelihoods of examples, and computes their weighted mean with its standard error."""

    def __init__(self, likelihood: Likelihood) -> None:
        self.likelihood, self.values, self.weights = likelihood, list[Tensor](), list[Tensor]()

    def add(self, prediction: Predicted, targets: Targets, posterior: Posterior) -> None:
        nll = -self.likelihood.log_predictive(*prediction, targets.y, posterior.sigma).double()
        self.values.append(nll)
        self.weights.append(torch.ones_like(nll) if targets.weights is None else targets.weights.to(nll))

    @property
    def mean(self) -> float:
        values, weights = torch.cat(self.values), torch.cat(self.weights)
        return float((weights * values).sum() / weights.sum())

    @property
    def error(self) -> float:
        values, weights = torch.cat(self.values), torch.cat(self.weights)
        return float((weights * (values - self.mean)).square().sum().sqrt() / weights.sum())


def _effective(posterior: Posterior) -> float | None:
    """Return P - tr(D Sigma), the effective number of parameters: directions that the data has determined."""
    prior, found = posterior.prior, posterior.fit
    if type(prior) is not GaussianPrior or found.structure.functional:
        return None
    delta = prior.diagonal(found.layout, found.mean).to(found.mean)
    if found.structure.rereads:  # which estimates traces of tensors, and has no variances of many weights
        each = torch.stack([part[0] for part in found.layout.split(delta)]).double()
        return float(found.layout.n_params - (each * posterior.gaussian.traces("layerwise")[0]).sum())
    return float(found.layout.n_params - (delta * posterior.gaussian.marginal_variances()).double().sum())


@dataclass(frozen=True)
class _Sight:
    """Holds what decides whether the numbers of a posterior are comparable with others."""

    name: str
    la: Laplace
    labels: Tensor | None  # of the training examples that were scored

    @property
    def certain(self) -> dict[str, Tensor]:
        """Return the parameters that are taken as certain."""
        uncertain = {*self.la.posterior.fit.layout.names}
        return {name: p for name, p in self.la.model.named_parameters() if name not in uncertain}


def _reasons(sights: Sequence[_Sight], differ: Any) -> tuple[str, ...]:
    """Return why some pair may not be compared, each reason once."""
    found = (differ(a, b) for a, b in combinations(sights, 2))
    return tuple(dict.fromkeys(reason for reason in found if reason))


def _likelihoods_differ(a: _Sight, b: _Sight) -> str:
    mine, theirs = (sight.la.likelihood.described for sight in (a, b))
    return "" if mine == theirs else f"{a.name} and {b.name} have different likelihoods ({mine}, {theirs})"


def _data_differ(a: _Sight, b: _Sight, same_data: bool) -> str:
    if reason := _likelihoods_differ(a, b):
        return reason
    mine, theirs = a.la.n_data, b.la.n_data
    if mine != theirs:
        return f"{a.name} and {b.name} were fitted to different data ({mine:,} and {theirs:,} examples)"
    if same_data or a.la.training_data is b.la.training_data or a.labels is None or b.labels is None:
        return ""
    if a.labels.shape == b.labels.shape and torch.equal(a.labels, b.labels):
        return ""
    return (
        f"{a.name} and {b.name} were fitted to different data, as far as their labels show (if it is the same in "
        "another order, give train_loader=)"
    )


def _evidences_differ(a: _Sight, b: _Sight, same_data: bool) -> str:
    if reason := _data_differ(a, b, same_data):
        return reason
    fits = a.la.posterior.fit, b.la.posterior.fit
    pair = f"{a.name} and {b.name}"
    if fits[0].structure.described != fits[1].structure.described or fits[0].kind != fits[1].kind:
        kinds = ", ".join(f"{found.structure.described} with {found.kind}" for found in fits)
        return f"{pair} approximate the curvature differently ({kinds})"
    if a.la.temperature != b.la.temperature:
        return f"{pair} have different temperatures, and a tempered likelihood is not normalised"
    mine, theirs = a.certain, b.certain
    if bool(mine) != bool(theirs):
        return f"{pair} have different sets of uncertain weights: {a.name if theirs else b.name} has all"
    if mine.keys() != theirs.keys() or not all(_equal(p, theirs[name]) for name, p in mine.items()):
        return (
            f"{pair} take different weights as certain; each evidence is conditional on its own features, and what it "
            "took to learn them is counted nowhere"
        )
    return ""


def _equal(p: Tensor, q: Tensor) -> bool:
    return p.shape == q.shape and torch.equal(p.detach().cpu(), q.detach().cpu())


def _notes(sights: Sequence[_Sight], rows: Sequence[Compared], train_loader: Any) -> tuple[str, ...]:
    notes = []
    if all(row.loo is None for row in rows):
        notes.append("For leave-one-out scores give train_loader=: there is no training data at hand.")
    elif any(sight.certain for sight in sights):
        notes.append(
            "Leave-one-out takes an example out of the uncertain weights only. Weights that are taken as certain have "
            "seen it, and such a score is too good where they were trained on the same data."
        )
    if train_loader is None and any(sight.labels is None for sight in sights):
        notes.append("All are taken to be fitted to the same data, which cannot be seen without it.")
    if any(row.validation is None for row in rows):
        notes.append("Validation scores may be compared for any two posteriors of one likelihood: give val_loader=.")
    return tuple(notes)
