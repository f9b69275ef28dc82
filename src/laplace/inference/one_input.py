"""Predict the classes of a single input with as few steps as can be.

A small network runs for 0.1 ms, and the general way to a prediction takes longer than that: it may cut inputs into
parts, ask for covariances, find positions. Here are the posteriors of a last layer with eigenvectors, links with a row
form, and one input that is a tensor on a processor; the results are the same up to rounding. Whatever is out of the
ordinary makes `at_one_input` return None: the general way takes over, and its errors are the ones that are raised.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from laplace.backprop.head import HeadForward
from laplace.inference.linearised import contrasted
from laplace.inference.source import Source, outputs_of
from laplace.linalg.autocast import is_cast
from laplace.linalg.sampling import Draws
from laplace.linalg.tracing import is_plain
from laplace.posterior.fixing import Seen, spread_of
from laplace.posterior.posterior import Posterior
from laplace.posterior.rows import RowPredictive, row_predictive
from laplace.predictive.links import Link
from laplace.predictive.outputs import OutputGaussian
from laplace.predictive.positions import Positions
from laplace.predictive.prediction import Later, Prediction
from laplace.predictive.queries import Contrasts
from laplace.predictive.response import Response
from laplace.spec import Spec
from laplace.weights import FoundLastLayer

_MOST = 8  # links and softmax temperatures of one posterior that are kept


@dataclass(frozen=True)
class Way:
    """Holds what a posterior fixes for one link: nothing of it depends on the input."""

    posterior: Posterior
    link: str
    row: RowPredictive
    weights: FoundLastLayer
    spec: Spec
    temperature: float
    dtype: torch.dtype
    shape: torch.Size  # of the outputs


@dataclass
class AtOneInput:
    """Holds the prediction at one input, and what the rest of it is computed from when it is read."""

    way: Way
    mean: Tensor  # (1, C)
    f: Tensor  # (1, C)
    phi: Tensor  # (1, H)

    def prediction(self, source: Source, draws: Draws) -> Prediction:
        """Return the full prediction."""
        response, way = source.likelihood.response, self.way
        return response.prediction_later(Later(self._outputs), self.mean, way.posterior.sigma, way.link, draws)

    @torch.no_grad()
    def _outputs(self) -> OutputGaussian:
        way, spec = self.way, self.way.spec
        positions = Positions.of(self.f, spec.class_dim)
        forward = HeadForward(self.f, self.phi, way.weights, positions, spec.budget)
        need = Contrasts(covariances=True, beside=True)
        return contrasted(way.posterior, forward, need).scaled(1 / way.temperature)


def at_one_input(source: Any, x: Tensor, link: str | Link | None, as_in_paper: bool = False) -> AtOneInput | None:
    """Return the prediction at one input; None if it has to be made in the general way."""
    if getattr(type(source), "outputs", None) is not outputs_of or x.shape[:1] != (1,) or not x.is_cpu or is_cast():
        return None
    if source.runner.enable_backprop or not (link is None or isinstance(link, str)):
        return None
    with torch.no_grad():
        return _found(source, x, link, as_in_paper)


def _found(source: Any, x: Tensor, link: str | None, as_in_paper: bool) -> AtOneInput | None:
    runner, posterior, temperature = source.runner, source.posterior, source.softmax_temperature
    waiting = runner.ready
    ways, key = waiting.fixed_by(posterior), (link, as_in_paper, temperature)
    if key not in ways:
        if len(ways) >= _MOST:
            ways.clear()
        ways[key] = _way(source, posterior, link, as_in_paper, temperature)
    way: Way | None = ways.get(key)
    if way is None:
        return None
    run = waiting.in_line(posterior.fit, x)
    if run is None:
        ready = waiting.take(posterior.fit)
        if ready is None:
            return None
        try:
            run = ready.engine.at_one(x)
        except Exception:  # any error of the network, which the general way explains
            return None
        waiting.give(ready)
        if run is None:
            ways[key] = None  # nor will the next input be ordinary
            return None
    f, phi = run
    if not is_plain(f) or f.shape != way.shape or f.dtype is not way.dtype or phi.dtype is not way.dtype:
        return None
    row = f.numpy()[0].tolist()
    found = way.row(row if temperature == 1 else [m / temperature for m in row], way.row.turned(phi))
    return None if found is None else AtOneInput(way, torch.from_numpy(found[0][None]), f, phi)


@torch.no_grad()
def _way(source: Any, posterior: Posterior, link: Any, as_in_paper: bool, temperature: float) -> Way | None:
    """Return what the posterior fixes; None if the general way is the only one."""
    runner, response, fit = source.runner, source.likelihood.response, posterior.fit
    weights, spec = runner.weights, runner.spec
    name, how = response.link_of(link, as_in_paper)
    closed_form = None if how is None else how.closed_form
    ordinary = (
        closed_form is not None
        and isinstance(weights, FoundLastLayer)
        and weights.reduction is None
        and isinstance(weights.layer(runner.model), nn.Linear)
        and not fit.structure.functional
        and fit.owners is None
        and spec.class_dim in (-1, 1)
        and response.only_differences
        and response.drawn_uncertainty
        and type(response).prediction is Response.prediction
        and type(response).prediction_later is Response.prediction_later
        and fit.mean.device.type == "cpu"
    )
    if not ordinary:
        return None
    assert how is not None
    scale, c, budget = 1 / temperature, fit.n_outputs, spec.budget
    seen = Seen(c, scale, contrasts=isinstance(how.needs(), Contrasts))
    assert closed_form is not None
    row = row_predictive(closed_form, spread_of(posterior.gaussian, fit.layout, seen, budget))
    shape = torch.Size((1, c))
    return None if row is None else Way(posterior, name, row, weights, spec, temperature, fit.mean.dtype, shape)
