"""`la.calibrate`: prior precision and softmax temperature (or noise) together, by the score on validation data."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, Final

import torch
from torch import Tensor

from laplace.checks import choice, flag, flag_or_none, shown, unchanged
from laplace.distributed import OWN, Group
from laplace.distributed.groups import reduce_to_calibrate
from laplace.distributed.together import joined, jointly
from laplace.errors import LaplaceError, OptionError, UnsupportedError, warn
from laplace.evaluation.calibration import binned
from laplace.inference.linearised import through_link
from laplace.inference.settings import require_same_settings
from laplace.keywords import refuse_unknown_keywords
from laplace.linalg.autocast import plainly
from laplace.network.loaders import held_out_batches
from laplace.posterior.posterior import Posterior
from laplace.posterior.task_prior import CurvedPrior
from laplace.predictive.links import Link
from laplace.predictive.outputs import OutputGaussian
from laplace.priors.gaussian import GaussianPrior
from laplace.tuning.calibrated import Calibrated, Calibration, Gain
from laplace.tuning.calls import Tunable
from laplace.tuning.held_out import NETWORK, HeldOut, Setting
from laplace.tuning.problem import how_scored, validation_of
from laplace.tuning.profile import (
    HALF_DECADES,
    Candidate,
    Profile,
    best_of,
    count,
    half_decades,
    paired,
    widest_of,
)
from laplace.tuning.scores import How
from laplace.tuning.unsuitable import remarks
from laplace.tuning.validation import seeded

RULES: Final = ("one_se", "best")
_DRAWS = 100  # of link 'mc'
_CERTAIN = 1e4  # times the narrowest prior precision of the grid: then the score is the network's to 1e-8
_LARGEST = 1e30  # prior precision, which float32 can square no more


@jointly("la.calibrate")
@refuse_unknown_keywords
@plainly
def calibrate(
    la: Tunable,
    /,
    val_loader: Iterable[Any],
    *,
    rule: str = "one_se",
    hyperprior: bool = True,
    link_approx: str | Link | None = None,
    ood_loader: Any = None,
    ood_weight: float = 0.5,
    progress_bar: bool | None = None,
    group: Group = OWN,
) -> Calibrated:
    """Set prior precision and softmax temperature (in regression: and noise) by the score on validation data.

    The score is the mean negative log-likelihood of `la.predict`. All prior precisions of a grid are compared, each
    with its best softmax temperature. Ratios between several prior precisions stay. The candidates include the network
    itself and the network with temperature scaling, so on the validation data the result of 'best' is never worse than
    either. The result of 'one_se' is worse by at most a standard error (or 0.001 nats), and by at most 0.005 nats. For
    likelihoods without logits and without noise only the prior precision is calibrated.

    The network runs once over the data if the Gaussians of its outputs, or a last layer's features, fit into memory.
    Else it runs a few times.

    Args:
        val_loader: Batches (x, y) that were not trained on, as `fit` takes them. A DataModule, or a Trainer of
            transformers, gives its validation data.
        rule: 'best' takes the lowest score. 'one_se' takes the widest posterior whose score is within one standard
            error of the lowest, if it is worse by no more than 0.005 nats, two standard errors included: a wider
            posterior detects unknown inputs better.
        hyperprior: Whether to use a weak hyperprior, which matters for small validation sets. It prefers log T near 0
            (a Cauchy distribution of width 0.3), a prior precision within a decade of the one with the largest
            evidence, and noise that is not below the training residuals. It counts as much as one or two examples.
        link_approx: The link of the predictions that are scored; by default that of `la.predict`.
        ood_loader: Inputs from outside the distribution, whose predictive entropy should be high.
        ood_weight: How much these count, in (0, 1].
        progress_bar: Whether runs over the loaders show one; None shows one in a terminal after a few seconds.
        group: The process group, if each rank reads its own part of the loaders: all ranks find what one process with
            all data finds. If left out, every rank must read all of it, and nothing is exchanged.

    Returns:
        The network alone, the rescaled network, the posterior before, the best and the chosen setting. Prints as a
        table.

    Raises:
        NotFittedError: `fit` was not called yet.
        OptionError: the rule or the link is unknown, or the link cannot represent the network itself.
        UnsupportedError: the prior has no precision.
        InputError: a loader can be read once only, or its batches do not fit.
        NumericalError: a score is NaN or infinite. Nothing has changed then.
    """
    rule, hyperprior, progress_bar = (
        choice(rule, RULES, "rule"),
        flag(hyperprior, "hyperprior"),
        flag_or_none(progress_bar, "progress_bar"),
    )
    val_loader = held_out_batches(val_loader)
    reduce = reduce_to_calibrate(group, val_loader, "la.calibrate")
    posterior, how = la.posterior.detached(), _how(la, link_approx, ood_loader, ood_weight)
    if not isinstance(posterior.prior, GaussianPrior):
        raise UnsupportedError(
            f"calibrate multiplies the prior precision, and {posterior.prior} has none. Write la.tune(), which tunes "
            "its hyperparameters by the evidence, or Laplace(..., prior_precision=1.0) instead of prior=."
        )
    with torch.no_grad(), reduce.session(), joined(reduce):
        require_same_settings(la, reduce)
        _require_narrow_limit(how, posterior)
        validation = validation_of(la, how, val_loader, ood_loader, progress_bar, again=True, reduce=reduce)
        held_out = HeldOut(validation, posterior, _scale_of(posterior))
        profile = Profile(
            held_out, how.ood_weight, _first_noise(posterior), _evidence_factor(held_out) if hyperprior else None
        )
        profile.search()
        result, setting = _result(la, profile, rule)
        notes = remarks(la, val_loader, held_out, result.gain)
    if held_out.scale == "softmax_temperature" and profile.lines[setting[0]].at_edge:
        notes.append(f"the softmax temperature {setting[1]:.3g} is at the edge of its search, 0.05 to 20.")
    _take(la, held_out, setting, max(profile.factors))
    la.values = replace(la.values, tuning_data=val_loader)
    for note in notes:
        warn(note)
    return replace(result, notes=tuple(notes))


def _result(la: Tunable, profile: Profile, rule: str) -> tuple[Calibrated, Setting]:
    """Apply the rule. Return the result and the setting that was chosen."""
    held_out = profile.held_out
    now = _present_scale(la, held_out)
    plain = NETWORK, now if held_out.scale == "sigma_noise" else 1.0
    *candidates, network, before = profile.candidates([plain, (1.0, now)])
    rescaled = next(each for each in candidates if each.setting[0] == NETWORK)
    references = [network, rescaled]
    best = best_of(candidates, references)
    chosen = best if rule == "best" else widest_of(candidates, best, references, profile.difference)
    reporter = _Reporter(held_out, network, rescaled)
    curve = tuple(reporter.row("profile", each) for each in candidates if each.setting[0] < NETWORK)
    n_data = round(count(held_out.weights, held_out.targets))
    calibrated = Calibrated(
        n_data,
        rule,
        network=reporter.row("network", network),
        rescaled=reporter.row("rescaled", rescaled),
        before=reporter.row("before", before),
        best=reporter.row("best", best),
        chosen=reporter.row("chosen", chosen),
        profile=curve,
    )
    return calibrated, chosen.setting


def _how(la: Tunable, link_approx: Any, ood_loader: Any, ood_weight: float) -> How:
    how = how_scored(la, "glm", link_approx, _DRAWS, None, ood_weight)
    if ood_loader is None and not unchanged(ood_weight, 0.5):
        raise OptionError(f"ood_weight={shown(ood_weight)} goes with ood_loader=, which is not given.")
    return replace(how, softmax_temperature=1.0)


def _require_narrow_limit(how: How, posterior: Posterior) -> None:
    """Refuse a link that does not tend to the network's own prediction as the posterior gets narrow."""
    if how.approximation is None:
        return
    c = posterior.fit.n_outputs
    f = torch.linspace(-1, 1, 3 * c, dtype=torch.float64, device=posterior.fit.mean.device).reshape(3, c)
    narrow = torch.full_like(f, 1e-12)
    outputs = OutputGaussian(f, narrow, narrow.diag_embed(), times=lambda v: narrow * v)
    p, _ = through_link(how.approximation, outputs, seeded(_DRAWS, f))
    if not torch.allclose(p, posterior.fit.likelihood.inverse_link(f), rtol=1e-3, atol=1e-4):
        raise OptionError(
            f"link_approx={how.link!r} does not give the network's own probabilities where there is no uncertainty, "
            "so it cannot be compared with the network. Leave link_approx= out."
        )


