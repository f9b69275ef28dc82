"""Notice files of laplace-torch in this folder: both packages install `laplace/`, and the later one overwrites."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, files
from pathlib import Path

from laplace.errors import LaplaceWarning, warn

__all__ = ["MixedInstallationWarning", "notice_other_files"]

_PACKAGE = Path(__file__).parents[1]


class MixedInstallationWarning(LaplaceWarning):
    """Raised if laplace-torch is installed into the same folder."""


def notice_other_files(package: Path = _PACKAGE) -> None:
    """Warn if laplace-torch has installed its files into this package's folder.

    Args:
        package: the folder of the package.
    """
    try:
        listed = files("laplace-torch") or []
    except PackageNotFoundError:
        return
    if any(Path(str(file.locate())).resolve().parent == package.resolve() for file in listed if file.suffix == ".py"):
        warn(
            "laplace-torch is installed into the same folder, and each overwrites files of the other: run `pip "
            "uninstall -y laplace-torch laplace-redux && pip install laplace-redux`.",
            MixedInstallationWarning,
        )
