"""Keep a symmetric matrix in fewer numbers than it has, in a tensor that is written out whenever it is read.

To everyone else a `Folded` tensor is the matrix: it has its shape and dtype, and what is computed from it is an
ordinary tensor. Sums over few rows are kept as the rows (`few_rows.py`), other wide sums as a triangle (`triangle.py`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only


class Folded(Tensor):
    """Is a symmetric matrix of one group, (1, D, D), of which `kept` is kept. It is never written to.

    Args:
        kept: the numbers that are kept.
        d: the number of columns of the matrix.
        dtype: the dtype of the matrix.
    """

    kept: Tensor
    __torch_function__: Any = torch._C._disabled_torch_function_impl  # so that results are ordinary tensors

    @staticmethod
    def __new__(cls, kept: Tensor, d: int, dtype: torch.dtype) -> Any:
        self = Tensor._make_wrapper_subclass(cls, (1, d, d), dtype=dtype, device=kept.device)
        self.kept = kept
        return self

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Write the matrix out, and go on with it."""
        if func._schema.is_mutable and isinstance(args[0], Folded):
            raise TypeError(f"{func} would write to a sum that is kept in fewer numbers. Write to a clone() of it.")
        args, kwargs = tree_map_only(Folded, written_out, (args, kwargs or {}))
        return func(*args, **kwargs)

    def written_out(self) -> Tensor:  # (1, D, D)
        """Return the matrix. It is not kept."""
        raise NotImplementedError

    def finite(self) -> bool:
        """Return whether no entry of the matrix is NaN or infinite."""
        raise NotImplementedError

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        return self.kept.nbytes

    def data_ptr(self) -> int:
        return self.kept.data_ptr()

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return f"{type(self).__name__}({self.shape[-1]} columns, {self.dtype}, {self.nbytes:,} bytes)"

    def __deepcopy__(self, memo: dict[int, Any]) -> Folded:
        return memo.setdefault(id(self), type(self)(self.kept.clone(), self.shape[-1], self.dtype))

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return type(self), (self.kept, self.shape[-1], self.dtype)


def all_finite(value: Tensor) -> bool:
    """Return whether a sum has no infinite entry and no NaN."""
    if isinstance(value, Folded):
        return value.finite()
    return bool(value.sum().isfinite()) or bool(value.isfinite().all())


def written_out(matrix: Tensor) -> Tensor:  # (..., D, D)
    """Return a matrix as an ordinary tensor, for those who read it several times."""
    return matrix.written_out() if isinstance(matrix, Folded) else matrix


def same(one: Tensor, other: Tensor) -> bool:
    """Return whether two matrices are known to be equal. What is kept is compared, and nothing is written out."""
    if one.shape != other.shape or _kind(one) is not _kind(other):
        return False
    one, other = (each.kept if isinstance(each, Folded) else each for each in (one, other))
    return one.data_ptr() == other.data_ptr() or torch.equal(one, other)


def _kind(matrix: Tensor) -> type[Tensor]:
    return type(matrix) if isinstance(matrix, Folded) else Tensor
