"""`laplace report`: a page from a saved posterior, a function that makes the network, and data files."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from laplace.commands.files import Table, read
from laplace.errors import CheckpointError, InputError, OptionError
from laplace.evaluation.report.call import report
from laplace.evaluation.report.result import Report
from laplace.evaluation.report.verdicts import Thresholds
from laplace.laplace import Laplace
from laplace.likelihoods.classes import OneOfSeveral
from laplace.network.arrays import dtype_of


def run(arguments: argparse.Namespace) -> Report:
    """Make the report that the command line asks for. Raises LaplaceError or OSError with what to do about it."""
    model = made(arguments.model)
    if arguments.weights is not None:
        _load(model, arguments.weights)
    la = Laplace.load(arguments.posterior, model)
    classes = isinstance(la.likelihood, OneOfSeveral)
    names = None if arguments.classes is None else [name.strip() for name in arguments.classes.split(",")]
    test = read(arguments.test, arguments.target)
    names = names or (test.label_names() if classes else None)
    files = _Files(model, classes, names, arguments.target, arguments.batch_size)
    return report(
        la,
        files.loader(test),
        ood={name: files.inputs(path) for name, path in _named(arguments.ood, "--ood").items()},
        val_loader=files.optional(arguments.val),
        train_loader=files.optional(arguments.train),
        shifts={name: files.optional(path) for name, path in _named(arguments.shift, "--shift").items()},
        out=arguments.out,
        class_names=names,
        feature_names=test.columns,
        title=arguments.title,
        thresholds=Thresholds(level=arguments.level),
        seed=arguments.seed,
    )


def made(target: str) -> nn.Module:
    """Return the network that `module:name` makes or is. Modules of the working directory are found."""
    module, colon, name = target.partition(":")
    if not colon or not module or not name:
        raise OptionError(f"--model {target}: write MODULE:NAME, as in my_networks:make.")
    here = os.getcwd()
    sys.path.insert(0, here)
    try:
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise OptionError(f"--model {target}: {error}") from error
    finally:
        sys.path.remove(here)
    network = found if isinstance(found, nn.Module) else found()
    if not isinstance(network, nn.Module):
        raise OptionError(f"--model {target} gave a {type(network).__name__}; a torch.nn.Module is needed.")
    return network


def _load(model: nn.Module, path: Path) -> None:
    try:
        state = load_file(path) if path.suffix == ".safetensors" else torch.load(path, "cpu", weights_only=True)
        model.load_state_dict(state)
    except OSError:
        raise
    except Exception as error:  # a file of another kind, or of another network
        raise CheckpointError(f"--weights {path.name} cannot be loaded into the network: {error}") from error


class _Files:
    """Turns tables into what the network and the likelihood take."""

    def __init__(
        self, model: nn.Module, classes: bool, names: list[str] | None, target: str | None, batch_size: int
    ) -> None:
        if batch_size < 1:
            raise OptionError(f"--batch-size {batch_size}: a whole number of at least 1 is needed.")
        self.dtype, self.classes, self.names = dtype_of(model), classes, names
        self.target, self.batch_size = target, batch_size

    def optional(self, path: Path | str | None) -> DataLoader[Any] | None:
        """Return the batches of a labelled file, or None if there is none."""
        return None if path is None else self.loader(read(Path(path), self.target))

    def loader(self, table: Table) -> DataLoader[Any]:
        """Return the batches of a table with labels."""
        y = table.labels(self.names) if self.classes else table.numbers()
        if not self.classes:
            y = y.to(self.dtype)
        if len(y) != len(table.x):
            raise InputError(f"{table.name} has {len(table.x)} inputs and {len(y)} labels.")
        return DataLoader(TensorDataset(self._inputs(table.x), y), self.batch_size)

    def inputs(self, path: str) -> DataLoader[Any]:
        """Return the batches of a table whose labels, if there are any, do not matter."""
        table = read(Path(path), self.target, labelled=False)
        return DataLoader(TensorDataset(self._inputs(table.x)), self.batch_size)

    def _inputs(self, x: Tensor) -> Tensor:
        return x.to(self.dtype) if x.is_floating_point() else x


def _named(given: list[str], option: str) -> dict[str, str]:
    found = {}
    for each in given:
        name, equals, path = each.partition("=")
        if not equals or not name or not path:
            raise OptionError(f"{option} {each}: write NAME=FILE, as in {option} noise=noise.npz.")
        found[name] = path
    return found
