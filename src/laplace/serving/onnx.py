"""Write a module as an ONNX file with named inputs and outputs, for any batch size."""

from __future__ import annotations

import inspect
import os
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from laplace.errors import UnsupportedError, warn
from laplace.network.pytree import map_tensors, tensors_in
from laplace.serving.outputs import WRITTEN_OUT


def write_onnx(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: tuple[str, ...], path: Any
) -> None:
    """Write `module` to `path`. The arguments are an example; their first dimension becomes the batch."""
    try:
        import onnx  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise ImportError(f"ONNX files need {error.name}: pip install 'laplace-redux[onnx]'") from error
    args, kwargs = _of_two(args, kwargs)
    bound = inspect.signature(module.forward).bind(*args, **kwargs)
    args, kwargs, arguments = bound.args, bound.kwargs, bound.arguments  # in the order of the network's own arguments
    batch, sizes = torch.export.Dim("batch", min=1), [len(t) for t in tensors_in(arguments) if t.dim()]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's own, about its own code
            program = torch.onnx.export(
                module,
                args,
                kwargs=kwargs,
                dynamic_shapes=_dims(dict(arguments), batch, sizes[0] if sizes else None),
                dynamo=True,
                verbose=False,
            )
    except torch.onnx.errors.OnnxExporterError as error:
        reason = str(error.__cause__ or error).strip().splitlines()[0]
        raise UnsupportedError(
            f"this network and link cannot be written as ONNX: {reason} All links can for up to {WRITTEN_OUT} classes, "
            "and 'probit' and 'bridge' for more. If it is the network, take torch.export.export(module, inputs)."
        ) from error
    assert program is not None
    _warn_of_double_erf(program.model.graph, path)
    inputs = [name for argument, value in arguments.items() for name in _names(argument, value)]
    _name(program.model.graph, inputs, outputs)
    program.save(os.fspath(path), external_data=False)


def _warn_of_double_erf(graph: Any, path: Any) -> None:
    """Warn of a file that is valid ONNX, and that ONNX Runtime does not load."""
    if any(node.op_type == "Erf" and getattr(node.inputs[0].dtype, "name", "") == "DOUBLE" for node in graph):
        warn(
            f"{os.fspath(path)} needs an error function in float64, which ONNX Runtime does not have: it will not load "
            "the file. Write module.float().to_onnx(path, x.float()), or take a link without one, such as 'probit'."
        )


def _of_two(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Repeat an example of one row: torch.export takes a size of 1 for a constant."""
    if any(len(t) != 1 for t in tensors_in((args, kwargs)) if t.dim()):
        return args, kwargs
    return map_tensors((args, kwargs), lambda t: torch.cat([t, t]) if t.dim() else t)


def _dims(value: Any, batch: Any, n: int | None) -> Any:
    """Return which dimensions vary: the first of every tensor with as many rows as the first one."""
    if isinstance(value, Mapping):
        return {key: _dims(part, batch, n) for key, part in value.items()}
    if isinstance(value, (tuple, list)):
        return type(value)(_dims(part, batch, n) for part in value)
    return {0: batch} if isinstance(value, Tensor) and value.dim() and len(value) == n else None


def _names(argument: str, value: Any) -> Iterator[str]:
    """Yield the name of each tensor: that of the argument, or its key in a mapping."""
    if isinstance(value, Mapping):
        for key, part in value.items():
            yield from _names(str(key), part)
    elif isinstance(value, (tuple, list)):
        for i, part in enumerate(value):
            yield from _names(f"{argument}_{i}", part)
    elif isinstance(value, Tensor):
        yield argument


def _name(graph: Any, inputs: list[str], outputs: tuple[str, ...]) -> None:
    """Name inputs and outputs. Nodes within are named after operations, such as 'mean', and get out of the way."""
    inputs = [f"input_{name}" if name in outputs else name for name in inputs]
    taken = {*inputs, *outputs}
    for value in (value for node in graph for value in node.outputs):
        if value.name in taken:
            value.name = f"{value.name}_within"
    for value, name in zip((*graph.inputs, *graph.outputs), (*inputs, *outputs), strict=True):
        value.name = name
