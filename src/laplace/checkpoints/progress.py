"""A fit that can be interrupted: its partial sums in a file, written every few batches.

What was read is not in the file, but its digest is: the same call reads it again without running the network, and
goes on behind it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from laplace.batches import Batch, Inputs, device_of
from laplace.checkpoints import container, digests, files
from laplace.checkpoints.digests import Digest
from laplace.checkpoints.state import options_of
from laplace.checks import shown, whole_number
from laplace.errors import CheckpointError, UnsupportedError
from laplace.nested import map_tensors
from laplace.weights import LastLayer, Selection

if TYPE_CHECKING:
    from laplace.laplace import Laplace

KIND = "fit in progress"


class Progress:
    """Where a run over the data is, and the file that knows it."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        every: int,
        settings: Mapping[str, Any],
        network: Mapping[str, Any],
        device: torch.device,
    ) -> None:
        self.path, self.every, self.settings, self.network = Path(path), every, settings, network
        self.device = device
        self._skip, self._expected = 0, ""  # batches that are in the sums, and their digest
        self.restart()

    def restart(self) -> None:
        """Before a run over the data: nothing is in the sums."""
        self._skip = self._since = 0
        self._digest = Digest()

    def resumed(self) -> dict[str, Any] | None:
        """What the fit goes on from, where there is a file; refused where it is of another fit."""
        if not self.path.exists():
            return None
        contents = container.read(self.path, KIND)
        then = contents["settings"]
        pairs = ((key, then.get(key), now) for key, now in self.settings.items())
        said = [f"{key} ({shown(old)} there, {shown(new)} here)" for key, old, new in pairs if old != new]
        if differ := digests.listed(said) or digests.differing(contents["network"], self.network):
            raise CheckpointError(
                f"checkpoint={str(self.path)!r} is of another fit: {differ}. Give another path, or remove the file to "
                "start anew."
            )
        self._skip, self._expected = contents["batches"], contents["digest"]
        return map_tensors(contents["sums"], lambda t: t.clone().to(self.device))

    def unread(self, batches: Iterable[Batch], run: Callable[[Inputs], Any]) -> Iterator[Batch]:
        """The batches that are not in the sums; of the others only the first is run, as the first of a fit is."""
        skipped = 0
        for batch in batches:
            if batch.index < self._skip:
                if not skipped:
                    run(batch.inputs)
                self._digest.add(*batch.tensors())
                skipped += 1
                continue
            self._check()
            yield batch
        self._check()

    def counted(self, batches: Sequence[Batch], sums: Callable[[], dict[str, Any]]) -> None:
        """Note that these are in the sums now, and write those if it is time."""
        for batch in batches:
            self._digest.add(*batch.tensors())
        self._since += len(batches)
        if self._since >= self.every:
            self._since = 0
            where = {"batches": batches[-1].index + 1, "digest": self._digest.hex()}
            contents = {"settings": self.settings, "network": self.network, **where, "sums": sums()}
            container.write(self.path, KIND, contents)

    def remove(self) -> None:
        """At the end of the fit."""
        files.remove(self.path)

    def _check(self) -> None:
        """Refuse other data than was read before; once, behind it."""
        if self._skip and self._digest.hex() != self._expected:
            raise CheckpointError(
                f"checkpoint={str(self.path)!r} is of other data: its first {self._skip} batches are not those of this "
                "loader. Give the same batches in the same order (shuffle=False, or a seeded generator of the "
                "loader's), or remove the file to start anew."
            )
        self._skip = 0


def progress_of(
    la: Laplace,
    weights: LastLayer | Selection,
    curvature: str,
    generator: torch.Generator | None,
    path: str | os.PathLike[str],
    every: int,
) -> Progress:
    """The progress of a fit, with all that must be the same for it to go on."""
    every = whole_number(every, "every")
    if la.structure.functional:
        raise UnsupportedError(
            "checkpoint=: hessian_structure='gp' draws points of the data, and files hold no data. Fit it without, or "
            "take hessian_structure='kron', 'diag' or 'full'."
        )
    layout = weights.layout
    settings = options_of(la) | {
        "curvature": curvature,
        "curvature_samples": la.curvature_samples,
        "last_layer": weights.module,
        "weights": [[name, *shape] for name, shape in zip(layout.names, layout.shapes, strict=True)],
        "indices": None if la.subnetwork_indices is None else Digest().add(la.subnetwork_indices).hex(),
        "generator": None if generator is None else Digest().add(generator.get_state()).hex(),
    }
    return Progress(path, every, settings, digests.of_network(la.model), device_of(la.model))
