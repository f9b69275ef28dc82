"""Tensors in files: what was trained or computed once is read again."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor

Tensors = dict[str, Tensor]


class Cache:
    """A folder of safetensors."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder

    def get(self, name: str, make: Callable[[], Tensors]) -> Tensors:
        """Return the tensors of that name, made and written if they are not there."""
        path = self.folder / f"{name}.safetensors"
        if not path.exists():
            whole = {key: value.detach().contiguous().clone() for key, value in make().items()}
            unfinished = path.with_suffix(".unfinished")
            save_file(whole, unfinished)
            os.replace(unfinished, path)  # an interrupted run leaves no half of a file
        return load_file(path)
