"""Read a folder of real data: `.npz` of arrays or of lossless WebP mosaics, `text/*.json.gz`, `uci/*.npz`."""

from __future__ import annotations

import gzip
import io
import json
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np

SIDE, COLUMNS = 32, 100  # a mosaic is a picture of colour images of 32 x 32, a hundred in a row


@dataclass(frozen=True)
class Folder:
    """A folder of data sets. A missing file ends the program with what is needed."""

    path: Path

    def arrays(self, name: str) -> dict[str, np.ndarray]:
        """Return the arrays of `<name>.npz`."""
        with np.load(self._file(f"{name}.npz"), allow_pickle=False) as archive:
            return {key: archive[key] for key in archive.files}

    def colour(self, name: str, split: str, n: int | None = None) -> np.ndarray:  # (N, 32, 32, 3)
        """Return the first `n` images of `<name>_webp.npz`, which keeps `webp_<split>_<i>` of `n_<split>[i]` images."""
        found: list[np.ndarray] = []
        with np.load(self._file(f"{name}_webp.npz"), allow_pickle=False) as archive:
            for i, count in enumerate(archive[f"n_{split}"]):
                if n is None or sum(map(len, found)) < n:
                    found.append(_tiles(archive[f"webp_{split}_{i}"], int(count)))
        return np.concatenate(found)[:n]

    def labels(self, name: str, split: str) -> np.ndarray:
        """Return the labels of a packed set of images."""
        return self.beside(name, f"y_{split}")

    def beside(self, name: str, key: str) -> np.ndarray:
        """Return an array that is kept beside packed images."""
        with np.load(self._file(f"{name}_webp.npz"), allow_pickle=False) as archive:
            return archive[key]

    def texts(self, name: str) -> dict[str, dict[str, list]]:
        """Return the splits of `text/<name>.json.gz`, each with 'text' and 'label'."""
        with gzip.open(self._file(f"text/{name}.json.gz"), "rt", encoding="utf8") as file:
            return json.load(file)

    def model(self, name: str) -> Path:
        """Return the file of a trained network, `models/<name>.safetensors`."""
        return self._file(f"models/{name}.safetensors")

    def _file(self, name: str) -> Path:
        path = self.path / name
        if not path.exists():
            sys.exit(f"There is no {path}. Give the folder that holds {name} as --data DIR.")
        return path


def _tiles(buffer: np.ndarray, n: int) -> np.ndarray:
    """Cut a mosaic back into its n images."""
    try:
        from PIL import Image
    except ImportError:
        sys.exit("The colour images are packed as WebP, which needs Pillow: pip install pillow.")
    Image.MAX_IMAGE_PIXELS = None
    mosaic = np.array(Image.open(io.BytesIO(buffer.tobytes())).convert("RGB"))
    rows = len(mosaic) // SIDE
    tiles = mosaic.reshape(rows, SIDE, COLUMNS, SIDE, 3).transpose(0, 2, 1, 3, 4)
    return tiles.reshape(rows * COLUMNS, SIDE, SIDE, 3)[:n]
