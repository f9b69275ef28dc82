"""A mixed installation is noticed when the package is imported."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from pathlib import Path

import laplace
from laplace.compat.installation import notice_other_files

SOURCE = Path(laplace.__file__).parents[1]


def install_the_other(folder: Path) -> None:
    """Write what pip leaves behind of laplace-torch: a list of its files."""
    info = folder / "laplace_torch-0.3.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: laplace-torch\nVersion: 0.3\n")
    (info / "RECORD").write_text("laplace/__init__.py,,\nlaplace/baselaplace.py,,\n")


def imported(path: list[Path]) -> str:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, path))}
    return subprocess.run(
        [sys.executable, "-c", "import laplace"], env=environment, capture_output=True, text=True, check=True
    ).stderr


def test_one_sentence_says_what_to_do(tmp_path):
    (tmp_path / "laplace").symlink_to(SOURCE / "laplace")
    install_the_other(tmp_path)
    said = imported([tmp_path])
    assert "laplace-torch is installed into the same folder" in said
    assert "pip uninstall -y laplace-torch laplace-redux && pip install laplace-redux" in said


def test_another_folder_is_no_mixture(tmp_path):
    install_the_other(tmp_path)
    assert "laplace-torch" not in imported([SOURCE, tmp_path])


def test_nothing_is_said_without_it():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        notice_other_files()
