"""Define the arguments of the command `laplace`. Run by `laplace_command`, before the library is imported."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
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


class _Version(argparse.Action):
    """Prints the version of the installed distribution; looking it up takes longer than the rest of `--help`."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from importlib import metadata

        try:
            found = metadata.version(DISTRIBUTION)
        except metadata.PackageNotFoundError:
            found = "(not installed)"
        print(f"laplace {found}")
        parser.exit()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="laplace", description="Turn a trained PyTorch network into a Bayesian one by a Laplace approximation."
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="show the version and exit")
    parser.set_defaults(command=None)
    commands = parser.add_subparsers(title="commands", metavar="command")
    _add_demo(commands)
    _add_report(commands)
    return parser


def _add_demo(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    demo = commands.add_parser(
        "demo",
        help="train a small network, make it Bayesian, compare the two",
        description="Train a small network on images embedded in scikit-learn, make its last layer Bayesian, print "
        "both side by side and write a report page; then the same for a regression in one dimension. No download, "
        "well under a minute.",
    )
    demo.add_argument(
        "--out",
        type=Path,
        default=Path("laplace-demo"),
        metavar="DIR",
        help="where figures and pages go (default: %(default)s)",
    )
    demo.add_argument("--seed", type=int, default=0, help="of the data split, the noise and the networks (default: 0)")
    demo.add_argument(
        "--noise",
        type=_non_negative,
        default=0.5,
        help="sd of the noise on the images, whose pixels lie in 0..1; 0 for clean images (default: %(default)s)",
    )
    demo.set_defaults(command=_demo)


def _add_report(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    report = commands.add_parser(
        "report",
        help="write a page that says how far a network can be trusted",
        description="Load a saved posterior and its network, score them on data from files, and write one HTML page "
        "that opens offline, with the same numbers as JSON beside it.",
        epilog="Data files: .npz or .safetensors with the arrays x and y; .csv with a column for the label, the last "
        "one unless --target names another. OOD files need no labels.",
    )
    report.add_argument("posterior", type=Path, help="what la.save(path) wrote")
    report.add_argument(
        "--model",
        required=True,
        metavar="MODULE:NAME",
        help="a function without arguments that returns the network, or the network; MODULE may lie in this folder",
    )
    report.add_argument("--weights", type=Path, metavar="FILE", help="weights to load into it: .safetensors, .pt, .pth")
    report.add_argument("--test", type=Path, required=True, metavar="FILE", help="labelled test data")
    report.add_argument("--val", type=Path, metavar="FILE", help="validation data, which rescales the network")
    report.add_argument("--train", type=Path, metavar="FILE", help="training data, to look for test examples in it")
    for name, what in (("ood", "inputs from elsewhere"), ("shift", "labelled data of a changed kind")):
        report.add_argument(
            f"--{name}", action="append", default=[], metavar="NAME=FILE", help=f"{what}; may be given several times"
        )
    report.add_argument("--out", type=Path, default=Path("report.html"), help="the page (default: %(default)s)")
    report.add_argument("--target", metavar="COLUMN", help="of .csv files, the column with the label")
    report.add_argument("--classes", metavar="A,B,...", help="names of the classes, in the order of the outputs")
    report.add_argument("--title", default="How far can this network be trusted?", help="heading of the page")
    report.add_argument("--level", type=float, default=0.9, help="of the intervals that are judged (default: 0.9)")
    report.add_argument("--batch-size", type=int, default=256, metavar="N", help="examples at a time (default: 256)")
    report.add_argument("--seed", type=int, default=0, help="of the bootstrap (default: 0)")
    report.set_defaults(command=_report)


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


def _report(arguments: argparse.Namespace) -> int:
    from laplace.commands.report import run
    from laplace.errors import LaplaceError

    try:
        print(run(arguments))
    except (LaplaceError, OSError) as error:
        return _fail(str(error))
    print(f"\n{arguments.out}\n{arguments.out.with_suffix('.json')}")
    return 0


def _fail(message: str) -> int:
    print(f"laplace: {message}", file=sys.stderr)
    return 1


def _non_negative(text: str) -> float:
    value = float(text)
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a number from 0 up")
    return value
