"""Run a network that is being trained on single batches, as a fit would: in eval mode, at its current weights."""

from __future__ import annotations

from laplace.backprop import Head, Network, Plan
from laplace.curvature import Estimator
from laplace.errors import within
from laplace.inference.runner import Runner
from laplace.network.batches import Batch
from laplace.network.watching import watch_again
from laplace.weights import FoundLastLayer, Selection


class BatchRuns:
    """Makes engines at the weights of the moment. What the first batch shows of the network serves all later ones.

    Each engine has a replica of its own: it costs a fraction of a batch, and follows whatever training changes in the
    network, be it weights in place, buffers or attributes.
    """

    def __init__(self, runner: Runner) -> None:
        self.runner = runner
        self._found: tuple[FoundLastLayer | Selection, Estimator] | None = None
        self._plan: Plan | None = None

    @property
    def weights(self) -> FoundLastLayer | Selection:
        """Return the uncertain weights. There must have been an engine."""
        assert self._found is not None
        return self._found[0]

    @property
    def estimator(self) -> Estimator:
        """Return the curvature, the user's or the one that fits the first batch."""
        assert self._found is not None
        return self._found[1]

    def engine(self, batch: Batch) -> Head | Network:
        """Return an engine for this batch."""
        with within(f"batch {batch.index}", runs=True):
            return self._first(batch) if self._found is None else self.runner.engine(self.weights, self._plan)

    def done(self, engine: Head | Network) -> None:
        """Keep what a batch has shown of the network for the next engine."""
        self._plan = engine.plan

    def _first(self, batch: Batch) -> Head | Network:
        watch_again(self.runner.model)
        weights = self.runner.find_weights(batch.inputs)
        self.runner.require_steady(batch.inputs, isinstance(weights, FoundLastLayer))
        self.runner.spec.structure.check(weights.layout)
        engine = self.runner.engine(weights)
        self._found = weights, self.runner.chosen_curvature(engine, batch.inputs)
        return engine
