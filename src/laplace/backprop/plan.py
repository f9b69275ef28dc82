"""A plan: which rule explains which parameter, and where the examples are in each layer's tensors.

`audit.py` makes it on the first batch. Later batches use it here: to get the uses of their parameters, and to check
that their examples are still where the plan expects them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from laplace.backprop.arrangement import Arrangement
from laplace.backprop.entries import at
from laplace.backprop.graph import Leaves
from laplace.backprop.layers import Call, Rule
from laplace.backprop.record import Recorded
from laplace.backprop.sending import sent_back
from laplace.backprop.uses import Use, combined
from laplace.errors import LaplaceError, ModelError
from laplace.network.inputs import Inputs
from laplace.weights.layout import Layout

MANY = 32  # examples without strays, from which on the number of examples no longer matters


@dataclass
class Owner:
    """Names a module with a rule, and the parameters that it explains: names inside it -> names in the layout."""

    rule: Rule
    keys: dict[str, str] = field(default_factory=dict)
    arrangement: Arrangement = field(default_factory=Arrangement)
    doubtful: bool = False  # whether the rule may miss something: the user's hooks, forward or own rule


class RuleFailed(ModelError):
    """Raised if a rule fails on a call of its module."""

    def __init__(self, owner: Owner, error: Exception) -> None:
        self.names = list(owner.keys.values())
        super().__init__(
            f"the gradients of {self.names[:3]} need the network, or a part of it, to run on one example alone, and "
            f"that fails: {error} Do examples interact (BatchNorm without running statistics, graphs in one batch)? "
            "Then take subset_of_weights='last_layer', which runs whole batches."
        )


@dataclass
class Learned:
    """Holds facts about a network from the batches so far. They only grow, so that making plans comes to an end."""

    called: set[str] = field(default_factory=lambda: {""})  # modules
    repeated: set[str] = field(default_factory=set)  # modules whose output is computed once for the whole batch
    lifted: set[str] = field(default_factory=set)  # modules whose output has no dimension of examples
    refused: dict[str, set[str]] = field(default_factory=dict)  # parameters -> modules that do not explain them
    closed: set[str] = field(default_factory=set)  # modules that their rules fail to open
    writes: bool = False  # whether the network writes to its inputs

    def copy(self) -> Learned:
        """Return a copy that can grow independently."""
        refused = {name: set(paths) for name, paths in self.refused.items()}
        called, repeated, lifted = set(self.called), set(self.repeated), set(self.lifted)
        return Learned(called, repeated, lifted, refused, set(self.closed), self.writes)

    def joined(self, other: Learned) -> Learned:
        """Return all facts of both."""
        both = self.copy()
        for name, paths in other.refused.items():
            both.refused.setdefault(name, set()).update(paths)
        both.called |= other.called
        both.repeated |= other.repeated
        both.lifted |= other.lifted
        both.closed |= other.closed
        both.writes |= other.writes
        return both

    def refuse(self, owners: dict[str, Owner], names: Iterable[str]) -> list[str]:
        """Pass parameters from their owners to modules above. Return the names that are at the top already."""
        stuck = []
        for name in names:
            held = {path for path, owner in owners.items() if name in owner.keys.values() and not owner.rule.whole}
            opened = {path for path in held if owners[path].rule.opens}
            self.closed |= opened  # the generic rule may still explain them there
            self.refused.setdefault(name, set()).update(held - opened)
            if not held:
                stuck.append(name)
        return stuck

    def ladder(self, site: str, name: str) -> list[str]:
        """Return the modules that may explain a parameter's use at `site`, from the nearest to the root."""
        parts = site.split(".")[:-1]
        paths = [".".join(parts[:i]) for i in range(len(parts), 0, -1)]
        return [path for path in paths if path in self.called and path not in self.refused.get(name, ())] + [""]


