"""Size and digest of a data set, and which examples two data sets have in common."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from laplace.network.inputs import Inputs

_ROW = 8  # bytes of an example's digest


class Identity:
    """Adds up batches: how many examples there are, and a digest that does not depend on the batch size.

    Attributes:
        n: How many examples.
        rows: A short digest of the inputs of each example; empty if batches cannot be taken apart.
    """

    def __init__(self) -> None:
        self.n, self.rows = 0, set[bytes]()
        self._inputs, self._labels = hashlib.sha256(), hashlib.sha256()
        self._labelled = False

    def add(self, inputs: Inputs, y: Tensor | None, n: int) -> None:
        """Add a batch of n examples."""
        self.n += n
        tensors = inputs.tensors()
        apart = inputs.size == n
        own = [t for t, each in zip(tensors, inputs.own(n), strict=True) if each] if apart else tensors
        if apart and own:
            flat = [_bytes(t) for t in own]
            for i in range(n):
                row = b"".join(part[i] for part in flat)
                self._inputs.update(row)
                self.rows.add(hashlib.blake2b(row, digest_size=_ROW).digest())
        else:
            for t in own:
                self._inputs.update(b"".join(_bytes(t)))
        if y is not None:
            self._labelled = True
            self._labels.update(b"".join(_bytes(y)))

    def in_common(self, other: Identity) -> int:
        """Return how many different examples are in both."""
        return len(self.rows & other.rows)

    def described(self) -> dict[str, int | str]:
        """Return the number of examples, and the beginning of the digests."""
        found: dict[str, int | str] = {"examples": self.n, "inputs": self._inputs.hexdigest()[:16]}
        return found | ({"labels": self._labels.hexdigest()[:16]} if self._labelled else {})


def _bytes(t: Tensor) -> list[bytes]:
    """Return the bytes of each row."""
    dense = (t.detach() if t.layout is torch.strided else t.detach().to_dense()).cpu()
    dense = dense.float() if dense.dtype is torch.bfloat16 else dense
    rows = dense.reshape(len(dense), -1).contiguous().numpy() if dense.dim() else dense.reshape(1, 1).numpy()
    return [row.tobytes() for row in rows]
