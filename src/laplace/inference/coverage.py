"""Report, in `la.coverage()`, the rule for each parameter, the kept form of its curvature, and its bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from laplace.backprop.plan import Plan
from laplace.budget import in_bytes
from laplace.checks import flag
from laplace.posterior.posterior import Fit

_HEAD: Final[tuple[str, ...]] = ("parameter", "shape", "weights", "rule", "kept", "bytes")
_RIGHT: Final = {2, 5}  # columns of numbers
_SHOWN, _ENDS = 30, 10  # up to 30 tensors are all shown; of more, 10 from each end
_RULES = 6  # the most rules to list with their counts
_PART = 4  # parts of names are cut to no fewer characters


@dataclass(frozen=True)
class Row:
    """Describes one parameter tensor.

    Attributes:
        name: the name of the parameter.
        shape: the shape of the parameter.
        weights: the number of its uncertain weights.
        rule: the rule for its gradients.
        kept: the kept form of its curvature.
        bytes: the memory that this takes.
        own: True if it has the structure's own form, False if it has a fallback form.
    """

    name: str
    shape: tuple[int, ...]
    weights: int
    rule: str
    kept: str
    bytes: int
    own: bool = True


@dataclass(frozen=True)
class Coverage:
    """Lists all uncertain parameter tensors, and prints as a table. Of many tensors it shows the first and the last.

    Attributes:
        rows: one `Row` per tensor.
    """

    rows: tuple[Row, ...]

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def bytes(self) -> int:
        """Return the bytes of all sums together."""
        return sum(row.bytes for row in self.rows)

    def other_forms(self, structure: str) -> str:
        """Describe which tensors have a fallback form. Returns '' if none has."""
        others = [row for row in self.rows if not row.own]
        named = ", ".join(f"{row.name} ({row.kept})" for row in others[:3])
        more = f" and {len(others) - 3} more" if len(others) > 3 else ""
        if not others:
            return ""
        return (
            f"{structure} keeps {len(others)} of {len(self)} tensors in another form, because their gradients are not "
            f"outer products: {named}{more}. See la.coverage()."
        )

    def table(self, all: bool = False, width: int = 80) -> str:
        """Return the table as text.

        Args:
            all: whether to show every tensor with its whole name. Otherwise, of more than 30 tensors the first and last
                ten are shown, and the number of tensors per rule.
            width: the most columns, unless `all`. To fit, bytes are rounded and long parts of names are cut.
        """
        if flag(all, "all") or len(self.rows) <= _SHOWN:
            return "\n".join(_lines(self, self.rows, None if all else width))
        left, counts = len(self.rows) - 2 * _ENDS, Counter(row.rule for row in self.rows)
        lines = _lines(self, (*self.rows[:_ENDS], *self.rows[-_ENDS:]), width)
        lines.insert(2 + _ENDS, f"... {left:,} more: la.coverage().rows, or print(la.coverage().table(all=True))")
        rules = "; ".join(f"{rule} {count:,}" for rule, count in counts.most_common(_RULES))
        return "\n".join([*lines, f"{len(self):,} tensors by rule: {rules}{'; ...' if len(counts) > _RULES else ''}"])

    def __repr__(self) -> str:
        return self.table()


def _lines(coverage: Coverage, rows: Sequence[Row], width: int | None) -> list[str]:
    """Return the lines of a table with these rows, and the total of all rows."""
    names, size = [row.name for row in rows], _exact
    table = _laid_out(coverage, rows, names, size)
    if width is not None and len(table[1]) > width:
        table = _laid_out(coverage, rows, names, in_bytes)
    if width is not None and (over := len(table[1]) - width) > 0:
        names = _shortened(names, max(map(len, names)) - over)
        table = _laid_out(coverage, rows, names, in_bytes)
    return table


def _laid_out(coverage: Coverage, rows: Sequence[Row], names: Sequence[str], size: Callable[[float], str]) -> list[str]:
    cells: list[tuple[str, ...]] = [_HEAD]
    for row, name in zip(rows, names, strict=True):
        shape = "x".join(map(str, row.shape))
        cells.append((name, shape, f"{row.weights:,}", row.rule, row.kept, size(row.bytes)))
    weights = sum(row.weights for row in coverage)
    cells.append(("total", "", f"{weights:,}", "", "", size(coverage.bytes)))
    widths = [max(len(line[i]) for line in cells) for i in range(len(_HEAD))]
    rule = "-" * (sum(widths) + 2 * (len(widths) - 1))
    head, *body, total = (_line(line, widths) for line in cells)
    return [head, rule, *body, rule, total]


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    pairs = enumerate(zip(cells, widths, strict=True))
    return "  ".join(cell.rjust(w) if i in _RIGHT else cell.ljust(w) for i, (cell, w) in pairs).rstrip()


def _exact(n: float) -> str:
    return f"{n:,.0f}"


def _shortened(names: Sequence[str], width: int) -> list[str]:
    """Cut long parts of dotted names, all to one length, until they fit: 'encod~.0.self_~.weight'."""
    parts, short = [name.split(".") for name in names], list(names)
    for most in range(max(len(part) for name in parts for part in name), _PART - 1, -1):
        short = [".".join(p if len(p) <= most else f"{p[: most - 1]}~" for p in name) for name in parts]
        if max(map(len, short)) <= width:
            break
    return short


def coverage_of(fit: Fit, plan: Plan | None) -> Coverage:
    """Return the coverage of a fit. Its plan is None for a last layer, and before the network has run."""
    layout, rows = fit.layout, []
    kept = fit.structure.describe(fit.sums, layout) if fit.owners is None else fit.owners.kept
    for name, shape, size, of in zip(layout.names, layout.tensor_shapes, layout.sizes, kept, strict=True):
        rule = "last layer" if fit.linear else "not run yet" if plan is None else plan.rule_of(name)
        rows.append(Row(name, shape, size, rule, of.form, of.bytes, of.own))
    return Coverage(tuple(rows))