def _scale_of(posterior: Posterior) -> str | None:
    """Return which scale is calibrated together with the prior precision."""
    likelihood = posterior.fit.likelihood
    if likelihood.has_logits:
        return "softmax_temperature"
    # The curvature of earlier tasks was measured at their own noise: it does not scale with the present one.
    return "sigma_noise" if likelihood.has_noise and not isinstance(posterior.prior, CurvedPrior) else None


def _present_scale(la: Tunable, held_out: HeldOut) -> float:
    if held_out.scale is None:
        return 1.0
    return float(held_out.posterior.sigma) if held_out.scale == "sigma_noise" else la.softmax_temperature


def _first_noise(posterior: Posterior) -> float:
    """Return the standard deviation of the training residuals, or the present noise if there are none."""
    data = posterior.fit.data
    if "count" not in data or not float(data["loss"]) > 0:
        return float(posterior.sigma)
    return math.sqrt(2 * float(data["loss"]) / float(data["count"]))


def _evidence_factor(held_out: HeldOut) -> float:
    """Return the factor of the prior precision at the largest evidence, from its values on a grid and a parabola."""
    factors, values = half_decades(-HALF_DECADES, HALF_DECADES), []
    for factor in factors:
        try:
            values.append(float(held_out.at(factor).log_evidence))
        except LaplaceError:
            values.append(-math.inf)
    at = max(range(len(values)), key=values.__getitem__)
    if not math.isfinite(values[at]):
        return 1.0
    around = values[at - 1 : at + 2] if 0 < at < len(values) - 1 else []
    if len(around) < 3 or not all(map(math.isfinite, around)):
        return factors[at]
    bend = around[0] - 2 * around[1] + around[2]
    return factors[at] * 10 ** (0.25 * (around[0] - around[2]) / bend) if bend < 0 else factors[at]


