"""Files that are always whole: written beside their place, brought to the disk, and moved there."""

from __future__ import annotations

import glob
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A file beside `path` to write to; it takes the place of `path` at the end, unless something is raised."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
    _remove_left(path)
    try:
        beside.touch(exist_ok=False)
        mode = beside.stat().st_mode
        yield beside
        beside.chmod(mode)  # as files are made here, whatever the writer has made of it
        _to_disk(beside)
        beside.replace(path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
    if os.name == "posix":  # elsewhere a folder cannot be opened
        _to_disk(path.parent)


def remove(path: str | os.PathLike[str]) -> None:
    """Remove a file, and what a killed process left beside it."""
    path = Path(path)
    path.unlink(missing_ok=True)
    for beside in path.parent.glob(f".{glob.escape(path.name)}.*.tmp"):
        beside.unlink(missing_ok=True)


def _remove_left(path: Path) -> None:
    """Remove what processes that are no more have left beside a file."""
    for beside in path.parent.glob(f".{glob.escape(path.name)}.*.tmp"):
        pid = beside.name.removeprefix(f".{path.name}.").partition("-")[0]
        if os.name == "posix" and pid.isdecimal() and not _runs(int(pid)):
            beside.unlink(missing_ok=True)


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def _to_disk(path: Path) -> None:
    handle = os.open(path, os.O_RDWR if path.is_file() else os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
