"""Tell whether a source still predicts as it did: a calibration belongs to one posterior."""

from __future__ import annotations

from typing import Any

from laplace.inference.source import Source
from laplace.network.digests import Digest


class Fingerprint:
    """A digest of what predictions depend on; computed again only when the source's values were replaced."""

    def __init__(self, value: str | None = None) -> None:
        self.value = value
        self._seen: Any = None  # the values of the last comparison

    def take(self, source: Source) -> None:
        """Remember this source."""
        self.value, self._seen = digest_of(source), getattr(source, "values", None)

    def fits(self, source: Source) -> bool:
        """Whether the source is as remembered."""
        values = getattr(source, "values", None)
        if values is not None and values is self._seen:
            return True
        if digest_of(source) != self.value:
            return False
        self._seen = values
        return True


def digest_of(source: Source) -> str:
    """Return a digest of the hyperparameters and, for a posterior over weights, of its mean."""
    digest = Digest().add(source.likelihood.described, str(source.n_outputs), f"{source.softmax_temperature:.9g}")
    digest.add(f"{float(source.noise_level):.9g}")
    values = getattr(source, "values", None)
    if values is not None and values.fit is not None:
        digest.add(f"{values.temperature:.9g}", str(int(values.fit.n_data)), values.fit.mean)
        digest.add(*values.prior.tensors)
    return digest.hex()
