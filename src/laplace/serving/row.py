"""The prediction of a served module at one input, in NumPy: a few microseconds instead of some tens.

It is made of the module's own tensors, and made again when one of them was written to, replaced or moved.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from laplace.posterior.rows import RowPredictive
from laplace.posterior.spread import Spread
from laplace.serving.predictive import Predictive

_READ = ("right", "by_output", "bias_variance")  # of a spread

Watched = tuple[dict[str, Any], str, Tensor, int, int]  # where a tensor is found, itself, its version and address


class ServedRow:
    """Maps the features of one input to the parts of its prediction.

    Args:
        predictive: what the posterior fixes, folded.
        weight: of the last layer, (C, H).
        bias: of the last layer, (C,).
        temperature: the softmax temperature.
        wanted: the names of the parts.
        watched: the tensors that all this was made of.
    """

    def __init__(
        self,
        predictive: RowPredictive,
        weight: Tensor,
        bias: Tensor | None,
        temperature: float,
        wanted: tuple[str, ...],
        watched: list[Watched],
    ) -> None:
        self._predictive, self._wanted, self._watched = predictive, wanted, watched
        self._weight, self._bias, self._temperature, self._dtype = weight, bias, temperature, weight.dtype

    @classmethod
    def of(cls, predictive: Predictive, layer: Any) -> ServedRow | None:
        """Make it of a module's buffers and its last layer; None if their dtypes or devices do not go together."""
        own = layer._parameters
        spreads = [m for name in ("outputs", "contrasts") if isinstance(m := predictive._modules.get(name), Spread)]
        places = [(own, "weight"), (own, "bias")]
        places += [(spread._buffers, name) for spread in spreads for name in _READ]
        tensors = [(place, name, t) for place, name in places if (t := place.get(name)) is not None]
        dtype = own["weight"].dtype
        if any(t.dtype != dtype or t.device.type != "cpu" or t.is_inference() for *_, t in tensors):
            return None
        watched = [(place, name, t, t._version, t.data_ptr()) for place, name, t in tensors]
        with torch.no_grad():
            row = predictive.row()
            if row is None:
                return None
        weight, bias = own["weight"].detach(), own["bias"]
        bias = None if bias is None else bias.detach()
        return cls(row, weight, bias, predictive.temperature, predictive.wanted, watched)

    def is_current(self) -> bool:
        """Return whether all tensors are those of which it was made, with the same numbers."""
        for place, name, t, version, address in self._watched:
            if place[name] is not t or t._version != version or t.data_ptr() != address:
                return False
        return True

    def __call__(self, phi: Tensor) -> dict[str, Tensor] | None:  # (1, H)
        """Return the wanted parts, (1, C) each. None if they are not finite, or the features have another dtype."""
        if phi.dtype is not self._dtype:
            return None
        f = linear(phi, self._weight, self._bias).numpy()[0].tolist()
        if self._temperature != 1:
            f = [m / self._temperature for m in f]
        found = self._predictive(f, self._predictive.turned(phi))
        if found is None:
            return None
        mean, variance = found
        parts = {"mean": torch.from_numpy(mean[None])}
        if len(variance):
            parts["variance"] = torch.from_numpy(variance[None])
        if len(self._wanted) < 2 or self._wanted[0] == "mean":
            return parts
        return {name: parts[name] for name in self._wanted}
