"""Find prior precision and noise by maximal evidence: damped Newton in the logarithms.

For positive semi-definite H, log Z is jointly concave in x_g = log delta_g of every group g of weights and in
z = log sigma. With r_g = |theta_g - mu_g|^2, t_g = tr(Sigma_gg), m_gh = |Sigma_gh|_F^2 of the posterior and t0, m0 of
the prior (P_g / delta_g and P_g / delta_g^2 for P_g weights), gamma = tr(Sigma s H) = sum delta (t0 - t), sigma
entering the curvature as sigma^(-2q) (q = 1; 2 for the empirical Fisher), and L the log-likelihood:

    d/dx_g        = -1/2 delta_g (r_g + t_g - t0_g)
    d/dz          = L'/T + q gamma
    d2/dx_g dx_h  = -1/2 [[g = h] delta_g (r_g + t_g - t0_g) - delta_g delta_h (m_gh - m0_gh)]
    d2/dx_g dz    = -q delta_g (t_g - sum_h delta_h m_gh)
    d2/dz2        = L''/T - 2 q^2 sum_g delta_g (t_g - sum_h delta_h m_gh)

so a step needs the traces of both Gaussians and nothing else: eigenvalues where the prior commutes with H, one
factorisation where it does not. A structure whose prior is split over its factors (damping) has no such form, and nor
has a prior that is not given by precisions; there the same Newton iteration takes its derivatives from autograd. After
earlier tasks, whose curvature is part of the prior, log Z need not be concave: steps still go uphill, and for the
noise's second derivatives bounds are used.

Where the log-determinant is estimated (`matrix_free`), the traces are estimates from the same probes, but not exactly
its derivatives. So differences far below the standard error decide nothing, and end the ascent.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from laplace.errors import BoundaryWarning, LaplaceWarning, NumericalError, UnsupportedError, warn
from laplace.posterior.posterior import Posterior
from laplace.priors.gaussian import GaussianPrior
from laplace.structures.base import Traces
from laplace.tuning.result import Point, Tuned
from laplace.tuning.space import Space

BOUND = math.log(1e8)  # |log| of the smallest and largest precision and noise looked at
_LONGEST_STEP = 3.0
_SLACK = 0.05  # share of the standard error of an estimated evidence by which a step may seem to lose
_TOLERANCE = 1e-9  # of the evidence, in what the next step would gain


def maximise_evidence(
    space: Space, start: Tensor, max_steps: int, held: Tensor | None = None, verbose: bool = False
) -> Tuned:
    """Return the point of maximal evidence, from `start`, (K,). Coordinates that are `held` stay fixed."""
    if space.temperature:
        raise UnsupportedError(
            "the evidence has no optimum in the temperature: p(data given theta)^(1/T) is not a normalised likelihood, "
            "and grows as the data is ignored (T to infinity). Tune it with method='validation', val_loader=..."
        )
    problem = _Problem(space)
    fixed = torch.zeros_like(start, dtype=torch.bool) if held is None else held
    x, steps = _newton(problem, start, fixed, max_steps, verbose)
    points = tuple(point for _, point in problem.seen)
    best = next(point for seen, point in problem.seen if seen is x)
    notes = _notes(problem, torch.where(fixed, 0, x), steps, max_steps)
    for note, category in notes:
        warn(note, category)
    return Tuned("evidence", best, points, steps, len(points), tuple(note for note, _ in notes), steps < max_steps)


def climb(space: Space, start: Tensor, max_steps: int, reach: float) -> Posterior:
    """Return where Newton's ascent from `start`, (K,), leads, at most `reach` away in any logarithm."""
    top, _ = _newton(_Problem(space), start, torch.zeros_like(start, dtype=torch.bool), max_steps, verbose=False)
    return space.at(start + (top - start).clamp(-reach, reach))


