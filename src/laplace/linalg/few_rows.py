"""Keep a sum of x x^T over few rows x as the rows, in a tensor that is multiplied out whenever it is read.

Few rows have fewer numbers than their product: the output factor of a bias over 32 examples of a layer with 3,072
outputs is 32 rows, or a matrix of 75 MB in float64. To everyone else `FewRows` is that matrix: it has its shape and
dtype, and what is computed from it is an ordinary tensor.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from laplace.linalg.symmetric import plain_gram


class FewRows(Tensor):
    """Is the matrix rows^T rows in `dtype`, (1, D, D), of which only the rows are kept. It is never written to.

    Args:
        rows: the rows, (M, D).
        dtype: the dtype of the product.
    """

    rows: Tensor  # (M, D)
    __torch_function__: Any = torch._C._disabled_torch_function_impl  # so that results are ordinary tensors

    @staticmethod
    def __new__(cls, rows: Tensor, dtype: torch.dtype) -> FewRows:
        d = rows.shape[1]
        self = Tensor._make_wrapper_subclass(cls, (1, d, d), dtype=dtype, device=rows.device)
        self.rows = rows
        return self

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Multiply out, and go on with the product."""
        if func._schema.is_mutable and isinstance(args[0], FewRows):
            raise TypeError(f"{func} would write to a sum that is kept as rows. Write to a clone() of it.")
        args, kwargs = tree_map_only(FewRows, FewRows.multiplied, (args, kwargs or {}))
        return func(*args, **kwargs)

    def multiplied(self) -> Tensor:  # (1, D, D)
        """Return the matrix. It costs M D^2 / 2 multiplications, and is not kept."""
        return plain_gram(self.rows.to(self.dtype)).unsqueeze(0)

    def finite(self) -> bool:
        """Return whether the trace of the matrix, which no entry exceeds, is a number in its dtype."""
        norm = torch.linalg.vector_norm(self.rows)
        norm = norm if norm.isfinite() else torch.linalg.vector_norm(self.rows, dtype=torch.float64)
        return float(norm) < torch.finfo(self.dtype).max ** 0.5

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        return self.rows.nbytes

    def data_ptr(self) -> int:
        return self.rows.data_ptr()

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return f"FewRows({len(self.rows)} rows of {self.shape[-1]}, {self.dtype})"

    def __deepcopy__(self, memo: dict[int, Any]) -> FewRows:
        return memo.setdefault(id(self), FewRows(self.rows.clone(), self.dtype))

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return FewRows, (self.rows, self.dtype)


def all_finite(value: Tensor) -> bool:
    """Return whether a sum has no infinite entry and no NaN."""
    if isinstance(value, FewRows):
        return value.finite()
    return bool(value.sum().isfinite()) or bool(value.isfinite().all())


def multiplied_out(matrix: Tensor) -> Tensor:  # (..., D, D)
    """Return a matrix as an ordinary tensor, for those who read it several times."""
    return matrix.multiplied() if isinstance(matrix, FewRows) else matrix


def same(one: Tensor, other: Tensor) -> bool:
    """Return whether two matrices are known to be equal. Rows are compared with rows, and nothing is multiplied out."""
    if one.shape != other.shape:
        return False
    if isinstance(one, FewRows) != isinstance(other, FewRows):
        return False
    pair = (one.rows, other.rows) if isinstance(one, FewRows) and isinstance(other, FewRows) else (one, other)
    return pair[0].data_ptr() == pair[1].data_ptr() or torch.equal(*pair)
