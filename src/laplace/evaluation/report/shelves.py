"""Keep the examples that are worth a look while the data are read: the surest, the least sure, the surprises."""

from __future__ import annotations

import struct
import zlib
from base64 import b64encode
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from laplace.errors import InputError
from laplace.evaluation.report.answers import Answers
from laplace.network.inputs import Inputs
from laplace.network.pytree import tensors_in

KEPT: Final = 6  # examples on each shelf
_PIXELS = 64  # the longest side of a thumbnail
_SMALLEST = 4  # fewer pixels than this on a side are no image
_FEATURES = 8  # of a row that are shown
_CHARACTERS = 280  # of a text that are shown

Show = Sequence[str] | Callable[[Any], str]


@dataclass(frozen=True)
class Shown:
    """Holds an example as the page shows it: a picture, a text, or the numbers of a row.

    Attributes:
        picture: A PNG as a data address, or ''.
        text: A text, or ''.
        row: The first features.
        more: How many features are left out.
    """

    picture: str = ""
    text: str = ""
    row: tuple[float, ...] = ()
    more: int = 0


@dataclass(frozen=True)
class Placed:
    """Holds an example on a shelf.

    Attributes:
        score: Why it is there; higher is further up.
        number: Its number in the data.
        shown: What it looks like.
    """

    score: float
    number: int
    shown: Shown


@dataclass
class Shelves:
    """Holds the examples that are shown of one data set, on shelves by name.

    Attributes:
        rules: By shelf, the score of each example from its answers; -inf for those that do not belong there.
        show: What to show of an example instead of its input: one text each, or a function of the input.
        shelves: What is on them.
    """

    rules: dict[str, Callable[[Answers], NDArray[np.float64]]]
    show: Show | None = None
    shelves: dict[str, list[Placed]] = field(default_factory=dict)

    def add(self, answers: Answers, inputs: Inputs, start: int) -> None:
        """Place the examples of a batch, whose first has the number `start`."""
        for name, rule in self.rules.items():
            shelf = self.shelves.setdefault(name, [])
            scores = rule(answers)
            for i in np.argsort(-scores, kind="stable")[:KEPT].tolist():
                full = len(shelf) == KEPT and scores[i] <= shelf[-1].score
                if not full and np.isfinite(scores[i]):
                    shelf.append(Placed(float(scores[i]), start + i, self._shown(inputs, i, start + i)))
                    shelf.sort(key=lambda placed: (-placed.score, placed.number))
                    del shelf[KEPT:]

    def _shown(self, inputs: Inputs, i: int, number: int) -> Shown:
        if self.show is None:
            return shown(inputs, i)
        if callable(self.show):
            x = inputs.part(i, i + 1).x
            return Shown(text=_cut(str(self.show(x[0] if isinstance(x, Tensor) else x))))
        if number >= len(self.show):
            raise InputError(f"examples= has {len(self.show)} texts, and there are more test examples. Give one each.")
        return Shown(text=_cut(str(self.show[number])))


SHELVES: Final[dict[str, dict[str, Callable[[Answers], NDArray[np.float64]]]]] = {
    "classes": {
        "sure, and wrong": lambda a: np.where(a["error"] > 0, a["confidence"], -np.inf),
        "least sure": lambda a: a["total"],
        "surest": lambda a: -a["total"],
    },
    "regression": {
        "surprises": lambda a: np.abs((a["y"] - a["mean"]) / a["sd"]).max(-1),
        "least sure": lambda a: a["total"],
        "surest": lambda a: -a["total"],
    },
}
SHELVES["labels"], SHELVES["counts"], SHELVES["other"] = SHELVES["classes"], SHELVES["regression"], {}
OUTSIDE: Final = {"taken for known": lambda a: -a["epistemic"]}


def facts_of(mine: Answers, placed: Placed) -> dict[str, Any]:
    """Return the facts about an example that is shown, as in the JSON."""
    i = placed.number
    facts: dict[str, Any] = {"number": i, "epistemic": float(mine["epistemic"][i])}
    if mine.kind in ("classes", "labels"):
        facts["confidence"] = float(mine["confidence"][i])
        p = mine["p"][i]
        facts["predicted"] = int(p.argmax()) if mine.kind == "classes" else np.flatnonzero(p > 0.5).tolist()
        if "y" in mine:
            y = mine["y"][i]
            facts["label"] = int(y) if mine.kind == "classes" else np.flatnonzero(y > 0.5).tolist()
    elif "mean" in mine:
        facts |= {"predicted": mine["mean"][i].tolist(), "sd": mine["sd"][i].tolist(), "label": mine["y"][i].tolist()}
    shown_as = placed.shown
    facts |= {"text": shown_as.text} if shown_as.text else {}
    return facts | ({"row": list(shown_as.row), "more": shown_as.more} if shown_as.row else {})


def shown(inputs: Inputs, i: int) -> Shown:
    """Return what an example looks like: a thumbnail of an image, a text, or the first numbers of a row."""
    x = inputs.x
    if isinstance(x, dict) and isinstance(text := x.get("text"), (list, tuple)) and i < len(text):
        return Shown(text=_cut(str(text[i])))
    tensors = tensors_in(x)
    if not tensors or inputs.size is None:
        return Shown()
    one = tensors[0][i].detach().cpu()
    if is_image(one):
        return Shown(picture=thumbnail(one))
    flat = one.reshape(-1).double().tolist()
    return Shown(row=tuple(flat[:_FEATURES]), more=max(0, len(flat) - _FEATURES))


def is_image(x: Tensor) -> bool:
    """Return whether an input is an image: (1, H, W), (3, H, W) or (4, H, W), with H and W of at least 4 pixels."""
    return x.dim() == 3 and x.shape[0] in (1, 3, 4) and min(x.shape[1:]) >= _SMALLEST and not x.is_complex()


def thumbnail(image: Tensor) -> str:  # (C, H, W)
    """Return a small PNG as a data address. Pixels are stretched to the whole range of brightness."""
    image = image[:3].double().nan_to_num()
    if (longest := max(image.shape[1:])) > _PIXELS:
        size = [max(1, round(side * _PIXELS / longest)) for side in image.shape[1:]]
        image = torch.nn.functional.interpolate(image[None], size=size, mode="area")[0]
    low, high = image.min(), image.max()
    scaled = (image - low) / (high - low).clamp(min=1e-12)
    pixels = (scaled * 255).round().byte().permute(1, 2, 0).contiguous().numpy()
    return "data:image/png;base64," + b64encode(png(pixels)).decode()


def png(pixels: NDArray[np.uint8]) -> bytes:  # (H, W, 1 or 3)
    """Return the image as a PNG file, grey or in colours."""
    height, width, channels = pixels.shape
    rows = np.concatenate([np.zeros((height, 1), np.uint8), pixels.reshape(height, -1)], 1)  # each with filter 0
    header = struct.pack(">IIBBBBB", width, height, 8, 0 if channels == 1 else 2, 0, 0, 0)
    parts = [(b"IHDR", header), (b"IDAT", zlib.compress(rows.tobytes(), 9)), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data)) for name, data in parts
    )


def _cut(text: str) -> str:
    return text if len(text) <= _CHARACTERS else f"{text[: _CHARACTERS - 1]}…"