class _Problem:
    """Computes the evidence as a function of x = (log delta_1, ..., log delta_G [, log sigma])."""

    def __init__(self, space: Space) -> None:
        self.at, posterior, self.groups, self.with_noise = (
            space.at,
            space.posterior,
            space.groups or "scalar",
            space.noise,
        )
        fit = posterior.fit
        self.posterior, prior, self.kinds = posterior, posterior.prior.detached(), space.kinds
        self.commutes = isinstance(prior, GaussianPrior) and posterior.curvature.commutes
        self.r = prior.distances(fit.mean, fit.layout, self.groups) if isinstance(prior, GaussianPrior) else None
        self.q = 2.0 if fit.scaling == "ef" else 1.0
        self.tolerance = _TOLERANCE if fit.mean.dtype == torch.float64 else 1e3 * _TOLERANCE
        self.seen: list[tuple[Tensor, Point]] = []
        self.slack = 0.0  # differences of the evidence that mean nothing, where it is estimated

    def step(self, x: Tensor, free: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return evidence, gradient, and the Newton step in the free coordinates."""
        of = self._step_by_traces if self.commutes else self._step_by_autograd
        posterior, value, gradient, step = of(x, free)
        self.seen.append((x, Point.of(posterior, float(value))))
        return value, gradient, step

    def tried(self, x: Tensor, free: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
        """Return the same, or None where the prior is lost to rounding: the step was too long.

        An indefinite H is refused instead: its evidence grows without bound towards where the precision is singular.
        """
        try:
            return self.step(x, free)
        except NumericalError:
            if not self.posterior.fit.structure.semidefinite:
                raise
            return None

    def _step_by_traces(self, x: Tensor, free: Tensor) -> tuple[Posterior, Tensor, Tensor, Tensor]:
        posterior = self.at(x)
        fit, prior = posterior.fit, posterior.prior
        assert isinstance(prior, GaussianPrior)
        assert self.r is not None
        self.slack = _SLACK * 0.5 * posterior.gaussian.logdet_error
        delta, own = prior.precision.double().reshape(-1), prior.terms(fit.mean, fit.layout, self.groups, self.r)
        value = posterior.evidence_given(own.scatter, own.logdet)
        (t, m), (t0, m0) = posterior.gaussian.traces(self.groups), own.traces
        pull = delta * (self.r + t - t0)
        gradient, diagonal, dense = -0.5 * pull, 0.5 * pull, None
        if m.dim() == 1:
            diagonal = diagonal - 0.5 * delta.square() * (m - m0)
        else:
            spread = m - (m0.diag() if m0.dim() == 1 else m0)
            dense = diagonal.diag() - 0.5 * delta.unsqueeze(1) * spread * delta
        if not self.with_noise:
            return posterior, value, gradient, _solve(diagonal, dense, None, None, gradient, free)
        slope, bend = self._noise(x[-1])
        gamma, coupling, total = _determined(posterior, (t, m), t0)
        gradient = torch.cat([gradient, (slope + self.q * gamma).reshape(1)])
        corner = -bend + 2 * self.q**2 * total
        return posterior, value, gradient, _solve(diagonal, dense, self.q * coupling, corner, gradient, free)

    def described(self, x: Tensor) -> str:
        """Say where a point is."""
        kind = self.kinds[0].replace("prior_precision", "prior precision")
        return f"{kind} {x.exp().tolist()[:5]}"

    def _noise(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """Return first and second derivative of (1/T) log p(D given mean) in z = log sigma."""
        fit = self.posterior.fit
        with torch.inference_mode(False), torch.enable_grad():
            z = z.detach().clone().requires_grad_()
            value = fit.likelihood.log_likelihood(fit.data, z.exp()) / self.posterior.temperature
            (slope,) = torch.autograd.grad(value, z, create_graph=True)
            (bend,) = torch.autograd.grad(slope, z)
        return slope.detach(), bend.detach()

    def _step_by_autograd(self, x: Tensor, free: Tensor) -> tuple[Posterior, Tensor, Tensor, Tensor]:
        with torch.inference_mode(False), torch.enable_grad():
            x = x.detach().clone().requires_grad_()
            posterior = self.at(x)
            value = posterior.log_evidence
            (gradient,) = torch.autograd.grad(value, x, create_graph=True)
            rows = [torch.autograd.grad(g, x, retain_graph=True, materialize_grads=True)[0] for g in gradient]
        gradient, bend = gradient.detach(), -torch.stack(rows)
        step = _solve(bend.diagonal(), bend, None, None, gradient, free)
        return posterior.detached(), value.detach(), gradient, step


def _determined(posterior: Posterior, traces: Traces, own: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return gamma = tr(Sigma s H), its shares delta_g tr((Sigma s H Sigma)_gg), and tr(Sigma s H Sigma D).

    `traces` are the posterior's and `own` the prior's, of groups that have one delta each. After earlier tasks gamma is
    the derivative of log det in log s; the shares are set to 0 and their sum to an upper bound, which shortens steps.
    """
    prior, (t, m) = posterior.prior, traces
    assert isinstance(prior, GaussianPrior)
    delta = prior.precision.double().reshape(-1)
    if prior.curved:
        with torch.inference_mode(False), torch.enable_grad():
            scale = posterior.scale.detach().clone().requires_grad_()
            (slope,) = torch.autograd.grad(posterior.scaled(scale).logdet(), scale)
        gamma = (scale.detach() * slope).double()
        return gamma, torch.zeros_like(t), gamma
    share = delta * (t - (delta * m if m.dim() == 1 else m @ delta))
    return (delta * (own - t)).sum(), share, share.sum()


def _solve(
    diagonal: Tensor, dense: Tensor | None, border: Tensor | None, corner: Tensor | None, gradient: Tensor, free: Tensor
) -> Tensor:
    """Return the Newton step of the free coordinates. An arrow-shaped matrix is never written out."""
    step = torch.zeros_like(gradient)
    if dense is not None:
        if border is not None and corner is not None:
            dense = torch.cat([torch.cat([dense, border[:, None]], 1), torch.cat([border, corner.reshape(1)])[None]])
        index = free.nonzero().flatten()
        ridge = 1e-12 * dense.diagonal().abs().max() * torch.eye(len(index), dtype=dense.dtype, device=dense.device)
        step[index] = _uphill(dense[index][:, index] + ridge, gradient[index])
        return step
    diagonal = diagonal.abs().clamp(min=1e-12)
    if border is None or corner is None:
        step[free] = gradient[free] / diagonal[free]
        return step
    inner, last = free[:-1], bool(free[-1])
    d, b, g = diagonal[inner], border[inner], gradient[:-1][inner]
    dz = (
        (gradient[-1] - (b * g / d).sum()) / (corner - (b.square() / d).sum()).clamp(min=1e-300)
        if last
        else gradient[-1] * 0
    )
    step[:-1][inner] = (g - b * dz) / d
    step[-1] = dz
    return step


def _uphill(bend: Tensor, gradient: Tensor) -> Tensor:
    """Return Newton's step. Where the evidence is not concave, absolute values of its curvatures are used."""
    root, failed = torch.linalg.cholesky_ex(bend)
    if not failed:
        return torch.cholesky_solve(gradient.unsqueeze(1), root).squeeze(1)
    values, vectors = torch.linalg.eigh(bend)
    return vectors @ ((vectors.T @ gradient) / values.abs().clamp(min=1e-6))


def _newton(problem: _Problem, x: Tensor, fixed: Tensor, max_steps: int, verbose: bool) -> tuple[Tensor, int]:
    """Run damped Newton ascent inside the box |x| <= BOUND."""
    free = ~fixed
    value, gradient, step = problem.step(x, free)
    for number in range(max_steps):
        held = fixed | ((x >= BOUND) & (gradient > 0)) | ((x <= -BOUND) & (gradient < 0))
        if not torch.equal(~held, free):
            free = ~held
            value, gradient, step = problem.step(x, free)
        if not value.isfinite() or not step.isfinite().all():
            raise NumericalError(f"the evidence is {float(value)} at {problem.described(x)}; nothing changed.")
        if verbose:
            print(
                f"step {number}: log evidence {float(value):.4f}, gradient {float((gradient * free).abs().max()):.1e}"
            )
        if not free.any():
            return x, number
        gain = float(gradient @ step)
        if gain < 0:  # no ascent direction in this precision: the gradient is one
            step, gain = gradient * free, float((gradient * free) @ gradient)
        step = step.clamp(-_LONGEST_STEP, _LONGEST_STEP)
        least = problem.tolerance * max(1.0, abs(float(value)))
        done = gain < max(least, problem.slack)
        if done and problem.slack > least:
            return x, number  # where the evidence is estimated, a step this small costs more than it tells
        for _ in range(30):
            candidate = torch.where(fixed, x, (x + step).clamp(-BOUND, BOUND))
            new = problem.tried(candidate, free)
            if new is not None and new[0] >= value - max(1e-12 * abs(float(value)), problem.slack):
                break
            step = step / 2
        else:
            return x, number  # nothing better in this direction
        runaway, side = free & (step.abs() > 0.5), step.sign()
        x, (value, gradient, step) = candidate, new
        if done:  # a coordinate that still moves though nothing is gained is on its way to 0 or infinity
            pushed = torch.where(runaway, side * BOUND, x)
            there = problem.tried(pushed, free) if runaway.any() else None
            better = there is not None and there[0] >= value - 1e-9 * abs(float(value))
            return pushed if better else x, number
    return x, max_steps


def _notes(problem: _Problem, x: Tensor, steps: int, max_steps: int) -> list[tuple[str, type[LaplaceWarning]]]:
    """Return what the user should know about the point where the ascent ended."""
    notes: list[tuple[str, type[LaplaceWarning]]] = []
    if steps == max_steps:
        late = f"the evidence had not converged after {max_steps} steps; give n_steps= a larger number."
        notes.append((late, LaplaceWarning))
    precisions = x[:-1] if problem.with_noise else x
    if not isinstance(problem.posterior.prior, GaussianPrior):
        for kind in dict.fromkeys(problem.kinds):
            index = [i for i, each in enumerate(problem.kinds) if each == kind and abs(float(x[i])) > BOUND - 1e-6]
            if index:
                note = f"the evidence has no optimum in {kind}; held at {float(x[index[0]].exp()):g}."
                notes.append((note, BoundaryWarning))
        return notes
    names = problem.posterior.fit.layout.names if problem.groups == "layerwise" else ()
    for side, reason, where in (
        ("infinity", "weights that lie at their prior mean", precisions >= BOUND - 1e-6),
        ("0", "weights without curvature", precisions <= -BOUND + 1e-6),
    ):
        index = where.nonzero().flatten().tolist()
        if index:
            shown = f" ({', '.join(names[i] for i in index[:3])})" if names else ""
            note = (
                f"the evidence sends {len(index)} of {len(precisions)} prior precisions{shown} to {side}, as it does "
                f"for {reason}; held at {float(x[index[0]].exp()):g}."
            )
            notes.append((note, BoundaryWarning))
    if problem.with_noise and float(x[-1].abs()) > BOUND - 1e-6:
        note = f"the evidence has no optimum in sigma_noise; held at {float(x[-1].exp()):g}."
        notes.append((note, BoundaryWarning))
    return notes
