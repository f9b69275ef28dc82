"""Check whether a source still predicts as it did, because a calibration is valid for one posterior only."""

from __future__ import annotations

from typing import Any

from laplace.inference.source import Source
from laplace.network.digests import Digest


class Fingerprint:
    """Keeps a digest of what predictions depend on. Computed again only after the source's values were replaced."""

    def __init__(self, value: str | None = None) -> None:
        self.value = value
        self._seen: Any = None  # the values of the last comparison

    def take(self, source: Source) -> None:
        """Remember this source."""
        self.value, self._seen = digest_of(source), _state(source)

    def fits(self, source: Source) -> bool:
        """Return whether the source is as remembered."""
        state = _state(source)
        if state is not None and self._seen is not None and state[0] is self._seen[0] and state[1] == self._seen[1]:
            return True
        if digest_of(source) != self.value:
            return False
        self._seen = state
        return True


def _state(source: Source) -> tuple[Any, tuple[int, ...]] | None:
    """Return the values of a posterior with the versions of tensors that may change in place; None without values."""
    values = getattr(source, "values", None)
    return None if values is None else (values, tuple(t._version for t in (*values.prior.tensors, values.sigma)))


def digest_of(source: Source) -> str:
    """Return a digest of the hyperparameters and, for a posterior over weights, of its mean."""
    digest = Digest().add(source.likelihood.described, str(source.n_outputs), f"{source.softmax_temperature:.9g}")
    digest.add(f"{float(source.noise_level):.9g}")
    values = getattr(source, "values", None)
    if values is not None and values.fit is not None:
        digest.add(f"{values.temperature:.9g}", str(int(values.fit.n_data)), values.fit.mean)
        digest.add(*values.prior.tensors)
    return digest.hex()
