"""Read data files: .npz and .safetensors with arrays x and y, .csv with one row per example. None can run code."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from laplace.errors import InputError


@dataclass(frozen=True)
class Table:
    """Holds inputs and labels from a file.

    Attributes:
        name: The file's name, for messages.
        x: The inputs, (N, ...).
        y: The labels: a tensor, the words of a column, or None.
        columns: The names of the inputs' columns, if the file has them.
    """

    name: str
    x: Tensor
    y: Tensor | list[str] | None
    columns: list[str] | None = None

    def numbers(self) -> Tensor:
        """Return the labels as numbers."""
        if isinstance(self.y, Tensor):
            return self.y
        raise InputError(
            f"{self.name} has no labels: give it an array y."
            if self.y is None
            else f"the labels of {self.name} are words, as {self.y[0]!r}; numbers are needed."
        )

    def label_names(self) -> list[str] | None:
        """Return the different words among the labels, sorted; None if they are numbers."""
        return sorted(set(self.y)) if isinstance(self.y, list) else None

    def labels(self, names: Sequence[str] | None) -> Tensor:  # (N,)
        """Return the labels as class indices; words by their place among the names."""
        if isinstance(self.y, list):
            places = {name: i for i, name in enumerate(names or [])}
            if unknown := sorted(set(self.y) - set(places)):
                raise InputError(f"{self.name} has the label {unknown[0]!r}, which is none of {', '.join(places)}.")
            return torch.tensor([places[word] for word in self.y])
        y = self.numbers()
        if y.is_floating_point() and y.dim() == 1:
            if bool((y != y.round()).any()):
                raise InputError(f"the labels of {self.name} are no class indices: {float(y[y != y.round()][0]):g}.")
            y = y.long()
        return y if y.is_floating_point() else y.long()


def read(path: Path, target: str | None = None, labelled: bool = True) -> Table:
    """Return the contents of a data file.

    Args:
        path: The file, .npz, .safetensors or .csv.
        target: For a .csv file, the name or number of the column with the labels; the last one by default.
        labelled: Whether a .csv file has labels for certain. If not, it has them only if `target` names a column of it.

    Raises:
        InputError: The file is of another kind, or has other contents.
        OSError: It cannot be read.
    """
    kinds = {".npz": _npz, ".safetensors": _safetensors}
    if path.suffix == ".csv":
        return _csv(path, target, labelled)
    if path.suffix not in kinds:
        raise InputError(f"{path.name}: data files end in .npz, .safetensors or .csv.")
    arrays = kinds[path.suffix](path)
    if "x" not in arrays:
        raise InputError(
            f"{path.name} has the arrays {', '.join(sorted(arrays)) or 'none'}; x is needed, and y for labels."
        )
    return Table(path.name, arrays["x"], arrays.get("y"))


def _npz(path: Path) -> dict[str, Tensor]:
    try:
        with np.load(path, allow_pickle=False) as archive:
            return {name: torch.from_numpy(archive[name]) for name in archive.files}
    except FileNotFoundError:
        raise
    except Exception as error:  # numpy raises many kinds for a file that is none of its own
        raise InputError(f"{path.name} is not a NumPy archive of numbers: {error}") from error


def _safetensors(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except SafetensorError as error:
        raise InputError(f"{path.name} is not a safetensors file: {error}") from error


def _csv(path: Path, target: str | None, labelled: bool) -> Table:
    with path.open(newline="", encoding="utf-8-sig") as file:
        rows = [row for row in csv.reader(file) if row]
    if not rows:
        raise InputError(f"{path.name} is empty.")
    if len(widths := sorted({len(row) for row in rows})) > 1:
        raise InputError(f"{path.name} has rows of {', '.join(map(str, widths))} columns; all need the same.")
    named = len(rows) > 1 and _form(rows[0]) != _form(rows[1])  # words above numbers are names
    header, body = ([name.strip() for name in rows[0]], rows[1:]) if named else (None, rows)
    at = _column(path, header, len(rows[0]), target, labelled)
    kept = [i for i in range(len(rows[0])) if i != at]
    x = torch.tensor([[_number(path, row[i]) for i in kept] for row in body], dtype=torch.float64)
    y: Any = None
    if at is not None:
        words = [row[at].strip() for row in body]
        y = torch.tensor([float(word) for word in words]) if all(map(_is_number, words)) else words
    return Table(path.name, x, y, None if header is None else [header[i] for i in kept])


def _form(row: list[str]) -> list[bool]:
    return [_is_number(word) for word in row]


def _column(path: Path, header: list[str] | None, count: int, target: str | None, labelled: bool) -> int | None:
    """Return the number of the column with the labels, or None if there is none."""
    if target is None:
        return count - 1 if labelled else None
    if header is not None and target in header:
        return header.index(target)
    if target.isdecimal() and int(target) < count:
        return int(target)
    if not labelled:
        return None
    raise InputError(f"{path.name} has no column {target!r}; it has {', '.join(header or map(str, range(count)))}.")


def _number(path: Path, word: str) -> float:
    try:
        return float(word)
    except ValueError:
        raise InputError(f"{path.name} has {word!r} among its inputs; numbers are needed.") from None


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True
