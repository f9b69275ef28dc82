"""Estimate, in `laplace.plan`, what each structure would cost on a network, before anything is fitted.

The network runs on two examples of a batch, which shows the rules, the vectors and the sizes. From these follow the
peak memory of a fit (less is kept: `la.coverage().bytes`) and its cost. The cost is an estimate in multiplications. It
is right to a factor of about two if matrix products dominate. It is too low for tiny networks, whose time goes into
calling modules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from textwrap import wrap
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.data import DataLoader
from torch.utils.flop_counter import FlopCounterMode

from laplace.backprop.network import Network
from laplace.backprop.network_moments import NetworkMoments
from laplace.budget import in_bytes
from laplace.checks import LARGEST, choice, flag, how_many, shown, whole_number
from laplace.curvature import Estimator
from laplace.errors import InputError, LaplaceError, OptionError
from laplace.inference.accumulate_spread import require_spreadable
from laplace.inference.shared import require_divisible
from laplace.inference.targets import counted
from laplace.keywords import refuse_unknown_keywords
from laplace.laplace import Laplace
from laplace.likelihoods import Likelihood
from laplace.linalg.autocast import plain
from laplace.network.batches import device_of, split
from laplace.network.datasets import loader_of
from laplace.network.loaders import dataloader_of
from laplace.spec import PlanOptions
from laplace.structures import STRUCTURES, Structure
from laplace.structures.blockdiag import BlockDiagonal
from laplace.structures.functional import FUNCTIONAL
from laplace.structures.functional.structure import DEFAULT_POINTS
from laplace.structures.owners import most_on_one_rank
from laplace.weights import Subset

if TYPE_CHECKING:
    from typing_extensions import Unpack

_EXAMPLES = 2
_VECTORS = 64  # the most vectors sent back to measure the cost of one
_APPROXIMATIONS = {made.name: approximation for approximation, made in FUNCTIONAL.items()}
_ASSUMED = 10_000  # examples, if neither the loader nor the user says how many
_CLOSEST = ("full", "block", "ekfac", "kron", "diag")  # to the whole curvature, closest first
_AFFORDABLE = 100.0  # a recommended fit costs at most so many epochs, about one usual training
_QUICK = 1e11  # or so many multiplications, a few seconds, if an epoch is very short
_KINDS = STRUCTURES | {made.name: made for made in FUNCTIONAL.values()}


@dataclass(frozen=True)
class Option:
    """Describes the cost of one structure on a network.

    Attributes:
        structure: the name of the structure.
        bytes: the peak memory of a fit, on each rank. `la.coverage().bytes` is the memory that is kept.
        epochs: the cost of a fit with its decompositions, in epochs of training on the same data by one process. Of
            several ranks, the cost of each, without the time of the exchange.
        fits: whether there is enough memory.
        reason: why the structure cannot be used, or ''.
    """

    structure: str
    bytes: int
    epochs: float
    fits: bool
    reason: str = ""

    def cells(self) -> tuple[str, ...]:
        """Return the cells of a row of the table."""
        if self.reason:
            return self.structure, "-", "-", "no: see below"
        return self.structure, in_bytes(self.bytes), _rounded(self.epochs, 3), "yes" if self.fits else "no: too large"


def _rounded(value: float, digits: int) -> str:
    """Write a number with so many significant digits, and large ones without an exponent."""
    text = f"{value:.{digits}g}"
    return f"{float(text):,.0f}" if value > 1 and "e" in text else text


@dataclass(frozen=True)
class Preview:
    """Lists all structures on a network, and prints as a table. `preview["kron"]` is one of them.

    Attributes:
        title: the network and the data in two lines, or three for several ranks.
        options: one `Option` per structure.
        n_data: the number of examples that the costs are for.
        recommended: the name of the structure to start with. None if none fits.
        why: the reason, in a sentence.
    """

    title: str
    options: tuple[Option, ...]
    n_data: int
    recommended: str | None
    why: str

    def __iter__(self) -> Iterator[Option]:
        return iter(self.options)

    def __getitem__(self, structure: str) -> Option:
        options = {option.structure: option for option in self.options}
        return options[choice(structure, options, "structure")]

    def __repr__(self) -> str:
        rows = [
            ("hessian_structure", "peak memory", "fit, epochs", "fits"),
            *(option.cells() for option in self.options),
        ]
        widths = [max(len(row[i]) for row in rows) for i in range(4)]
        lines = [f"{a:<{widths[0]}}  {b:>{widths[1]}}  {c:>{widths[2]}}  {d}".rstrip() for a, b, c, d in rows]
        table = [lines[0], "-" * max(map(len, lines)), *lines[1:]]
        unit = "One epoch: a forward and a backward pass over this data. Costs count products."
        words = [unit, "", *self._reasons(), *wrap(f"Recommended: {self.why}", 80)]
        return "\n".join([self.title, "", *table, "", *words])

    def _reasons(self) -> list[str]:
        """Return why structures cannot be used, each reason once."""
        reasons = dict.fromkeys(option.reason for option in self.options if option.reason)
        without = {why: [option.structure for option in self.options if option.reason == why] for why in reasons}
        lines = [line for why, names in without.items() for line in wrap(f"Not {'; '.join(names)}: {why}.", 80)]
        return [*lines, ""] if lines else []


@refuse_unknown_keywords
def plan(
    model: nn.Module,
    batch: Any,
    likelihood: Likelihood | str,
    subset_of_weights: Subset | str | Sequence[str] | Callable[[str, nn.Parameter], bool] = "last_layer",
    *,
    hessian_structure: Structure | Sequence[Structure] = (),
    curvature: Estimator | str | None = None,
    n_data: int | None = None,
    ranks: int = 1,
    shard_factors: bool = False,
    **options: Unpack[PlanOptions],
) -> Preview:
    """Return the peak memory and the estimated cost of each structure, whether it fits, and a recommendation.

    The recommended structure is the one closest to the whole curvature (in the order 'full', 'block', 'ekfac', 'kron',
    'diag') that fits into memory and costs at most 100 epochs of training, or a few seconds. If each costs more, it is
    the cheapest.

    Args:
        model: the network. It runs on two examples.
        batch: a batch of the training loader; or the loader itself, a dataset, a DataModule or a transformers Trainer.
        likelihood: as in `Laplace`.
        subset_of_weights: as in `Laplace`.
        hessian_structure: further structures that get a row: your own, or one of ours with other options. They are
            never recommended.
        curvature: as in `Laplace`.
        n_data: the number of training examples. By default the size of the loader, or 10,000 for a single batch.
        ranks: on how many processes the data is divided. Memory and cost are those of each: they share the examples and
            the eigendecompositions of blocks; every rank keeps all sums.
        shard_factors: with several ranks, whether each keeps the sums of its own layers alone, as in `fit`. The memory
            is then that of the rank with the most of them, and of one more layer.
        **options: further options of `Laplace`, including those of structures.

    Returns:
        A `Preview`, which prints as a table.

    Raises:
        OptionError: an option is unknown, or a value is out of range.
        InputError: the batch does not fit the network or the likelihood.
        ModelError: the network does not allow the chosen weights; the message names the layer.
    """
    others: dict[str, Any] = {**options, "curvature": curvature}
    choice(others.pop("functional_approximation", "sod"), FUNCTIONAL, "functional_approximation")  # the table has both
    own = {key: others.pop(key) for key in list(others) if any(key in made.options for made in _KINDS.values())}
    la = Laplace(model, likelihood, subset_of_weights, "full", **others)  # which accepts every prior
    further = _further(hessian_structure)
    batch = loader_of(dataloader_of(batch, "train"))
    size = _size(batch, la) if n_data is None else whole_number(n_data, "n_data", 1, LARGEST)
    number = _ASSUMED if size is None else size

    def structure(name: str) -> Structure:
        """Return a structure with the given options that belong to it."""
        if name in further:
            return Laplace(model, likelihood, subset_of_weights, further[name], **others).structure
        made = _KINDS[name]
        given = {key: value for key, value in own.items() if key in made.options}
        if made.functional:
            given = {"n_subset": min(DEFAULT_POINTS, number), "functional_approximation": _APPROXIMATIONS[name]} | given
        kind = "gp" if made.functional else name
        return Laplace(model, likelihood, subset_of_weights, kind, **others, **given).structure

    ranks, shard_factors = whole_number(ranks, "ranks"), flag(shard_factors, "shard_factors")
    if shard_factors and ranks == 1:
        raise OptionError(
            "shard_factors=True divides the factors over several ranks, and ranks=1 here. Write ranks= how many "
            "processes will fit together, or leave out shard_factors=True."
        )
    with plain():
        names = (*_KINDS, *further)
        return _previewed(la, _first(batch), number, size is None, names, structure, ranks, shard_factors)


def _further(given: Any) -> dict[str, Structure]:
    """Return the structures that the user gave, by the names of their rows."""
    structures = given if isinstance(given, (list, tuple)) else (given,)
    for each in structures:
        if not isinstance(each, Structure):
            raise OptionError(
                f"hessian_structure={shown(each)} must be a structure, or several, as in "
                "hessian_structure=[Mine(), Kron(damping=True)]. The table has all of ours with their default options."
            )
    return {each.described: each for each in structures if each.described not in _KINDS}


def _several(batch: Any) -> bool:
    """Return whether this is a list of batches."""
    return isinstance(batch, list) and len(batch) > 0 and isinstance(batch[0], (tuple, list, Mapping))


def _size(batch: Any, la: Laplace) -> int | None:
    """Return how many examples a loader or a list of batches has. None if only reading it all would tell."""
    if _several(batch):
        keys = la.runner.spec.keys
        return sum(len(split(part, keys, i, la.model).y) for i, part in enumerate(batch))
    if not isinstance(batch, DataLoader):
        return None
    for sized in (batch.sampler, batch.dataset):  # a sampler may draw a part of the data
        try:
            return len(sized) or None  # type: ignore[arg-type]
        except TypeError:
            continue
    return None


def _first(batch: Any) -> Any:
    """Return the batch, or the first one of a loader or of a list of batches."""
    if not _several(batch) and not isinstance(batch, DataLoader):
        return batch
    for first in batch:
        return first
    raise InputError("the loader gave no batch. Give a loader with at least one, or a batch (x, y).")


def _recommended(options: Sequence[Option], limit: float) -> tuple[str | None, str]:
    """Return the structure to start with, which may cost at most `limit` epochs, and the reason."""
    fitting = {option.structure: option for option in options if option.fits}
    candidates = [fitting[name] for name in _CLOSEST if name in fitting]
    if not candidates:
        tried = ", ".join(_CLOSEST)
        return None, f"nothing; none of {tried} fits. Take fewer weights, or a larger memory_budget."
    found = next((option for option in candidates if option.epochs <= limit), None)
    most = f"{_rounded(limit, 3)} epochs" + (", a few seconds" if limit > _AFFORDABLE else "")
    if found is None:
        name = min(candidates, key=lambda option: option.epochs).structure
        return name, (
            f"{name}, the cheapest: every structure costs more than {most}. With curvature='sketch' one "
            "vector per example is sent back."
        )
    name, short = found.structure, ", which take seconds here," if found.epochs > _AFFORDABLE else ""
    cost = f"The fit costs about {_rounded(found.epochs, 2)} epochs{short} and {in_bytes(found.bytes)}."
    if name == "full":
        return name, f"full, which leaves nothing out. {cost}"
    closer = _CLOSEST[: _CLOSEST.index(name)]
    missing = ", ".join(other for other in closer if other not in fitting)
    dear = ", ".join(other for other in closer if other in fitting)
    reasons = [f"{missing} cannot be used"] if missing else []
    reasons += [f"{dear} would cost more than {most}"] if dear else []
    return name, f"{name}, the closest to the whole curvature ({'; '.join(reasons)}). {cost}"


def _previewed(
    la: Laplace,
    batch: Any,
    n_data: int,
    assumed: bool,
    names: Sequence[str],
    made: Callable[[str], Structure],
    ranks: int,
    shard_factors: bool,
) -> Preview:
    runner = la.runner
    few = split(batch, runner.spec.keys, 0, la.model).labels(0, _EXAMPLES)
    inputs = runner.told_apart(few.inputs.to(device_of(la.model))).part(0, _EXAMPLES)
    weights = runner.find_weights(inputs)
    engine = runner.engine(weights)
    estimator = runner.chosen_curvature(engine, inputs)
    engine.forward(inputs)  # makes the plan
    counter = FlopCounterMode(display=False)
    with counter:
        forward = engine.forward(inputs)
    forward, targets, _ = counted(forward, few, la.likelihood)
    f, y = forward.outputs, targets.y
    n, once = forward.positions.n, counter.get_total_flops()
    with torch.no_grad():
        output = estimator(la.likelihood, f, y, torch.Generator().manual_seed(0))
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
    sent = counter.get_total_flops() * len(vectors) / len(some)  # the counter starts at 0 each time
    epoch = 3 * once / n  # a forward pass, and twice as much for a backward pass to the weights
    found = []
    for name in names:
        try:
            structure = made(name)
            la.prior.check(layout, structure.takes)
            require_divisible(structure, ranks)
            if shard_factors:
                require_spreadable(structure, checkpoint=False)
        except LaplaceError as error:
            found.append(Option(name, 0, 0.0, False, str(error).split(". ")[0].removesuffix(".")))
            continue
        needed = structure.memory(moments, layout, f.element_size())
        if shard_factors and isinstance(structure, BlockDiagonal):
            needed = most_on_one_rank(structure, moments, layout, f.element_size(), ranks)
        each, decomposed = structure.work(moments, layout, len(vectors) if isinstance(engine, Network) else 1)
        if estimator.exact_hessian:
            each = 4.0 * layout.n_params * once / n  # one Hessian-vector product per weight
        runs, back = structure.runs(layout, n_data)
        once_per_fit = 2 * decomposed / n_data / (ranks if isinstance(structure, BlockDiagonal) else 1)
        total = ((runs * once + back * sent) / n + 2 * each) / ranks + once_per_fit
        found.append(Option(name, needed, total / max(1.0, epoch), runner.spec.budget.has(needed, f.device)))
    title = (
        f"{type(la.model).__name__}: {how_many(layout.n_params, 'uncertain weight')} in "
        f"{how_many(len(layout.names), 'tensor')}, {how_many(f.shape[1], 'output')};\n"
        f"curvature {estimator.name!r}, {how_many(len(vectors), 'vector')} per example; {how_many(n_data, 'example')}"
        + (" (assumed; see n_data=)" if assumed else "")
        + (
            ""
            if ranks == 1
            else f",\n{-(-n_data // ranks):,} on each of {ranks} ranks; memory and cost are of each rank"
        )
    )
    return Preview(
        title, tuple(found), n_data, *_recommended(found, max(_AFFORDABLE, _QUICK / max(1.0, epoch * n_data)))
    )
