"""Find out which tensors of a batch belong to its examples, and which all examples share, by running the network.

A shape does not tell: a table of five rows beside five examples looks like one row per example. If a tensor belongs to
the examples, taking its rows in another order gives the same outputs in that order. If it is shared, the outputs
change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import combinations

import torch
from torch import Tensor, nn

from laplace.linalg.autocast import rounding
from laplace.network.graphs import is_graph
from laplace.network.inputs import Inputs
from laplace.network.replica import replicate
from laplace.network.watching import is_unwatched

_EXAMPLES = 5  # how many are taken out, from the last to the first
_MOST = 5  # up to so many tensors all subsets are tried; of more, only single ones

Key = tuple[object, ...]


class Sharing:
    """Remembers which tensors are shared, for each form of inputs."""

    def __init__(self) -> None:
        self._known: dict[Key, tuple[frozenset[int], frozenset[int]]] = {}  # shared tensors, and tested candidates

    def told_apart(self, inputs: Inputs, model: nn.Module) -> Inputs:
        """Return the inputs with `shared` filled in, or None there if the network does not show it.

        The first time that several tensors come in this form, the network is run on the batch and on parts of it.
        """
        tensors = inputs.tensors()
        if len(tensors) < 2 or inputs.shared is not None or is_graph(inputs.x):
            return inputs if inputs.shared is not None else replace(inputs, shared=frozenset())
        if all(t.shape[:1] == (1,) for t in tensors):  # one example: nothing is cut apart
            return replace(inputs, shared=frozenset())
        names = tuple(inputs.x) if isinstance(inputs.x, Mapping) else ()
        key = (inputs.pairs, names, tuple(inputs.kwargs), *(t.dim() for t in tensors))
        if key in self._known:
            shared, asked = self._known[key]
            found = replace(inputs, shared=shared)
            if found.size is not None and _leading(tensors, found.size) <= asked:
                return found
        self._known.pop(key, None)
        found = _found(inputs, tensors, partial(outputs_of, model))
        if found is not None:
            self._known[key] = found
        return replace(inputs, shared=None if found is None else found[0])


def outputs_of(model: nn.Module, inputs: Inputs) -> Tensor:
    """Run the network once without recording anything. Inputs are cloned, because a network may write to them."""
    with torch.inference_mode(False), torch.no_grad():
        return inputs.map(torch.clone).call(replicate(model))


def outputs_twice(model: nn.Module, first: Inputs, second: Inputs) -> tuple[Tensor, Tensor]:
    """Run the network on a few examples, and again on these or fewer, each time as if it had never run before.

    A run that has to be watched is the first of the two.
    """
    with torch.inference_mode(False), torch.no_grad():
        replica = replicate(model)
        f = first.watched(replica) if is_unwatched(replica) else None
        if f is None:
            return outputs_of(model, first), outputs_of(model, second)
        return f, second.map(torch.clone).call(replica)


def _leading(tensors: list[Tensor], n: int) -> frozenset[int]:
    """Return the tensors that may belong to n examples, by their shape."""
    return frozenset(i for i, t in enumerate(tensors) if t.shape[:1] == (n,))


def _found(
    inputs: Inputs, tensors: list[Tensor], run: Callable[[Inputs], Tensor]
) -> tuple[frozenset[int], frozenset[int]] | None:
    """Return the shared tensors and the candidates that were tested.

    Returns None if N is 1, or if no choice reproduces the outputs of the whole batch.
    """
    try:
        f = run(inputs)
    except Exception:  # the actual run raises it again, and names the batch
        return None
    n = f.shape[0] if f.dim() else 0
    if n < 2:
        return None
    index = torch.linspace(n - 1, 0, min(n - 1, _EXAMPLES)).round().long()  # not all: a sum over a table ignores order
    expected, eps = f[index.to(f.device)], rounding({f.dtype})
    best, least, asked = None, 3 * eps**0.5, _leading(tensors, n)
    enough = 100 * eps if eps < 1e-6 else 0.0  # in half precision 100 eps is a difference that matters: take the best
    for shared in _choices(asked, len(tensors)):
        off = _off(run, replace(inputs, shared=shared).at(index), expected)
        if off <= enough:
            return shared, asked
        if off < least * (1 if best is None else 0.5):  # more is shared only where that is clearly closer
            best, least = (shared, asked), off
    return best


def _choices(asked: frozenset[int], count: int) -> Iterator[frozenset[int]]:
    """Yield sets of tensors that may be shared, smallest sets first.

    Tensors that cannot belong to the examples are in every set. Further ones are added, the main inputs last.
    """
    surely = frozenset(range(count)) - asked
    for more in range(len(asked) if len(asked) <= _MOST else 2):
        for chosen in combinations(sorted(asked, reverse=True), more):
            yield surely | frozenset(chosen)


def _off(run: Callable[[Inputs], Tensor], inputs: Inputs, expected: Tensor) -> float:
    """Return the largest difference of the outputs, relative to the largest number. Ignores non-finite entries."""
    try:
        some = run(inputs)
    except Exception:  # any error of the network on tensors that do not fit together
        return float("inf")
    if some.shape != expected.shape:
        return float("inf")
    some, expected = some.double(), expected.double()
    if not expected.numel():
        return 0.0
    if not torch.equal(some.isfinite(), expected.isfinite()):
        return float("inf")
    difference = (some - expected).nan_to_num(0.0, 0.0, 0.0).abs().max()
    return float(difference / expected.nan_to_num(0.0, 0.0, 0.0).abs().max().clamp_min(1e-300))
