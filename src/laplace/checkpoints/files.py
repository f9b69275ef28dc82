"""Write files that are always complete: to a temporary file beside the target, flushed to disk, then moved."""

from __future__ import annotations

import glob
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from laplace.errors import CheckpointError


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a temporary file beside `path` to write to. It replaces `path` at the end, unless something is raised."""
    path = Path(path)
    require_place(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
    _remove_left(path)
    try:
        beside.touch(exist_ok=False)
        mode = beside.stat().st_mode
        yield beside
        beside.chmod(mode)  # the default permissions, even if the writer has changed them
        _to_disk(beside)
        beside.replace(path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
    if os.name == "posix":  # elsewhere a folder cannot be opened
        _to_disk(path.parent)


def require_place(path: str | os.PathLike[str]) -> None:
    """Refuse a path where a folder, a pipe or a device is: writing would replace it or wait for it."""
    try:
        found = Path(path).stat()
    except OSError:
        return  # nothing there, or a link to nothing
    if not stat.S_ISREG(found.st_mode):
        raise CheckpointError(f"{str(path)!r} cannot be written: {not_a_file(found)}. Give the path of a file.")


def not_a_file(found: os.stat_result) -> str:
    """Say what is there instead of a regular file."""
    kinds = {
        stat.S_ISDIR: "Is a directory",
        stat.S_ISFIFO: "it is a named pipe",
        stat.S_ISSOCK: "it is a socket",
        stat.S_ISCHR: "it is a device",
        stat.S_ISBLK: "it is a device",
    }
    said = next((words for test, words in kinds.items() if test(found.st_mode)), "it is not a regular file")
    return said if said == "Is a directory" else f"{said}, and files are read and written as a whole"


def remove(path: str | os.PathLike[str]) -> None:
    """Remove a file, and the temporary files that killed processes left beside it."""
    path = Path(path)
    path.unlink(missing_ok=True)
    for beside in path.parent.glob(f".{glob.escape(path.name)}.*.tmp"):
        beside.unlink(missing_ok=True)


def _remove_left(path: Path) -> None:
    """Remove temporary files that processes which no longer run left beside a file."""
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
