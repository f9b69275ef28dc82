"""Write and read one file of tensors and words: safetensors with a JSON header in its metadata, and a checksum.

Reading it runs no code. The file is mapped into memory, so callers copy the tensors that they keep.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from laplace._version import __version__
from laplace.checkpoints.files import not_a_file, replacing
from laplace.errors import CheckpointError
from laplace.network import digests

FORMAT = 1
_HEADER, _CHECKSUM = "laplace", "checksum"
_LARGEST = 100_000_000  # the longest header, in bytes, that safetensors reads
_LENGTH = 8  # bytes that say how long the header is
_TENSOR, _TUPLE, _PAIRS = "$tensor", "$tuple", "$pairs"  # markers for what JSON does not have


def write(path: str | os.PathLike[str], kind: str, contents: Any) -> None:
    """Write plain containers of tensors, numbers and words."""
    tensors: dict[str, Tensor] = {}
    header = {"format": FORMAT, "library": __version__, "kind": kind, "contents": _packed(contents, "", tensors)}
    words = json.dumps(header)
    metadata = {_HEADER: words, _CHECKSUM: digests.of_tensors(tensors, words)}
    with replacing(path) as beside:
        try:
            save_file(tensors, beside, metadata)
        except SafetensorError as error:
            raise CheckpointError(f"{str(path)!r} cannot be written: {error}") from error


def read(path: str | os.PathLike[str], kind: str) -> Any:
    """Return what was written to `path` as this `kind`. The tensors are views of the file."""
    path = Path(path)
    _check_frame(path)
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    except Exception as error:  # whatever a parser raises for a damaged file
        raise CheckpointError(f"{str(path)!r} is damaged: {error}.") from error
    if not {_HEADER, _CHECKSUM} <= metadata.keys():
        raise CheckpointError(f"{str(path)!r} is a safetensors file, but not one that la.save or fit wrote.")
    words = metadata[_HEADER]
    if digests.of_tensors(tensors, words) != metadata[_CHECKSUM]:
        raise CheckpointError(f"{str(path)!r} is damaged: its checksum is not that of its contents. Take another copy.")
    try:
        return _checked(json.loads(words), kind, path, tensors)
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{str(path)!r} is damaged: its header cannot be read ({error!r}).") from error


def _checked(header: Any, kind: str, path: Path, tensors: Mapping[str, Tensor]) -> Any:
    if header["format"] != FORMAT:
        raise CheckpointError(
            f"{str(path)!r} has format {header['format']!r}, written by laplace {header['library']}; this version "
            f"reads format {FORMAT}. Install that version, or a later one."
        )
    if header["kind"] != kind:
        raise CheckpointError(f"{str(path)!r} holds a {header['kind']}, and a {kind} is needed. Give another path.")
    return _unpacked(header["contents"], tensors)


def _check_frame(path: Path) -> None:
    """Refuse what is not a safetensors file, or an incomplete one, before it is parsed."""
    try:
        found = path.stat()
        if not stat.S_ISREG(found.st_mode):
            raise CheckpointError(f"{str(path)!r} cannot be read: {not_a_file(found)}.")
        size = found.st_size
        with path.open("rb") as file:
            start = file.read(_LENGTH + 1)
    except OSError as error:
        raise CheckpointError(f"{str(path)!r} cannot be read: {error.strerror}.") from error
    length = int.from_bytes(start[:_LENGTH], "little")
    if len(start) > _LENGTH and start[_LENGTH:] != b"{":
        raise CheckpointError(
            f"{str(path)!r} is not a safetensors file. For a file of torch.save write la.load_state_dict("
            "torch.load(path, weights_only=True))."
        )
    if length > _LARGEST:
        raise CheckpointError(
            f"{str(path)!r} is damaged: it claims a header of {length:,} bytes; at most {_LARGEST:,} are allowed."
        )
    if len(start) <= _LENGTH or _LENGTH + length > size:
        raise CheckpointError(
            f"{str(path)!r} is cut off: it has {size:,} bytes, its header alone needs {length:,}. Take another copy."
        )


def _packed(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """Return the value in the form of JSON, moving its tensors to `tensors`."""
    if isinstance(value, Tensor):
        name = name if name not in tensors else f"{name}#{len(tensors)}"
        found = _alone(value.detach().cpu().contiguous())
        same = (key for key, other in tensors.items() if _same(found, other))  # written once
        name = next(same, name)
        tensors.setdefault(name, found)
        return {_TENSOR: name}
    if isinstance(value, Mapping) and all(isinstance(key, str) and not key.startswith("$") for key in value):
        return {key: _packed(v, f"{name}/{key}" if name else key, tensors) for key, v in value.items()}
    if isinstance(value, Mapping):
        pairs = [(key, v) for key, v in value.items() if isinstance(key, (str, int, float, bool))]
        if len(pairs) == len(value):
            return {_PAIRS: [[key, _packed(v, f"{name}/{key}", tensors)] for key, v in pairs]}
    if isinstance(value, (list, tuple)):
        items = [_packed(v, f"{name}/{i}", tensors) for i, v in enumerate(value)]
        return items if isinstance(value, list) else {_TUPLE: items}
    if value is None or isinstance(value, (str, int, float, bool)):
        return value
    raise CheckpointError(
        f"{name!r} is a {type(value).__name__}; a file holds tensors, numbers, words, and lists, tuples and mappings "
        "of them."
    )


def _same(one: Tensor, other: Tensor) -> bool:
    """Return whether two contiguous tensors that are not empty are the same memory."""
    places = [(t.data_ptr(), t.shape, t.dtype) for t in (one, other)]
    return places[0] == places[1] and one.numel() > 0


def _alone(tensor: Tensor) -> Tensor:
    """Return the tensor, copied if it is a part of a larger one, whose memory would be written with it."""
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


def _unpacked(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    if isinstance(value, list):
        return [_unpacked(v, tensors) for v in value]
    if not isinstance(value, dict):
        return value
    if _TENSOR in value:
        return tensors[value[_TENSOR]]
    if _TUPLE in value:
        return tuple(_unpacked(v, tensors) for v in value[_TUPLE])
    if _PAIRS in value:
        return {key: _unpacked(v, tensors) for key, v in value[_PAIRS]}
    return {key: _unpacked(v, tensors) for key, v in value.items()}
