"""Run the tests of libraries that use laplace-torch against this package: `make clients`.

| client | what is run |
|---|---|
| laplace-torch 0.2.3 | its own public tests, from its source distribution (later ones have none) |
| laplace-bayesopt 0.1.7 | its own tests, from its source distribution |
| torch-uncertainty 0.13.0 | `client_tests/test_torch_uncertainty.py`: its distribution has no tests |
| lightning-uq-box 0.4.0 | `client_tests/test_lightning_uq_box.py`: its distribution has no tests |

Clients are installed without their dependencies into a scratch folder, which is removed. What they import and is not
here, such as torchvision, is stood in for (`client_tests/stand_ins.py`).
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
SOURCE = HERE.parent / "src"
NEEDED = ("einops", "pandas", "pytest-mock")  # by the clients or their tests, besides what `dev` installs


@dataclass(frozen=True)
class Client:
    """A package of the registry, and where its tests are: in its own distribution, or in a file beside this one."""

    package: str
    tests: str
    own: bool = True


CLIENTS = {
    "laplace-torch": Client("laplace-torch==0.2.3", "tests"),
    "laplace-bayesopt": Client("laplace-bayesopt==0.1.7", "tests"),
    "torch-uncertainty": Client("torch-uncertainty==0.13.0", "test_torch_uncertainty.py", own=False),
    "lightning-uq-box": Client("lightning-uq-box==0.4.0", "test_lightning_uq_box.py", own=False),
}


def pip(*arguments: str) -> None:
    """Run pip, whatever Python version a client asks for."""
    subprocess.run([sys.executable, "-m", "pip", *arguments, "-q", "--no-deps", "--ignore-requires-python"], check=True)


def unpacked(client: Client, folder: Path) -> Path:
    """Return the folder of a client's source distribution."""
    pip("download", client.package, "--no-binary", ":all:", "--dest", str(folder))
    (archive,) = folder.glob("*.tar.gz")
    with tarfile.open(archive) as whole:
        whole.extractall(folder, filter="data")
    (found,) = (path for path in folder.iterdir() if path.is_dir())
    return found


def run(client: Client, scratch: Path, more: list[str]) -> str:
    """Run a client's tests, and return pytest's last line."""
    installed, place = scratch / "site", scratch / "work"
    place.mkdir(parents=True)
    pip("install", "--no-compile", "--target", str(installed), *NEEDED)
    if client.own:
        root = unpacked(client, place)
        tests, source = root / client.tests, root
        others = installed / "laplace"
        assert not others.exists(), "laplace-torch's own package must not be on the path"
        if client.package.startswith("laplace-torch"):
            root.joinpath("laplace").rename(root / "not-run")
    else:
        pip("install", "--no-compile", "--target", str(installed), client.package)
        tests, source = HERE / "client_tests" / client.tests, place
    path = os.pathsep.join(map(str, (SOURCE, HERE / "client_tests", source, installed)))
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "stand_ins", "-p", "no:cacheprovider"]
    command += ["-p", "no:warnings", "--tb=no", "-c", os.devnull, "--rootdir", str(source), *more, str(tests)]
    done = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": path}, cwd=source, capture_output=True, text=True, check=False
    )
    print(done.stdout if more else "", end="")
    lines = (done.stdout or done.stderr).strip().splitlines()
    return lines[-1] if lines else f"pytest ended with code {done.returncode}"


def main() -> None:
    """Run the clients that are named, or all, and print one line each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("clients", nargs="*", metavar="client", help=f"some of {', '.join(CLIENTS)}; all if left out")
    parser.add_argument("--pytest", default="", help="further arguments of pytest, as in '-x -k jacobians'")
    given = parser.parse_args()
    unknown = [name for name in given.clients if name not in CLIENTS]
    if unknown:
        parser.error(f"no client {unknown[0]!r}; there are {', '.join(CLIENTS)}")
    for name in given.clients or CLIENTS:
        with tempfile.TemporaryDirectory() as scratch:
            line = run(CLIENTS[name], Path(scratch), given.pytest.split())
        print(f"{name:20} {re.sub('=+', '', line).strip()}", flush=True)


if __name__ == "__main__":
    main()
