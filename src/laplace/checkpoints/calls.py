"""The calls that keep a posterior: `la.state_dict()`, `la.save(path)` and back."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from torch import nn

from laplace.checkpoints import posteriors
from laplace.checkpoints import state as states
from laplace.likelihoods import Likelihood

if TYPE_CHECKING:
    from typing_extensions import Self


class Storable:
    """The side of `Laplace` that is kept."""

    def state_dict(self, with_data: bool = False) -> dict[str, Any]:
        """Everything of a fitted posterior as tensors, numbers and strings: no code, and no training data.

        Args:
            with_data: needed for a 'gp', which is made of some points of the data.

        Raises:
            NotFittedError: before `fit`.
            UnsupportedError: a 'gp' without `with_data`.
        """
        return states.state_dict(self, with_data)  # type: ignore[arg-type]

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` gave, on the same network with the same options.

        Args:
            state: what it gave, straight or through `torch.save` and `torch.load(path, weights_only=True)`.

        Raises:
            InputError: a state of other options, or of other parameters.
        """
        states.load_state_dict(self, state)  # type: ignore[arg-type]

    def save(self, path: str | os.PathLike[str], with_data: bool = False) -> None:
        """Write a fitted posterior to a file of safetensors: no code, and no training data.

        Args:
            path: the file; one of that name is replaced once the new one is whole.
            with_data: of a 'gp', which is made of some points of the data, write their inputs as well; without, the
                file has their numbers and a digest, and `load` needs the data.

        Raises:
            NotFittedError: before `fit`.
            UnsupportedError: a network whose weights have changed since.
        """
        posteriors.save(self, path, with_data)  # type: ignore[arg-type]

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        model: nn.Module,
        *,
        likelihood: Likelihood | str | None = None,
        names: Mapping[str, str] | None = None,
        data: Iterable[Any] | None = None,
    ) -> Self:
        """The posterior that `save` wrote, on the same network with the same weights; all options are in the file.

        Args:
            path: the file.
            model: the network, with the weights at which the posterior was fitted.
            likelihood: one of your own, if it was fitted with one.
            names: {old: new} where parameters or modules have other names now.
            data: for a 'gp' that was saved without its data: the batches, in the order in which it was fitted.

        Raises:
            CheckpointError: a file that is damaged or foreign, or a network or data that differ; it says in what.
        """
        return posteriors.load(cls, path, model, likelihood, names, data)  # type: ignore[arg-type]

    def __getstate__(self) -> dict[str, Any]:
        snapshot = self.__dict__["_snapshot"]  # addresses mean nothing in a copy
        return self.__dict__ | {"_snapshot": None if snapshot is None else snapshot.elsewhere()}
