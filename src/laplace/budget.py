"""How much memory may be taken at a time: work is cut into chunks of that size, and results do not depend on it."""

from __future__ import annotations

from dataclasses import dataclass

from laplace.errors import OptionError

DEFAULT = 2**29  # bytes


@dataclass(frozen=True)
class Budget:
    """Bytes that intermediate results may take, approximately."""

    bytes: int = DEFAULT

    def __post_init__(self) -> None:
        if isinstance(self.bytes, bool) or not isinstance(self.bytes, int) or self.bytes < 1:
            raise OptionError(f"memory_budget={self.bytes!r} must be a whole number of bytes, as in 2**30.")

    def count(self, bytes_each: int, share: float = 1.0) -> int:
        """How many things of that size fit into a share of the budget; at least one."""
        return max(1, int(share * self.bytes) // max(1, bytes_each))
