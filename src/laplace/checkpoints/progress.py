"""Make a fit resumable: write its partial sums to a file every few batches.

The file does not hold the data that was read, only its digest. The same call reads that data again without running the
network, and continues after it.
"""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from laplace.checkpoints import container, files
from laplace.checks import how_many, path_of, shown, whole_number
from laplace.curvature import Estimator
from laplace.distributed import Reduce, alone
from laplace.errors import CheckpointError, InputError, LaplaceError, OptionError, UnsupportedError
from laplace.inference.runner import Runner
from laplace.network import digests
from laplace.network.batches import Batch, device_of
from laplace.network.digests import Digest
from laplace.network.inputs import Inputs
from laplace.network.pytree import map_tensors
from laplace.posterior import schema
from laplace.weights import FoundLastLayer, Selection, Subnetwork

KIND = "fit in progress"
_SUMS = {"grams": Mapping, "rows": Mapping, "others": Mapping, "generators": Mapping, "like": Tensor,
         "_before": Mapping, "data": Mapping, "_n_before": int, "n_data": int, "n_outputs": int, "flat": bool,
         "_readings": int, "_runs": int, "_seed": int, "_compared": bool, "_together": bool, "_counting": bool,
         "_forms": (list, tuple)}  # fmt: skip


class Progress:
    """Tracks how far a run over the data has come, and stores it in a file."""

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
        self._skip, self._expected = 0, ""  # how many batches are in the sums already, and their digest
        self.restart()

    def restart(self) -> None:
        """Begin a run over the data: nothing is in the sums."""
        self._skip = self._since = 0
        self._digest = Digest()

    def resumed(self) -> dict[str, Any] | None:
        """Return the state to continue from, if there is a file. Refuse a file of another fit."""
        if not self.path.exists():
            return None
        contents = container.read(self.path, KIND)
        with self.trusting():
            return self._resumed_from(contents)

    @contextmanager
    def trusting(self) -> Iterator[None]:
        """Turn errors into a CheckpointError while values from the file are used."""
        try:
            yield
        except (InputError, OptionError) as error:
            if isinstance(error, CheckpointError):
                raise
            raise CheckpointError(
                f"checkpoint={str(self.path)!r} is damaged: {error} Remove it to start anew."
            ) from error
        except LaplaceError:
            raise
        except Exception as error:  # a file that was made by hand
            raise CheckpointError(
                f"checkpoint={str(self.path)!r} is damaged: its contents do not fit together ({error!r}). Remove it to "
                "start anew."
            ) from error

    def _resumed_from(self, contents: Any) -> dict[str, Any]:
        kinds = {"settings": Mapping, "network": Mapping, "batches": int, "digest": str, "sums": Mapping}
        schema.require_keys(contents, kinds, "the file")
        then = contents["settings"]
        pairs = ((key, then.get(key), now) for key, now in self.settings.items())
        said = [f"{key} ({shown(old)} there, {shown(new)} here)" for key, old, new in pairs if old != new]
        if differ := digests.listed(said) or digests.differing(contents["network"], self.network):
            raise CheckpointError(
                f"checkpoint={str(self.path)!r} belongs to another fit: {differ}. Give another path, or remove the "
                "file to start anew."
            )
        schema.require_keys(contents["sums"], _SUMS, "its sums")
        self._skip, self._expected = contents["batches"], contents["digest"]
        return map_tensors(contents["sums"], lambda t: t.clone().to(self.device))

    def unread(self, batches: Iterable[Batch], run: Callable[[Inputs], Any]) -> Iterator[Batch]:
        """Yield the batches that are not in the sums.

        Of the batches that are in the sums, only the first is run: a fit learns about the network from it.
        """
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
        """Record that these batches are in the sums now, and write the file if it is time."""
        for batch in batches:
            self._digest.add(*batch.tensors())
        self._since += len(batches)
        if self._since >= self.every:
            self._since = 0
            where = {"batches": batches[-1].index + 1, "digest": self._digest.hex()}
            contents = {"settings": self.settings, "network": self.network, **where, "sums": sums()}
            container.write(self.path, KIND, contents)

    def remove(self) -> None:
        """Remove the file at the end of the fit."""
        files.remove(self.path)

    def _check(self) -> None:
        """Refuse data that differs from what was read before. Checked once, after that data."""
        if self._skip and self._digest.hex() != self._expected:
            raise CheckpointError(
                f"checkpoint={str(self.path)!r} belongs to other data: its first {self._skip} batches are not those of "
                "this loader. Give the same batches in the same order (shuffle=False, or a DataLoader with a seeded "
                "generator), or remove the file to start anew."
            )
        self._skip = 0


def _of_rank(path: Path, reduce: Reduce) -> Path:
    """Return the file of this process. Refuse those that another number of processes has left."""
    ending = re.compile(rf"{re.escape(path.name)}\.rank\d+of(\d+)")
    names = [other.name for other in path.parent.glob(f"{glob.escape(path.name)}.rank*")]
    left = {int(found[1]) for name in names if (found := ending.fullmatch(name))} | ({1} if path.is_file() else set())
    if others := left - {reduce.size}:
        raise CheckpointError(
            f"checkpoint={str(path)!r} was left by {how_many(min(others), 'rank')}; {_are(reduce.size)} read other "
            "parts of the data. Start as many as before, with the same group=, or remove the files to start anew."
        )
    return path if reduce.size == 1 else path.with_name(f"{path.name}.rank{reduce.rank}of{reduce.size}")


def _are(ranks: int) -> str:
    return "this one would" if ranks == 1 else f"these {ranks} would"


def progress_of(
    runner: Runner,
    weights: FoundLastLayer | Selection,
    curvature: Estimator,
    generator: torch.Generator | None,
    path: str | os.PathLike[str],
    every: int,
    reduce: Reduce = alone,
) -> Progress:
    """Return the progress of a fit, with everything that must be equal for it to continue.

    Each rank of a group has a file of its own, with its rank in the name.
    """
    path, every = _of_rank(path_of(path, "checkpoint"), reduce), whole_number(every, "every")
    spec = runner.spec
    if spec.structure.functional:
        raise UnsupportedError(
            "checkpoint=: hessian_structure='gp' keeps points of the data, and files hold no data. Leave it out, or "
            "take hessian_structure='kron', 'diag' or 'full'."
        )
    layout = weights.layout
    indices = spec.weights.indices if isinstance(spec.weights, Subnetwork) else None
    settings = spec.described(curvature.name) | {
        "curvature_samples": curvature.vectors,
        "last_layer": weights.module,
        "weights": [[name, *shape] for name, shape in zip(layout.names, layout.shapes, strict=True)],
        "indices": None if indices is None else Digest().add(indices).hex(),
        "generator": None if generator is None else Digest().add(generator.get_state()).hex(),
    }
    return Progress(path, every, settings, digests.of_network(runner.model), device_of(runner.model))
