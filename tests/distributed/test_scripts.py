"""The commands of the page "Many processes" start two processes, which count each example once."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import laplace

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "many_processes"
PAGE = (ROOT / "docs" / "many-processes.md").read_text()
COMMANDS = dict(re.findall(r"^\| [^|]+ \| `examples/many_processes/(\w+)\.py` \| `([^`]+)` \|$", PAGE, re.MULTILINE))
EXAMPLES = {"with_torchrun": 501, "with_accelerate": 101, "with_fabric": 101}
TORCHRUN = "torchrun --standalone --nproc-per-node 2 examples/many_processes/{}.py"


def printed(command: str, folder: Path) -> list[tuple[str, str]]:
    """Run a command as the page has it. Return the numbers of examples and the evidences that it prints."""
    (folder / "examples").symlink_to(ROOT / "examples")
    name, *arguments = shlex.split(command)
    program = sys.executable if name == "python" else str(Path(sys.executable).with_name(name))
    source, programs = str(Path(laplace.__file__).parents[1]), str(Path(sys.executable).parent)
    path = f"{programs}{os.pathsep}{os.environ['PATH']}"  # launchers call python and each other
    done = subprocess.run(
        [program, *arguments],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": source, "OMP_NUM_THREADS": "1", "PATH": path},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return re.findall(r"(\d+) examples, log evidence (-\d+\.\d)", done.stdout)


@pytest.mark.slow
@pytest.mark.parametrize("name", EXAMPLES)
def test_the_command_of_the_page_runs_two_processes(name, tmp_path):
    for folder in (tmp_path / "page", tmp_path / "torchrun"):
        folder.mkdir()
    ((examples, evidence),) = printed(COMMANDS[name], tmp_path / "page")
    assert examples == str(EXAMPLES[name])
    assert printed(TORCHRUN.format(name), tmp_path / "torchrun") == [(examples, evidence)]  # one process has another


def test_every_script_is_on_the_page_with_its_command():
    assert {path.stem for path in FOLDER.glob("*.py")} == set(EXAMPLES) == set(COMMANDS)
    assert COMMANDS["with_torchrun"] == TORCHRUN.format("with_torchrun")
    for name, command in COMMANDS.items():
        assert command in (FOLDER / f"{name}.py").read_text()
