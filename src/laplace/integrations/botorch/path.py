"""Functions drawn from a model, as deterministic models of BoTorch."""

from __future__ import annotations

from typing import Protocol

from botorch.models.deterministic import DeterministicModel
from torch import Size, Tensor

from laplace.decisions.functions import DrawnFunctions


class Evaluates(Protocol):
    """Says what a path needs of the model that it was drawn from."""

    @property
    def num_outputs(self) -> int: ...

    def evaluate(self, drawn: DrawnFunctions, error: Tensor | None, X: Tensor) -> Tensor: ...

    def subset_output(self, idcs: list[int]) -> Evaluates: ...


class LaplacePath(DeterministicModel):
    """Is one function drawn from a `LaplaceModel`, as a deterministic model. Made by `LaplaceModel.path`.

    Args:
        model: The model that it was drawn from.
        drawn: The function of the network's own inputs.
        error: Drawn noise of the observations that the model was conditioned on, (n, m).
    """

    def __init__(self, model: Evaluates, drawn: DrawnFunctions, error: Tensor | None = None) -> None:
        super().__init__()
        self._model, self._drawn, self._error = (model,), drawn, error  # a tuple: the model is no part of this one
        self._num_outputs = model.num_outputs

    @property
    def batch_shape(self) -> Size:
        """Return the empty batch shape."""
        return Size()

    def forward(self, X: Tensor) -> Tensor:
        """Return the outcomes of the drawn function, (*batch, q, m).

        Args:
            X: (*batch, q, d).
        """
        (model,) = self._model
        return model.evaluate(self._drawn, self._error, X)

    def subset_output(self, idcs: list[int]) -> LaplacePath:
        """Return the same function with some of its outcomes.

        Args:
            idcs: Their indices.
        """
        (model,) = self._model
        return LaplacePath(model.subset_output(idcs), self._drawn, self._error)