class _Reporter:
    """Writes candidates as rows of the table."""

    def __init__(self, held_out: HeldOut, network: Candidate, rescaled: Candidate) -> None:
        self.held_out, self.references = held_out, (network, rescaled)

    def row(self, name: str, candidate: Candidate) -> Calibration:
        (factor, scale), scored, held_out = candidate.setting, candidate.scored, self.held_out
        confidence, correct = scored.confidence, scored.correct
        share = None if correct is None else float(correct.double().mean())
        ece = None if confidence is None or correct is None else binned(confidence, correct).ece
        softmax = scale if held_out.scale == "softmax_temperature" else 1.0
        return Calibration(
            name,
            nll=paired(scored.losses, held_out.weights)[0],
            score=candidate.objective,
            gain=self._gain(self.references[0], candidate),
            gain_on_rescaled=self._gain(self.references[1], candidate),
            accuracy=None if confidence is None else share,
            ece=ece,
            coverage=share if confidence is None else None,
            prior_precision=None if factor == NETWORK else precision_at(held_out, candidate.setting),
            softmax_temperature=softmax,
            sigma_noise=self._noise(scale),
        )

    def _gain(self, other: Candidate, candidate: Candidate) -> Gain:
        mean, variance = paired(other.scored.losses - candidate.scored.losses, self.held_out.weights)
        return Gain(mean, math.sqrt(variance))

    def _noise(self, scale: float) -> Tensor | None:
        likelihood, sigma = self.held_out.likelihood, self.held_out.posterior.sigma
        if not likelihood.has_noise:
            return None
        level = torch.full_like(sigma, scale) if self.held_out.scale == "sigma_noise" else sigma
        return likelihood.noise_at(level)


def precision_at(held_out: HeldOut, setting: Setting) -> Tensor:
    """Return the prior precision of a setting: at another noise it is multiplied as the curvature is."""
    prior = held_out.posterior.prior
    assert isinstance(prior, GaussianPrior)
    factor, scale = setting
    return prior.precision * (factor * held_out.rescaling(scale))


def _take(la: Tunable, held_out: HeldOut, setting: Setting, narrowest: float) -> None:
    """Set the chosen values. If the network itself was chosen, the prior is so narrow that no variance is left."""
    factor, scale = setting
    finite = factor if factor < NETWORK else narrowest * _CERTAIN
    precision = precision_at(held_out, (finite, scale))
    la.prior_precision = precision.clamp(max=max(_LARGEST, float(precision.min()))) if factor == NETWORK else precision
    if held_out.scale is not None:
        setattr(la, held_out.scale, scale)
