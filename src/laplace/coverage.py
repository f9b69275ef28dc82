"""`la.coverage()`: which rule explains each parameter, what is kept of its curvature, and how many bytes that takes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from laplace.backprop.plan import Plan
from laplace.posterior import Fit


@dataclass(frozen=True)
class Row:
    """One parameter tensor.

    Attributes:
        name: of the parameter.
        shape: of the parameter.
        weights: how many of its weights are uncertain.
        rule: what explains its gradients.
        kept: what is kept of its curvature.
        bytes: what that takes.
    """

    name: str
    shape: tuple[int, ...]
    weights: int
    rule: str
    kept: str
    bytes: int


@dataclass(frozen=True)
class Coverage:
    """All uncertain parameter tensors; prints as a table.

    Attributes:
        rows: a `Row` for each.
    """

    rows: tuple[Row, ...]

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def bytes(self) -> int:
        """Of all sums together."""
        return sum(row.bytes for row in self.rows)

    def __repr__(self) -> str:
        head = ("parameter", "shape", "weights", "rule", "kept", "bytes")
        body = [
            (row.name, "x".join(map(str, row.shape)), f"{row.weights:,}", row.rule, row.kept, f"{row.bytes:,}")
            for row in self.rows
        ]
        total = ("total", "", f"{sum(row.weights for row in self.rows):,}", "", "", f"{self.bytes:,}")
        widths = [max(len(line[i]) for line in (head, *body, total)) for i in range(len(head))]
        right = {2, 5}

        def line(cells: tuple[str, ...]) -> str:
            placed = [
                c.rjust(w) if i in right else c.ljust(w) for i, (c, w) in enumerate(zip(cells, widths, strict=True))
            ]
            return "  ".join(placed).rstrip()

        rule = "-" * (sum(widths) + 2 * (len(widths) - 1))
        return "\n".join([line(head), rule, *map(line, body), rule, line(total)])


def coverage_of(fit: Fit, plan: Plan | None) -> Coverage:
    """Read off a fit and its plan (None for a last layer, and before the network has run)."""
    rows = []
    for name, shape, size in zip(fit.layout.names, fit.layout.tensor_shapes, fit.layout.sizes, strict=True):
        own = {key.rpartition("/")[2]: value for key, value in fit.sums.items() if key.rpartition("/")[0] == name}
        whole = fit.sums.get("H", fit.sums.get("vectors"))  # of all tensors together
        if whole is not None:
            kept = "full" if "H" in fit.sums else f"lowrank {len(whole)}"
            size_in_bytes = round(size / fit.layout.n_params * whole.nbytes)
        else:
            kept, size_in_bytes = _kept(own), sum(value.nbytes for value in own.values())
        rule = "last layer" if fit.linear else "not run yet" if plan is None else plan.rule_of(name)
        rows.append(Row(name, shape, size, rule, kept, size_in_bytes))
    return Coverage(tuple(rows))


def not_kron(coverage: Coverage, structure: str) -> str:
    """In words, which tensors a Kronecker structure keeps in another form; nothing where there is none."""
    others = [row for row in coverage if row.kept.startswith(("dense", "diag"))]
    named = ", ".join(f"{row.name} ({row.kept})" for row in others[:3])
    more = f" and {len(others) - 3} more" if len(others) > 3 else ""
    if not others:
        return ""
    return (
        f"{structure} keeps {len(others)} of {len(coverage)} tensors in another form, since their gradients are no "
        f"outer products: {named}{more}. See la.coverage()."
    )


def _kept(sums: dict) -> str:
    if "diag" in sums:
        return "diag"
    if "H" in sums:
        return f"dense {sums['H'].shape[-1]}"
    if "values" in sums:
        return f"inf, rank {len(sums['values'])}"
    if "K" in sums:
        groups, rows, _ = sums["K"].shape
        return f"kernel {rows} x {rows}" if groups == 1 else f"{groups} kernels {rows} x {rows}"
    if "U" in sums:
        return f"{len(sums['U'])} directions"
    name = "ekfac" if "E" in sums else "kron diagonal" if "b" in sums else "kron"
    sides = sums["E"].shape if name == "ekfac" else _sides(sums)
    factors = f"{name} {sides[1]} x {sides[2]}"
    return factors if sides[0] == 1 else f"{sides[0]} groups of {factors}"


def _sides(sums: dict) -> tuple[int, int, int]:
    """Groups, rows and columns of a tensor from its Kronecker factors."""
    b, a = sums["b" if "b" in sums else "B"], sums["A_left" if "A_left" in sums else "A"]
    o, i = b.shape[-1], a.shape[-1]
    return (b.shape[0], i, o) if "A_left" in sums else (b.shape[0], o, i)
