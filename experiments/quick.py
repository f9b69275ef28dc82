"""Run every study of the results page with --quick, one after the other, and write the CPU seconds that each took.

    python -m experiments.quick --data DIR [--results DIR]

Says whether everything that is installed still runs, from end to end. What the studies write goes to a folder that is
deleted; the CPU seconds go to quick.json. It ends with 1 if a study failed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path
from resource import RUSAGE_CHILDREN, getrusage

HERE = Path(__file__).parent
STUDIES = ("uq_mnist", "uq_cifar10", "cost", "structures_fmnist", "three_steps", "selection", "configurations", "shift")
STUDIES = (*STUDIES, "continual", "continual_limits")


def main() -> None:
    """Run all studies."""
    parser = argparse.ArgumentParser("python -m experiments.quick", description=__doc__.splitlines()[0])
    parser.add_argument("--data", default=os.environ.get("LAPLACE_DATA"), help="the folder with the data sets")
    parser.add_argument("--results", type=Path, default=HERE / "results", help="where quick.json goes")
    given = parser.parse_args()
    if not given.data:
        sys.exit("The studies need real data: say where it is with --data FOLDER or LAPLACE_DATA=FOLDER.")
    found, failed = {}, []
    for name in STUDIES:
        seconds, error = run(name, given.data)
        found[name] = round(seconds, 1)
        failed += [name] if error else []
        print(f"{name:20s} {seconds:6.1f} CPU seconds{'' if not error else '  failed: ' + error}", flush=True)
    print(f"{'all':20s} {sum(found.values()):6.1f} CPU seconds")
    machine = f"{platform.machine()}, {os.cpu_count()} cores, one thread"
    (given.results / "quick.json").write_text(json.dumps({"machine": machine, "cpu_seconds": found}, indent=1) + "\n")
    if failed:
        sys.exit(f"Failed: {', '.join(failed)}.")


def run(name: str, data: str) -> tuple[float, str]:
    """Run one study at toy size; return its CPU seconds, and the last line that it wrote if it failed."""
    before = _spent()
    with tempfile.TemporaryDirectory() as folder:
        flags = ["--quick", "--data", data, "--results", folder, "--cache", f"{folder}/cache"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        command = [sys.executable, "-m", f"experiments.{name}", *flags]
        ended = subprocess.run(command, cwd=HERE.parent, env=environment, capture_output=True, text=True, check=False)
    error = "" if ended.returncode == 0 else (ended.stderr.strip().splitlines() or ["no message"])[-1]
    return _spent() - before, error


def _spent() -> float:
    used = getrusage(RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main()
