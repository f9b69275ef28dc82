"""Start the command `laplace` before the library: `laplace --help` answers without importing torch.

`import laplace.cli` would first run `laplace/__init__.py`, which imports everything. So the file is run by itself; it
imports the library when a command needs it.
"""

from __future__ import annotations

from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path


def main() -> int:
    """Run the command line of this process and return the exit status."""
    package = find_spec("laplace")  # finds it, and imports nothing
    assert package is not None
    assert package.origin is not None
    spec = spec_from_file_location("laplace_cli", Path(package.origin).with_name("cli.py"))
    assert spec is not None
    assert spec.loader is not None
    cli = module_from_spec(spec)
    spec.loader.exec_module(cli)
    return cli.main()
