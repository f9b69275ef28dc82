"""Provide a number that can be read as a scalar and as a vector of one element."""

from __future__ import annotations

from typing import Any, SupportsIndex

import torch
from torch import Tensor


class OneNumber(Tensor):
    """Is a tensor of shape () that can be indexed with 0, too. What is computed from it is a plain tensor.

    So `float(la.prior_precision)`, `la.prior_precision.item()` and `la.prior_precision[0]` are the same number.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # pyright: ignore[reportAssignmentType]

    @classmethod
    def of(cls, value: Tensor) -> Tensor:
        """Return a tensor of shape () as one that can be indexed; any other as it is."""
        return value.as_subclass(cls) if value.dim() == 0 else value

    @property
    def plain(self) -> Tensor:
        """Return the same number, with its graph, as a plain tensor."""
        return self.as_subclass(Tensor)

    def __getitem__(self, index: Any) -> Tensor:
        return self.plain if isinstance(index, int) and index in (0, -1) else self.plain[index]

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return repr(self.plain)

    def __format__(self, spec: str) -> str:
        return format(self.plain, spec)

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        """Write a plain tensor into files, which then can be read with weights_only=True."""
        return self.plain.__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return OneNumber.of(self.plain.__deepcopy__(memo))
