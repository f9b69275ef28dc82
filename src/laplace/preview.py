"""`laplace.plan`: what each structure would cost on a network, before anything is fitted.

The network runs on two examples of a batch, so that the rules, the vectors and the sizes are known. From these follow
the memory at the peak of a fit (what stays is less: `la.coverage().bytes`), and the cost, which is an estimate in
multiplications: true to a factor of two or so where products dominate, too low for tiny networks, which spend their
time on being called.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader
from torch.utils.flop_counter import FlopCounterMode

from laplace.backprop.network import Network, NetworkMoments
from laplace.batches import device_of, split
from laplace.budget import in_bytes
from laplace.checks import choice, whole_number
from laplace.counting import counted
from laplace.curvature import CURVATURES
from laplace.errors import InputError, LaplaceError
from laplace.functional import FUNCTIONAL
from laplace.functional.structure import DEFAULT_POINTS
from laplace.laplace import Laplace
from laplace.precision import plain
from laplace.structures import STRUCTURES, Structure

_EXAMPLES = 2
_VECTORS = 64  # sent back to see what one costs
_APPROXIMATIONS = {made.name: approximation for approximation, made in FUNCTIONAL.items()}
_KINDS = STRUCTURES | {made.name: made for made in FUNCTIONAL.values()}


@dataclass(frozen=True)
class Option:
    """One structure on a network.

    Attributes:
        structure: its name.
        bytes: memory at the peak of a fit; `la.coverage().bytes` is what stays.
        epochs: cost of a fit, decompositions included, in epochs of training on the same data.
        fits: whether the memory is there.
        reason: why there is none of this structure, or nothing.
    """

    structure: str
    bytes: int
    epochs: float
    fits: bool
    reason: str = ""

    def cells(self) -> tuple[str, ...]:
        """As a row of the table."""
        if self.reason:
            return self.structure, "-", "-", f"no: {self.reason}"
        return self.structure, in_bytes(self.bytes), f"{self.epochs:.3g}", "yes" if self.fits else "no: too large"


@dataclass(frozen=True)
class Preview:
    """All structures on a network; `print` it for the table, `preview["kron"]` is one of them.

    Attributes:
        title: the network in a line.
        options: an `Option` for each structure.
    """

    title: str
    options: tuple[Option, ...]

    def __iter__(self) -> Iterator[Option]:
        return iter(self.options)

    def __getitem__(self, structure: str) -> Option:
        options = {option.structure: option for option in self.options}
        return options[choice(structure, options, "structure")]

    def __repr__(self) -> str:
        fitting = [option.structure for option in self.options if option.fits]
        return f"<{len(self.options)} structures, {len(fitting)} fit: {', '.join(fitting)}>"

    def __str__(self) -> str:
        rows = [
            ("hessian_structure", "peak memory", "fit, epochs", "fits"),
            *(option.cells() for option in self.options),
        ]
        widths = [max(len(row[i]) for row in rows) for i in range(4)]
        lines = [f"{a:<{widths[0]}}  {b:>{widths[1]}}  {c:>{widths[2]}}  {d}".rstrip() for a, b, c, d in rows]
        return "\n".join([self.title, "", lines[0], "-" * max(map(len, lines)), *lines[1:]])


def plan(
    model: nn.Module,
    batch: Any,
    likelihood: Any,
    subset_of_weights: Any = "all",
    *,
    curvature: str = "ggn",
    n_data: int = 10_000,
    **options: Any,
) -> Preview:
    """Print each structure with its peak memory, its estimated cost for `n_data` examples, and whether it fits.

    Args:
        model: the network; two examples are run through it.
        batch: one of the training loader, or the loader itself.
        likelihood: as of `Laplace`.
        subset_of_weights: as of `Laplace`.
        curvature: as of `Laplace`.
        n_data: examples that a fit would see.
        **options: further ones of `Laplace`, those of structures included.

    Returns:
        The table.

    Raises:
        OptionError: an option that does not exist, or a value outside its range.
        InputError: a batch that does not fit.
        ModelError: a network that cannot be treated as asked.
    """
    number = whole_number(n_data, "n_data")
    own = {key: options.pop(key) for key in list(options) if any(key in made.options for made in _KINDS.values())}
    options |= {"curvature": curvature}
    la = Laplace(model, likelihood, subset_of_weights, "diag", **options)

    def structure(name: str) -> Structure:
        """One that is made with those of its own options that were given."""
        made = _KINDS[name]
        given = {key: value for key, value in own.items() if key in made.options}
        if made.functional:
            given = {"n_subset": min(DEFAULT_POINTS, number), "functional_approximation": _APPROXIMATIONS[name]} | given
        kind = "gp" if made.functional else name
        return Laplace(model, likelihood, subset_of_weights, kind, **options, **given).structure

    with plain():
        preview = _previewed(la, _first(batch), number, structure)
    print(preview)
    return preview


def _first(batch: Any) -> Any:
    """The batch, or the first one of a loader or of a list of batches."""
    several = isinstance(batch, list) and len(batch) > 0 and isinstance(batch[0], (tuple, list, Mapping))
    if not several and not isinstance(batch, DataLoader):
        return batch
    for first in batch:
        return first
    raise InputError("the loader gave no batch.")


def _previewed(la: Laplace, batch: Any, n_data: int, made: Callable[[str], Structure]) -> Preview:
    few = split(batch, la._keys, 0, la.model).labels(0, _EXAMPLES)
    inputs = few.inputs.to(device_of(la.model)).part(0, _EXAMPLES)
    weights = la._find_weights(inputs, keep=False)
    engine = la._engine(weights)
    engine.forward(inputs)  # makes the plan
    counter = FlopCounterMode(display=False)
    with counter:
        forward = engine.forward(inputs)
    forward, targets = counted(forward, few, la.likelihood)
    f, y = forward.outputs, targets.y
    kind = "ggn" if la.curvature == "hessian" else la.curvature
    n, once = forward.positions.n, counter.get_total_flops()
    with torch.no_grad():
        output = CURVATURES[kind](la.likelihood, f, y, la.curvature_samples, torch.Generator().manual_seed(0))
        vectors = forward.vectors(output)
        some = vectors[:_VECTORS]
        with counter:
            sent_back = forward.sent(some)
        moments = (
            NetworkMoments(list(sent_back), engine)
            if isinstance(engine, Network)
            else next(iter(forward.moments(output)))
        )
    layout = weights.layout
    sent = counter.get_total_flops() * len(vectors) / len(some)  # the counter starts anew each time
    epoch = 3 * once / n  # a forward pass, and twice as much for a backward pass to the weights
    found = []
    for name in _KINDS:
        try:
            structure = made(name)
        except LaplaceError as error:
            found.append(Option(name, 0, 0.0, False, str(error).split(". ")[0]))
            continue
        needed = structure.memory(moments, layout, f.element_size())
        each, decomposed = structure.work(moments, layout, len(vectors) if isinstance(engine, Network) else 1)
        if la.curvature == "hessian":
            each = 4.0 * layout.n_params * once / n  # a Hessian-vector product each
        runs, back = structure.runs(layout, n_data)
        total = (runs * once + back * sent) / n + 2 * each + 2 * decomposed / n_data
        found.append(Option(name, needed, total / max(1.0, epoch), la._budget.has(needed, f.device)))
    title = (
        f"{type(la.model).__name__}: {layout.n_params:,} uncertain weights in {len(layout.names)} tensors, "
        f"{f.shape[1]} outputs; curvature {la.curvature!r}, {len(vectors)} vectors per example; {n_data:,} examples"
    )
    return Preview(title, tuple(found))
