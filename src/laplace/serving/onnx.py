"""Write a module as an ONNX file with named inputs and outputs, for any batch size."""

from __future__ import annotations

import inspect
import os
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from laplace.errors import UnsupportedError
from laplace.serving.outputs import WRITTEN_OUT


def write_onnx(
    module: nn.Module, network: nn.Module, names: tuple[str, ...], path: Any, inputs: tuple[Any, ...]
) -> None:
    """Write `module` to `path`. The inputs are an example; their first dimension becomes the batch."""
    try:
        import onnx  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise ImportError(f"ONNX files need {error.name}: pip install 'laplace-redux[onnx]'") from error
    batch = torch.export.Dim("batch", min=1)
    shapes = tuple(
        {key: _dims(value, batch) for key, value in x.items()} if isinstance(x, Mapping) else _dims(x, batch)
        for x in inputs
    )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's own, about its own code
            torch.onnx.export(
                module,
                inputs,
                os.fspath(path),
                input_names=_input_names(network, inputs),
                output_names=list(names),
                dynamic_shapes=shapes,
                dynamo=True,
                verbose=False,
                external_data=False,
            )
    except torch.onnx.errors.OnnxExporterError as error:
        reason = str(error.__cause__ or error).strip().splitlines()[0]
        raise UnsupportedError(
            f"this network and link cannot be written as ONNX: {reason} All links can for up to {WRITTEN_OUT} classes, "
            "and 'probit' and 'bridge' for more. If it is the network, take torch.export.export(module, inputs)."
        ) from error


def _dims(x: Any, batch: Any) -> dict[int, Any] | None:
    return {0: batch} if isinstance(x, Tensor) and x.dim() else None


def _input_names(network: nn.Module, inputs: tuple[Any, ...]) -> list[str]:
    """Return the names of the tensors: keys of mappings, and the arguments of the network's `forward`."""
    arguments, names = list(inspect.signature(network.forward).parameters), list[str]()
    for i, x in enumerate(inputs):
        names += list(x) if isinstance(x, Mapping) else [arguments[i] if i < len(arguments) else f"input_{i}"]
    return names
