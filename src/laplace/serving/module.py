"""`la.module()`: the posterior predictive as a plain `nn.Module`, for export, compilation and serving."""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping, Sequence
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from laplace.checks import LARGEST, choice, shown, whole_number
from laplace.errors import ModelError, OptionError, UnsupportedError
from laplace.inference.predict import predict
from laplace.keywords import refuse_unknown_keywords
from laplace.linalg.autocast import plainly
from laplace.linalg.tracing import are_numbers, is_plain
from laplace.network.inputs import Keys, logits
from laplace.network.operations import Steps, is_line
from laplace.network.sharded import is_gathering
from laplace.predictive.links import Link
from laplace.predictive.outputs import OutputGaussian
from laplace.predictive.reshape import PredictionAtPositions
from laplace.serving.network import with_features
from laplace.serving.onnx import write_onnx
from laplace.serving.predictive import OUTPUTS, Predictive
from laplace.serving.row import ServedRow
from laplace.weights import FoundLastLayer

_TOLERANCE = 1e-3  # of the comparison with an example, relative to the largest value


class PredictiveModule(nn.Module):
    """Predicts with a last layer's posterior: the plain module that `la.module()` returns.

    It is called as the network is: `module(x)`, `module(x1, x2)`, `module(input_ids=..., attention_mask=...)`, or with
    one tuple or mapping of inputs, and returns a dict of tensors, or one tensor if one was asked for. Its `forward` has
    the network's own arguments. It holds a copy of the network, and what the posterior fixes as buffers: it depends
    neither on the `Laplace` object nor on the original network. Nothing in it looks at values, so that torch.export,
    torch.compile(fullgraph=True), torch.jit.trace and ONNX record it whole. Inputs that are not finite give NaN.

    It is in eval mode, and stays there. `.half()` and `.bfloat16()` round the network, and leave the posterior's
    buffers, whose small numbers have no place in half precision; results are float32 then.

    Attributes:
        network: the copy of the network. It returns the features of its last layer.
        predictive: what the posterior fixes, as buffers.
        outputs: the names of what is returned.
    """

    def __init__(
        self,
        network: nn.Module,
        predictive: Predictive,
        last_layer: str,
        outputs: tuple[str, ...],
        alone: bool,
        flat: bool,
        keys: Keys,
    ) -> None:
        super().__init__()
        self.network, self.predictive, self.outputs = network, predictive, outputs
        self._path = tuple(last_layer.split(".")) if last_layer else ()
        self._alone, self._flat = alone, flat  # one tensor instead of a dict; outputs without a dimension for C
        self._keys, (self._names, self._required, self._anything) = keys, _arguments_of(network)
        layer = self._layer()
        self._dim = -1 if isinstance(layer, nn.Linear) else 1
        self._width = layer.weight.shape[1]
        self._row_shape = torch.Size((1, self._width))
        self._row: ServedRow | None = None
        self._one_row = self._dim == -1 and not flat and predictive.row() is not None
        self._in_line = is_line(network, layer)
        self._steps: Steps | None = None
        self._take_signature()
        self.eval()

    def forward(self, x: Any = None, /, *further: Any, **named: Any) -> Tensor | dict[str, Tensor]:
        """Return the prediction at a batch of inputs, in the shape of the network's outputs."""
        # Entries of _modules, _parameters and _buffers: as attributes, each takes half as long as a small operation.
        plain = isinstance(x, Tensor) and len(further) == 0 and len(named) == 0  # torch.compile knows no `not further`
        network: Any = self._modules["network"]
        out = self._by_steps(x) if self._in_line and plain and is_plain(x) else None
        watched = out is None  # then the network may have returned a tensor that somebody follows
        if out is None and plain:
            out = network(x)
        elif out is None:
            args, kwargs = self._arguments(x, further, named)
            out = network(*args, **kwargs)
        phi = out if isinstance(out, Tensor) else logits(out)
        if self._one_row and (is_plain(phi) if watched else are_numbers(phi)) and phi.shape == self._row_shape:
            found = self._at_row(phi)
            if found is not None:
                return found[self.outputs[0]] if self._alone else found
        phi = phi if self._dim == -1 else phi.movedim(1, -1)
        if phi.shape[-1] != self._width and not torch.jit.is_tracing():  # the tracer makes tensors of sizes
            raise ModelError(
                f"the network changes the output of its last layer {'.'.join(self._path)!r} in a way that features "
                f"do not survive: {self._width} of them became {tuple(phi.shape)}. It may drop a last dimension with "
                "squeeze(-1), or pick positions; what is done to single outputs, as f[:, 0], does not go. Let forward "
                "return the layer's output."
            )
        own = self._layer()._parameters
        f = linear(phi, own["weight"] if self._dim == -1 else own["weight"].flatten(1), own["bias"])
        if f.dtype.itemsize < 4:  # half precision has no place for the small numbers of a posterior
            f, phi = f.float(), phi.float()
        elif phi.dtype != f.dtype:
            phi = phi.to(f.dtype)
        if phi.dim() == 2 and not self._flat:  # the usual case, without a detour
            found = self._predicted(f, phi)
        else:
            grid = phi.shape[:-1]
            rows = self._predicted(f.reshape(-1, f.shape[-1]), phi.reshape(-1, self._width))
            found = {name: self._shaped(value, grid) for name, value in rows.items()}
        return found[self.outputs[0]] if self._alone else found

    def train(self, mode: bool = True) -> PredictiveModule:
        """Stay in eval mode: the posterior belongs to the network in eval mode.

        Args:
            mode: is ignored.
        """
        return super().train(False)

    def to_onnx(self, path: str | os.PathLike[str], *inputs: Any, **named: Any) -> None:
        """Write an ONNX file for any batch size. Its outputs have the names of `outputs`.

        Its inputs have the names of the network's own arguments, or the keys of a mapping that is one argument. The
        first dimension is the batch; the others are those of the example. Numbers are as here to a relative 1e-6; in
        float64, ONNX Runtime has no error function, which 'one_vs_rest' and 'quadrature' need: then there is a warning.

        Args:
            path: the file.
            *inputs: an example of what the module is called with: tensors, or one tuple or mapping of tensors.
            **named: an example of what it is called with by name.

        Raises:
            ImportError: the extra 'onnx' is not installed.
            UnsupportedError: the network or the link uses an operation that ONNX does not have.
        """
        x, further = (inputs[0], inputs[1:]) if inputs else (None, ())
        write_onnx(self, *self._arguments(x, further, named), self.outputs, path)

    def extra_repr(self) -> str:
        """Return what is returned, for `print`."""
        return f"outputs={self.outputs}"

    def _predicted(self, f: Tensor, phi: Tensor) -> dict[str, Tensor]:
        predictive: Any = self._modules["predictive"]
        if not torch.is_autocast_enabled(phi.device.type):
            return predictive.forward(f, phi)
        with torch.autocast(phi.device.type, enabled=False):  # it would round the posterior
            return predictive.forward(f, phi)

    def _by_steps(self, x: Tensor) -> Tensor | None:
        """Return the features by the operations of the network's layers. None if the network has to be called."""
        steps = self._steps
        if steps is None or not steps.are_current():
            steps = self._steps = Steps.of(self.network, self._layer())
        return None if steps is None else steps(x)

    def _at_row(self, phi: Tensor) -> dict[str, Tensor] | None:  # (1, H)
        """Return the prediction at one input in NumPy. None if something is not finite, or buffers cannot be read."""
        row = self._row
        if row is None or not row.is_current():
            predictive: Any = self._modules["predictive"]
            row = self._row = ServedRow.of(predictive, self._layer())
        return None if row is None else row(phi)

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__ | {"_row": None, "_steps": None}  # which belong to the tensors of this module
        del state["forward"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._take_signature()

    def _replicate_for_data_parallel(self) -> PredictiveModule:
        replica = super()._replicate_for_data_parallel()
        replica._take_signature()  # its forward is bound to this module
        return replica

    def _take_signature(self) -> None:
        """Give `forward` the arguments of the network's own, by which torch.export names and binds inputs.

        All are optional, because one mapping or tuple may hold them.
        """
        own: Any = PredictiveModule.forward
        forward: Any = FunctionType(own.__code__, own.__globals__, own.__name__, own.__defaults__, own.__closure__)
        first = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
        further = [_optional(p) for p in inspect.signature(self.network.forward).parameters.values()]
        forward.__signature__ = inspect.Signature([first, *further])
        forward.__doc__ = own.__doc__
        self.__dict__["forward"] = MethodType(forward, self)

    def _arguments(
        self, x: Any, further: tuple[Any, ...], named: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return how the network is called."""
        if len(further):
            return (x, *further), named
        if x is None:
            return (), self._read(named) if self._keys.y in named else named
        if isinstance(x, Mapping) and self._by_name(x):
            return (), {**self._read(x), **named}
        return tuple(x) if isinstance(x, (tuple, list)) else (x,), named

    def _read(self, x: Mapping[str, Any]) -> dict[str, Any]:
        """Return the entries of a mapping that the network reads: not labels, and what belongs to them."""
        apart = {self._keys.y, *self._keys.given, *(() if self._anything or "mask" in self._names else ("mask",))}
        return {key: value for key, value in x.items() if key not in apart}

    def _by_name(self, x: Mapping[str, Any]) -> bool:
        """Return whether the entries of a mapping are arguments of `forward`: the rule of `la(x)`."""
        if self._keys.x in self._names:
            return True
        return self._required <= set(x) and (self._anything or bool(self._names & set(x)))

    def _layer(self) -> Any:
        layer: Any = self._modules["network"]
        for part in self._path:
            layer = layer._modules[part]
        return layer

    def _shaped(self, rows: Tensor, grid: Sequence[int]) -> Tensor:
        if rows.dim() == 1:
            return rows.reshape(grid)
        if self._flat and rows.shape[1] == 1:
            return rows.reshape(grid)
        shaped = rows.reshape(*grid, rows.shape[1])
        return shaped if self._dim == -1 else shaped.movedim(-1, 1)


@refuse_unknown_keywords
@plainly
@torch.no_grad()
def module(
    la: Any,
    /,
    link: str | Link | None = None,
    outputs: str | Sequence[str] = ("mean", "variance"),
    n_samples: int = 100,
    seed: int = 0,
    example: Any = None,
) -> PredictiveModule:
    """Return the predictive as a plain `nn.Module`, which can be exported, compiled and served.

    For the last layer with any structure but 'gp'. It holds a copy of the network, and depends on nothing else. Its
    predictions are those of `la.predict(x)`. Where draws are needed, every input has the same noise: the prediction for
    an input is that of `la.predict` for this input alone.

    Args:
        link: one of `la.likelihood.links`, or a `Link` of your own; that of `la.predict` if left out.
        outputs: what it returns. 'mean': E[y], or the probabilities of classes or labels. 'variance': the variances of
            the network's outputs f, without observation noise. 'epistemic' and 'aleatoric': as in `Prediction`; for
            classes and labels they take draws. One name gives one tensor, several give a dict.
        n_samples: how many draws, for link 'mc' and for 'epistemic' and 'aleatoric' of classes and labels.
        seed: what the draws are made from. Those of `la.predict` without a generator have seed 0.
        example: inputs to compare with `la.predict`; a difference is refused.

    Returns:
        A module in eval mode on the posterior's device.

    Raises:
        NotFittedError: `fit` was not called yet.
        OptionError: a name is unknown.
        UnsupportedError: the posterior is over other weights than the last layer's, or over functions.
        ModelError: the network changes the features behind its last layer, or gives other predictions for `example`.
    """
    posterior, runner = la.posterior, la.runner
    fit, spec = posterior.fit, runner.spec
    response = la.likelihood.response
    wanted = (outputs,) if isinstance(outputs, str) else tuple(outputs)
    wanted = tuple(choice(name, OUTPUTS, "outputs") for name in wanted)
    if not wanted or len(set(wanted)) < len(wanted):
        raise OptionError(f"outputs={shown(outputs)} must name one or more of {', '.join(map(repr, OUTPUTS))}.")
    _, how = response.link_of(link, what="link")
    n_samples, seed = whole_number(n_samples, "n_samples", 2), whole_number(seed, "seed", 0, LARGEST)
    _require_last_layer(fit.structure, runner.weights)
    if is_gathering(runner.model):
        raise UnsupportedError(
            "the network is sharded by fully_shard, and a module has to hold all of it. Write la.save(path, group=...) "
            "on all ranks, and in one process Laplace.load(path, model).module() with the plain network."
        )
    runner.notice_changes(fit)
    network = with_features(runner.model, runner.weights)
    predictive = Predictive(response, how, wanted, n_samples, seed, la.softmax_temperature, posterior.sigma)
    predictive.fix(posterior.gaussian, fit.layout, fit.n_outputs, spec.budget)
    flat, alone = fit.flat or spec.class_dim is None, isinstance(outputs, str)
    made = PredictiveModule(network, predictive, runner.weights.module, wanted, alone, flat, spec.keys)
    _try(made, fit)
    if example is not None:
        _compare(la, made, example, link, how)
    return made


def _require_last_layer(structure: Any, weights: Any) -> None:
    if structure.functional:
        raise UnsupportedError(
            f"a posterior over functions ({structure.name!r}) predicts from points of the training data, and has no "
            "module. Take subset_of_weights='last_layer' with hessian_structure='full' or 'kron', or call la.predict."
        )
    if not isinstance(weights, FoundLastLayer):
        raise UnsupportedError(
            "la.module() is for subset_of_weights='last_layer', where a prediction needs the features alone; other "
            "weights need a backward pass for every output. Fit the last layer, or serve la.predict(x) itself."
        )


def _try(made: PredictiveModule, fit: Any) -> None:
    """Run the algebra on one row, so that what does not go is refused now."""
    row = fit.mean.new_zeros(1, fit.n_outputs), fit.mean.new_zeros(1, made._width)
    made.predictive(*row)


def _compare(la: Any, made: PredictiveModule, example: Any, link: str | Link | None, how: Link | None) -> None:
    """Refuse a module whose predictions are not those of the posterior."""
    prediction = predict(la, example, link_approx=link)
    at_positions = isinstance(prediction, PredictionAtPositions)
    rows = prediction.rows if at_positions else prediction
    made._flat = at_positions and prediction.positions.dim is None
    assert isinstance(rows.outputs, OutputGaussian)
    expected = {"variance": rows.outputs.variance}
    if how is None or not how.makes_draws:
        expected["mean"] = rows.mean
    inputs = example if isinstance(example, (tuple, list)) else (example,)
    found = made(*inputs)
    found = {made.outputs[0]: found} if isinstance(found, Tensor) else found
    for name, value in expected.items():
        if name not in found:
            continue
        got = found[name].reshape(-1) if made._dim == -1 else found[name].movedim(1, -1).reshape(-1)
        same = got.shape == value.reshape(-1).shape and bool(
            (got - value.reshape(-1)).abs().max() <= _TOLERANCE * value.abs().max()
        )
        if not same:
            raise ModelError(
                f"the {name} of the module is not that of la.predict for the example: the network does something "
                "behind its last layer that depends on the outputs' values, or reaches modules that cannot be copied. "
                "Let forward return the output of the last layer itself."
            )


def _arguments_of(network: nn.Module) -> tuple[frozenset[str], frozenset[str], bool]:
    """Return the names of the arguments of `forward`, which of them it requires, and whether it takes any keyword."""
    parameters = list(inspect.signature(network.forward).parameters.values())
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    required = frozenset(p.name for p in named if p.default is p.empty)
    return frozenset(p.name for p in named), required, any(p.kind is p.VAR_KEYWORD for p in parameters)


def _optional(p: inspect.Parameter) -> inspect.Parameter:
    several = p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    return p.replace(annotation=p.empty, default=p.empty if several else None if p.default is p.empty else p.default)
