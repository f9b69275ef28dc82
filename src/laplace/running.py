"""Running the network for a posterior: which weights, by which engine, on which parts of the inputs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from laplace.backprop import Forward, Head, Network, Plan
from laplace.backprop.audit import EXAMPLES
from laplace.batches import Batch, Inputs, Keys, described, device_of, training_batches
from laplace.budget import Budget
from laplace.counting import check_finite
from laplace.errors import InputError, LaplaceWarning, ModelError, StaleWarning, UnsupportedError, warn
from laplace.options import MOST_VECTORS, require_served
from laplace.positions import Positions
from laplace.posterior import Fit, Posterior
from laplace.precision import rounding
from laplace.replica import replicate
from laplace.structures import Structure, adding
from laplace.weights import LastLayer, Selection, Snapshot, Subset, what_changed


class Running(ABC):
    """The running side of `Laplace`."""

    model: nn.Module
    structure: Structure
    curvature: str
    class_dim: int | None
    enable_backprop: bool
    _subset: Subset
    _curvature_given: bool
    _keys: Keys
    _budget: Budget
    _weights: LastLayer | Selection | None
    _plan: Plan | None
    _fitted: Fit | None
    _snapshot: Snapshot | None
    _warned: set[str]

    @property
    @abstractmethod
    def posterior(self) -> Posterior:
        """The posterior at the current prior, noise and temperature."""

    def _find_weights(self, inputs: Inputs, keep: bool) -> LastLayer | Selection:
        if keep and self._weights is not None:
            return self._weights
        weights = self._subset.find(self.model, inputs)
        require_served(self.structure, weights.layout)
        if isinstance(weights, LastLayer) and self.curvature == "ef" and self._positions(inputs).several:
            return Selection(weights.layout)  # an example's score is one vector for all its positions
        return weights

    def _require_steady(self, inputs: Inputs, linear: bool) -> None:
        """Refuse a network that gives other outputs when it is asked again, or when other examples are beside.

        The latter for last layers alone: of other weights the audit sees it, and names the layer.
        """
        few = inputs.part(0, EXAMPLES)
        fewer = few.part(0, 2) if linear and (few.size or 0) > 2 else few
        f, again = self._outputs(few), self._outputs(fewer)
        if not f.dim() or not again.dim() or _alike(f[: len(again)], again):
            return
        if fewer is not few and _alike(f, self._outputs(few)):
            raise ModelError(
                "the outputs of an example depend on the others in its batch. A posterior needs independent examples: "
                "give BatchNorm running statistics, and take means over the batch out of forward."
            )
        raise ModelError(
            "the network gives other outputs when it is asked again: it draws random numbers in eval mode. Write "
            "dropout(h, p, training=self.training), and take noise out of forward."
        )

    def _outputs(self, inputs: Inputs) -> Tensor:
        """Those of a run that nothing is kept of; a network may write to its inputs."""
        with torch.inference_mode(False), torch.no_grad():
            return inputs.map(torch.clone).call(replicate(self.model))

    def _positions(self, inputs: Inputs) -> Positions:
        """The shape of the outputs, from a run on a few examples."""
        return Positions.of(self._outputs(inputs.part(0, EXAMPLES)), self.class_dim)

    def _may_have_chosen(self, curvature: str) -> bool:
        """Whether a fit may have taken this curvature unasked."""
        return not self._curvature_given and curvature in ("ggn", "sketch")

    def _chosen_curvature(self, engine: Head | Network, inputs: Inputs) -> str:
        """Where nobody said which: exact, unless that takes too many vectors to be sent back from all positions."""
        if self._curvature_given:
            return self.curvature
        if isinstance(engine, Head):
            return "ggn"
        found = engine.planned_positions(inputs)
        vectors = found.count * found.c
        if not found.several or vectors <= MOST_VECTORS:
            return "ggn"
        self._warn_once(
            "sketch",
            f"the exact GGN sends back a vector for each of {found.c} outputs at {found.count} positions; above "
            f"{MOST_VECTORS} in all, an unbiased estimate is taken: curvature='sketch', one vector. Write "
            "curvature='ggn' for the exact one, or curvature='sketch' with curvature_samples= to say it yourself.",
        )
        return "sketch"

    def _training(self, loader: Iterable[Any], progress_bar: bool) -> Iterator[Batch]:
        return iter(training_batches(loader, self.model, self._keys, progress_bar, "fit"))

    def _require_rereading(self, loader: Iterable[Any], override: bool) -> None:
        """What a structure that reads the data more than once, or keeps some of it, cannot do."""
        name = self.structure.name
        if self.structure.passes > 1 and isinstance(loader, Iterator):
            raise InputError(
                f"hessian_structure={name!r} reads the data {self.structure.passes} times or more, and a "
                f"{type(loader).__name__} can be read once. Give a DataLoader or a list of batches."
            )
        if not self.structure.adds and not override and self._fitted is not None:
            raise UnsupportedError(
                f"override=False: what {name!r} keeps depends on all data and cannot be added to. Fit it on all data "
                f"at once, or take {adding()}, whose sums add."
            )

    def _engine(self, weights: LastLayer | Selection, plan: Plan | None = None) -> Head | Network:
        """What runs the network; the `plan` of a network is kept from one call to the next."""
        if isinstance(weights, LastLayer):
            return Head(self.model, weights, self._budget, self.class_dim)
        reduce = self.structure.weight_sharing == "reduce"
        exact = self.curvature == "hessian"
        return Network(self.model, weights, self._budget, plan, reduce, exact, self.class_dim)

    def _runs(self, inputs: Inputs, whole: bool = False) -> Iterator[Forward]:
        if whole:
            yield from self._uncut(inputs, whole)
            return
        for forward in self._uncut(inputs):
            yield from (part for part, _ in forward.cut())

    def _uncut(self, inputs: Inputs, whole: bool = False) -> Iterator[Forward]:
        """Runs on consecutive parts of the inputs, with all positions of each example."""
        posterior = self.posterior
        self._notice_changes()
        assert self._weights is not None
        engine, inputs = self._engine(self._weights, self._plan), inputs.to(device_of(self.model))
        if not engine.linear and any(t.shape[:1] == (0,) for t in inputs.tensors()):
            raise InputError(f"there is no example in {described(inputs.x, {})}. Leave empty batches out.")
        seen = 0  # examples of the parts before
        for part in [inputs] if whole else engine.chunks(inputs, posterior.fit.n_outputs):
            forward = engine.forward(part, self.enable_backprop)
            if forward.positions.c != posterior.fit.n_outputs:
                raise InputError(
                    f"the outputs have {forward.positions.c} classes or outputs each; fitted on "
                    f"(N, {posterior.fit.n_outputs})."
                )
            check_finite(forward.outputs, "the network's outputs hold", forward.positions.count, seen)
            seen += forward.positions.n
            yield posterior.fit.beside(forward, engine, self._budget.chunk)
        self._plan = engine.plan

    def _notice_changes(self) -> None:
        """Warn once where the network is no longer the one that was fitted."""
        assert self._weights is not None
        assert self._fitted is not None
        changed = what_changed(self.model, self._weights, self._fitted.mean, self._snapshot)
        if not changed and self._snapshot is not None and self._snapshot.versions is None:
            self._snapshot = Snapshot.of(self.model)  # a copy, now that it is known to be one
        if changed:
            self._warn_once(
                "stale", f"{changed} since fit; the posterior belongs to the old ones. Call la.fit again.", StaleWarning
            )

    def _require_unchanged(self) -> None:
        """Refuse to add data at other weights than those of the data before."""
        assert self._weights is not None
        assert self._fitted is not None
        if changed := what_changed(self.model, self._weights, self._fitted.mean, self._snapshot, thoroughly=True):
            raise UnsupportedError(
                f"{changed} since fit, and data at other weights cannot be added. Fit all data at once, or "
                "take what was learned as a prior: Laplace(..., prior=la.as_prior()).fit(new_loader)."
            )

    def _warn_once(self, key: str, message: str, category: type[LaplaceWarning] = LaplaceWarning) -> None:
        if key not in self._warned:
            warn(message, category)
            self._warned.add(key)  # unless warnings are errors


def _alike(f: Tensor, other: Tensor) -> bool:
    """Equal up to rounding, wherever both are numbers."""
    if f.shape != other.shape:
        return False
    tolerance = 3 * rounding({f.dtype}) ** 0.5
    f, other = f.double(), other.double()
    difference = (f - other).nan_to_num(0.0, 0.0, 0.0).abs()
    return not f.numel() or float(difference.max()) <= tolerance * float(f.nan_to_num(0.0, 0.0, 0.0).abs().max())
