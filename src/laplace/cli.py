"""The command `laplace`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

DISTRIBUTION = "laplace-redux"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (that of the process if None) and return the exit status."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    if arguments.command is None:
        parser.print_help()
        return 0
    return arguments.command(arguments)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="laplace", description="Turn a trained PyTorch network into a Bayesian one by a Laplace approximation."
    )
    parser.add_argument("--version", action="version", version=f"laplace {_version()}")
    parser.set_defaults(command=None)
    commands = parser.add_subparsers(title="commands", metavar="command")
    demo = commands.add_parser(
        "demo",
        help="train a small network, make it Bayesian, compare the two",
        description="Train a small network on images embedded in scikit-learn, make its last layer Bayesian and print "
        "both side by side; then the same for a regression in one dimension. No download, well under a minute.",
    )
    demo.add_argument(
        "--out",
        type=Path,
        default=Path("laplace-demo"),
        metavar="DIR",
        help="where the figures go (default: %(default)s)",
    )
    demo.add_argument("--seed", type=int, default=0, help="of the data split, the noise and the networks (default: 0)")
    demo.add_argument(
        "--noise",
        type=_non_negative,
        default=0.5,
        help="sd of the noise on the images, whose pixels lie in 0..1; 0 for clean images (default: %(default)s)",
    )
    demo.set_defaults(command=_demo)
    return parser


def _demo(arguments: argparse.Namespace) -> int:
    from laplace import demo

    missing = demo.missing_packages()
    if missing:
        return _fail(f"the demo needs {' and '.join(missing)}: pip install '{DISTRIBUTION}[demo]'")
    try:
        arguments.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        return _fail(f"cannot make the directory {arguments.out} ({error.strerror}): pass another --out")
    demo.run(arguments.out, demo.Settings(seed=arguments.seed, noise=arguments.noise))
    return 0


def _fail(message: str) -> int:
    print(f"laplace: {message}", file=sys.stderr)
    return 1


def _non_negative(text: str) -> float:
    value = float(text)
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a number from 0 up")
    return value


def _version() -> str:
    try:
        return metadata.version(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        return "(not installed)"