@dataclass
class Plan:
    """Holds all rules of a network, by module."""

    owners: dict[str, Owner]
    learned: Learned = field(default_factory=Learned)
    unused: set[str] = field(default_factory=set)  # parameters that the outputs do not depend on
    examples: int = 0  # in the audit
    outputs: tuple[int, ...] = ()  # the shape of an example's outputs
    width: int = 0  # numbers in the recorded outputs and in gradients that are written out, per example
    head: str | None = None  # the module that returns the network's output, if `inner.py` can start at its input
    inner: int = 0  # `width` without that module's output, with its input instead
    seconds: dict[bool, float] = field(default_factory=dict)  # CPU seconds per number sent back, batched or not
    seen: set[tuple[int, object]] = field(default_factory=set)  # how many examples, of which shapes, had no strays
    same: set[tuple[torch.Size, ...]] = field(default_factory=set)  # shapes of inputs at which lifting changed nothing

    def rule_of(self, name: str) -> str:
        """Return the name of the rule that explains a parameter."""
        owners = [(path, owner.rule.name) for path, owner in self.owners.items() if name in owner.keys.values()]
        rules = {f"{rule} in {path!r}" if rule == "generic" else rule for path, rule in owners}
        return "unused" if name in self.unused else " + ".join(sorted(rules))

    def uses(self, layout: Layout, calls: list[tuple[Recorded, list[Tensor]]], n: int, v: Tensor, inputs: Inputs,
             network: nn.Module, reduce: bool, first: bool) -> list[Use | None]:  # fmt: skip
        """Return the uses of all parameters from the gradients at the recorded outputs, with None for unused ones."""
        made = []
        for call, gs in calls:
            owner = self.owners[call.name]
            call.check_unwritten()
            made.append(
                (owner, Call(call.module, call.args, call.kwargs, owner.arrangement, n, call.reached, call.kept), gs)
            )
        root = self.owners.get("")
        if root is not None and root.rule.whole:
            made.append((root, Call(network, (), {"inputs": inputs}, root.arrangement, n), [v]))
        found: dict[str, list[Use]] = {name: [] for name in layout.names}
        for owner, call, gs in made:
            try:
                uses = owner.rule.uses(call, list(owner.keys), gs, reduce, first)
            except (LaplaceError, torch.OutOfMemoryError):
                raise
            except Exception as error:  # any error of a module on one example
                if owner.rule.checked:
                    raise ModelError(f"the rule {owner.rule.name} fails on a call of the layer: {error}") from error
                raise RuleFailed(owner, error) from error
            for key, use in uses.items():
                found[owner.keys[key]].append(use)
        named = zip(layout.names, layout.parts, strict=True)
        return [
            combined([use if part is None else at(use, part.index) for use in found[name]]) if found[name] else None
            for name, part in named
        ]

    @property
    def lifted(self) -> set[str]:
        """Return the recorded modules whose outputs get a dimension of examples."""
        return self.learned.lifted.intersection(self.hooked)

    def misfits(self, f: Tensor, calls: list[Recorded]) -> set[str]:
        """Return the modules whose outputs no longer have the examples where the plan expects them."""
        n = f.shape[0]
        shapes = [(call.name, shape) for call in calls for shape in call.shapes]
        found = {name for name, shape in shapes if not self.owners[name].arrangement.holds(shape, n)}
        if found or n == 1:
            return found
        each = tuple(self.owners[name].arrangement.per_example(shape, n) for name, shape in shapes)
        known = not self.seen.isdisjoint({(MANY, each), (n, each)})
        unsure = [c for c in calls if not known or self.owners[c.name].arrangement.flattened]
        found = self._strays(f, unsure) if unsure else found
        if not found and not known:
            self.seen.add((min(n, MANY), each))
        return found

    def _strays(self, f: Tensor, calls: list[Recorded]) -> set[str]:
        """Return the modules where examples have a gradient though no vector was sent back for them."""
        v = random_vectors(f)
        v[1::2] = 0
        edges = [(call.name, edge) for call in calls for edge in call.edges]
        gs = sent_back(f, [edge for _, edge in edges], v)
        found = set()
        for (name, _), g in zip(edges, gs, strict=True):
            split = None if g is None else self.owners[name].arrangement.split(g, f.shape[0])
            if split is not None and bool(split[1::2].abs().gt(0).any()):
                found.add(name)
        return found

    def read_elsewhere(self, f: Tensor, calls: list[Recorded], leaves: Leaves, inputs: Inputs) -> set[str]:
        """Return the parameters that are read, on the way to f, outside of the modules that explain them."""
        spans: dict[str, list[range]] = {}
        edges: dict[str, list[GradientEdge]] = {}
        for owner in self.owners.values():
            if not owner.rule.whole:  # the whole-network rule explains everything
                spans.update((name, []) for name in owner.keys.values())
        for call in calls:
            for name in self.owners[call.name].keys.values():
                spans[name].append(call.span)
                edges.setdefault(name, []).extend(call.edges)
        if (root := self.owners.get("")) is not None and root.rule.whole:
            spans = {name: found for name, found in spans.items() if name not in root.keys.values()}
        return leaves.read_elsewhere(f, spans, edges, inputs.tensors())

    def without(self, paths: Collection[str]) -> Learned:
        """Return what is known, adding that these modules do not explain their parameters."""
        return self.refusing(self.explained_by(paths))

    def refusing(self, names: Iterable[str]) -> Learned:
        """Return what is known, adding that these parameters are not explained by their owners."""
        learned = self.learned.copy()
        learned.refuse(self.owners, names)
        return learned

    def explained_by(self, paths: Collection[str]) -> list[str]:
        """Return the parameters that these modules own."""
        return [name for path in paths for name in self.owners[path].keys.values()]

    @property
    def doubtful(self) -> bool:
        """Return whether a rule that explains the examples so far may fail on others."""
        return any(owner.doubtful for owner in self.owners.values())

    @property
    def hooked(self) -> list[str]:
        """Return the modules whose calls must be recorded."""
        return [name for name, owner in self.owners.items() if not owner.rule.whole and not owner.rule.opens]

    @property
    def opened(self) -> dict[str, tuple[Rule, Collection[str]]]:
        """Return the modules whose inner maps must be recorded, with their rules and the asked parameters."""
        return {name: (owner.rule, owner.keys) for name, owner in self.owners.items() if owner.rule.opens}


def random_vectors(f: Tensor) -> Tensor:
    """Return random vectors of output space, the same on every call."""
    return torch.randn(f.shape, generator=torch.Generator().manual_seed(0)).to(f)


def zeros_for(g: Tensor | None, shape: torch.Size, dtype: torch.dtype, like: Tensor) -> Tensor:
    """Return the gradient, or zeros if the outputs do not depend on it."""
    return torch.zeros(shape, dtype=dtype, device=like.device) if g is None else g
