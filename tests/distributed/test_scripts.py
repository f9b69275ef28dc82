"""The scripts of the page "Many processes" run with two processes, and count each example once."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import laplace

FOLDER = Path(__file__).parents[2] / "examples" / "many_processes"
EXAMPLES = {"with_torchrun": 501, "with_accelerate": 101, "with_fabric": 101}


@pytest.mark.slow
@pytest.mark.parametrize("name", EXAMPLES)
def test_the_script_runs_with_two_processes(name, tmp_path):
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    source = str(Path(laplace.__file__).parents[1])
    done = subprocess.run(
        [*launch, str(FOLDER / f"{name}.py")],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": source, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert re.findall(r"(\d+) examples, log evidence -\d+", done.stdout) == [str(EXAMPLES[name])]


def test_every_script_is_on_the_page():
    page = (FOLDER.parents[1] / "docs" / "many-processes.md").read_text()
    assert {path.stem for path in FOLDER.glob("*.py")} == set(EXAMPLES)
    for name in EXAMPLES:
        assert f"examples/many_processes/{name}.py" in page
