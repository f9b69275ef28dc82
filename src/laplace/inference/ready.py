"""Keep what a prediction needs beside its input ready for the next one: the engine, and what the posterior fixes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from laplace.backprop import Head, Network
from laplace.network.kept import KeptReplica
from laplace.network.operations import Line, shorten
from laplace.network.pieces import is_stand_in
from laplace.posterior.posterior import Fit, Posterior

_IDLE = 4  # most engines that wait for a call: one for each thread that predicts
_AT_ONCE = 2**16  # most weights that are compared with the posterior's mean in one call


@dataclass
class ReadyEngine:
    """Holds an engine on a kept replica, and the weights that its posterior was fitted at."""

    engine: Head | Network
    kept: KeptReplica
    fit: Fit
    pairs: list[tuple[Tensor, Tensor]]  # parts of the network's weights, and of the mean at the fit
    line: Line | None = None  # the network itself, if it can be run without a replica
    turn: int = 0

    @classmethod
    def of(cls, engine: Head | Network, kept: KeptReplica, fit: Fit, tensors: list[Tensor]) -> ReadyEngine | None:
        """Make an engine ready, for a network whose uncertain weights are those of the fit. None if it cannot be."""
        pairs, layout = [], engine.weights.layout
        for t, part, m in zip(tensors, layout.parts, layout.split(fit.mean), strict=True):
            if is_stand_in(t):  # of a piece, `kept` sees the memory
                continue
            flat = t.reshape(-1) if part is None else part.gather(t.reshape(-1))
            if flat.data_ptr() != t.data_ptr() or t.device != m.device:  # a copy would not follow the weights
                return None
            pairs += zip(flat.split(_AT_ONCE), m.to(t.dtype).split(_AT_ONCE), strict=True)
        line = None
        if isinstance(engine, Network):
            engine.put_hooks()
        else:
            shorten(kept.replica)
            line = Line.of(kept.network, engine.weights.layer(kept.network))
        kept.settle()
        return cls(engine, kept, fit, pairs, line)

    @property
    def device(self) -> torch.device:
        """Return the device of the network's first tensor."""
        return self.kept.tensors[0].device

    def serves(self, fit: Fit) -> bool:
        """Return whether network and weights are as they were.

        Writes that torch counts are always seen. Those through `.data` are seen in the uncertain weights alone, of
        which 65,536 are compared in a call, the next ones in the next call.
        """
        return self.fit is fit and self.kept.is_current() and self._has_same_weights()

    def in_line(self, x: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return outputs and features by the network itself. None if it is not a line, or not as it was."""
        try:
            found = None if self.line is None else self.line(x)
        except Exception:  # any error of the network
            return None
        return found if found is not None and self._has_same_weights() else None

    def _has_same_weights(self) -> bool:
        left = _AT_ONCE
        for _ in self.pairs:
            t, m = self.pairs[self.turn]
            left -= t.numel()
            if left < 0:
                break
            self.turn = (self.turn + 1) % len(self.pairs)
            if not torch.equal(t, m):
                return False
        return True


class Ready:
    """Keeps engines for the next calls. Each serves one call at a time, so that threads never share a replica."""

    def __init__(self) -> None:
        self._idle: list[ReadyEngine] = []
        self._lined: ReadyEngine | None = None
        self._fixed: tuple[Posterior | None, dict[Any, Any]] = None, {}

    def in_line(self, fit: Fit, x: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return outputs and features of one input if that takes no engine: threads may share a line."""
        lined = self._lined
        if lined is None or lined.fit is not fit:
            return None
        found = lined.in_line(x)
        if found is None:
            lined.line = self._lined = None
        return found

    def take(self, fit: Fit) -> ReadyEngine | None:
        """Return an engine that may be used for this fit, if there is one. Others are dropped."""
        while self._idle:
            try:
                ready = self._idle.pop()
            except IndexError:  # another thread was faster
                return None
            if ready.serves(fit):
                return ready
        return None

    def give(self, ready: ReadyEngine) -> None:
        """Keep an engine for the next call, unless the run has left something in its replica."""
        if len(self._idle) < _IDLE and ready.kept.is_clean():
            self._idle.append(ready)
            self._lined = ready if ready.line is not None else None

    def fixed_by(self, posterior: Posterior) -> dict[Any, Any]:
        """Return a dict in which to keep what this posterior fixes: an empty one as soon as it is another."""
        fixed = self._fixed
        if fixed[0] is not posterior:
            fixed = self._fixed = posterior, {}
        return fixed[1]

    def clear(self) -> None:
        """Drop everything."""
        self._idle.clear()
        self._lined, self._fixed = None, (None, {})

    def __deepcopy__(self, memo: dict[int, Any]) -> Ready:
        return Ready()

    def __reduce__(self) -> tuple[type[Ready], tuple[()]]:
        return Ready, ()
