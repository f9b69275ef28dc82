"""Real data from a folder of `.npz` files: the one given, or the one that LAPLACE_DATA names."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np

VARIABLE = "LAPLACE_DATA"


def arrays(name: str, folder: str | None) -> dict[str, np.ndarray]:
    """The arrays of `<folder>/<name>.npz`; ends the program with what to do where there is none."""
    where = folder or os.environ.get(VARIABLE)
    if not where:
        sys.exit(f"This experiment needs real data: say where {name}.npz is with --data FOLDER or {VARIABLE}=FOLDER.")
    path = Path(where) / f"{name}.npz"
    if not path.exists():
        sys.exit(f"There is no {path}. Needed: a NumPy archive, as the top of this experiment says.")
    with np.load(path, allow_pickle=False) as archive:
        return {key: archive[key] for key in archive.files}
