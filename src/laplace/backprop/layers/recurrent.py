"""Open nn.RNN, nn.LSTM and nn.GRU: their weights are used at every step, with the input and the last state as a.

The module's own kernel hides its gates, so we compute its steps here. All input projections of a layer are one tensor.
The gradient there is also the gradient of what the state adds to it, except that a GRU's reset gate lies between.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from laplace.backprop.activations import Stored
from laplace.backprop.layers.base import Call, Inner, Rule, reached
from laplace.backprop.layers.linear import bias, columns
from laplace.backprop.outer import Outer
from laplace.backprop.uses import Use

State = tuple[Tensor, ...]  # (N, H) each: h, and c of an LSTM
_KEYS = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")


class Recurrent(Rule):
    """Computes G_ih = sum over steps of g x_t^T and G_hh = sum over steps of g h_(t-1)^T, per layer and direction."""

    name, opens = "recurrent", True

    def opened(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, list[Inner]]:
        assert isinstance(module, nn.RNNBase)
        given = dict(zip(("input", "hx"), args, strict=False)) | kwargs
        x, start = given["input"], given.get("hx")
        if not isinstance(x, Tensor) or x.dim() != 3 or module.proj_size:
            raise NotImplementedError("only batched sequences in one tensor, without projected states, can be opened")
        steps = 1 if module.batch_first else 0
        states = 2 if isinstance(module, nn.LSTM) else 1
        if start is None:
            directions = 2 if module.bidirectional else 1
            zeros = x.new_zeros(module.num_layers * directions, x.shape[1 - steps], module.hidden_size)
            start = (zeros,) * states
        start = start if isinstance(start, tuple) else (start,)
        last: list[State] = []
        inner: list[Inner] = []
        for layer in range(module.num_layers):
            outs = []
            for ending in ("", "_reverse") if module.bidirectional else ("",):
                part = f"_l{layer}{ending}"
                w_ih, w_hh = (getattr(module, key + part) for key in _KEYS[:2])
                b_ih, b_hh = (getattr(module, key + part) if module.bias else None for key in _KEYS[2:])
                projected = reached(F.linear(x, w_ih, b_ih), (w_hh, b_hh))
                state = tuple(s[len(last)] for s in start)
                out, seen, state = _run(module, projected.movedim(steps, 0), state, w_hh, b_hh, bool(ending))
                outs.append(out.movedim(0, steps))
                last.append(state)
                read = (x, *(t.movedim(0, steps) for t in seen))
                inner.append(Inner(part, read, (projected,), tuple(key + part for key in _KEYS)))
            x = torch.cat(outs, 2)
        final = tuple(torch.stack(states) for states in zip(*last, strict=True))
        return (x, final if isinstance(module, nn.LSTM) else final[0]), inner

    def uses(self, call: Call, keys: list[str], gs: list[Tensor], reduce: bool, first: bool) -> dict[str, Use]:
        part = call.kwargs["part"]
        g = columns(call.gradient(gs[0]))  # (K, N, 1, O, T)
        x, h, *reset = (columns(call.by_example(t).to(g.dtype)) for t in call.args)  # (N, 1, I, T) each
        inside = g
        if reset:
            others, new = g.split([2 * reset[0].shape[2], reset[0].shape[2]], 3)
            inside = torch.cat([others, new * reset[0]], 3)
        makers: dict[str, Callable[[], Use]] = {
            "weight_ih": lambda: Outer(Stored(x), g, reduce, first),
            "weight_hh": lambda: Outer(Stored(h), inside, reduce, first),
            "bias_ih": lambda: bias(g, None, first),
            "bias_hh": lambda: bias(inside, None, first),
        }
        return {key + part: make() for key, make in makers.items() if key + part in keys}


def _run(
    module: nn.RNNBase,
    projected: Tensor,  # (T, N, gates)
    state: State,
    weight: Tensor,
    bias_hh: Tensor | None,
    backwards: bool,
) -> tuple[Tensor, tuple[Tensor, ...], State]:
    """Return all states h, (T, N, H), what each step has read, and the last state.

    A step reads the state h before it. A GRU's reset gate is returned with it.
    """
    outs: list[Tensor] = []
    seen: list[tuple[Tensor, ...]] = []
    for gates in projected.flip(0) if backwards else projected:
        before = state[0]
        state, *more = _step(module, gates, F.linear(before, weight, bias_hh), state)
        outs.append(state[0])
        seen.append((before, *more))
    if backwards:
        outs, seen = outs[::-1], seen[::-1]
    return torch.stack(outs), tuple(torch.stack(tensors) for tensors in zip(*seen, strict=True)), state


def _step(module: nn.RNNBase, x: Tensor, h: Tensor, state: State) -> tuple[Any, ...]:  # x, h: (N, gates)
    """Return the next state, and for a GRU its reset gate."""
    if isinstance(module, nn.LSTM):
        i, f, g, o = (x + h).chunk(4, 1)
        c = f.sigmoid() * state[1] + i.sigmoid() * g.tanh()
        return ((o.sigmoid() * c.tanh(), c),)
    if isinstance(module, nn.GRU):
        (xr, xz, xn), (hr, hz, hn) = x.chunk(3, 1), h.chunk(3, 1)
        reset, keep = (xr + hr).sigmoid(), (xz + hz).sigmoid()
        new = (xn + reset * hn).tanh()
        return (new + keep * (state[0] - new),), reset
    return ((torch.relu(x + h) if module.mode == "RNN_RELU" else (x + h).tanh(),),)
