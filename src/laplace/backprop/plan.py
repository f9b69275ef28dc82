"""Which rule explains which parameter: decided on a few examples of the first batch, and audited against autograd.

Every parameter starts with the rule of its module's type. Where a module was not called, or the rule's gradient is not
autograd's, the parameter goes to the generic rule at the nearest module above that was called, up to the whole network.
A gradient that not even that explains is an error that names the layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from laplace.backprop.arrangement import Arrangement, detect
from laplace.backprop.layers import RULES, Call, Generic, Rule
from laplace.backprop.layers.generic import WholeNetwork
from laplace.backprop.record import Recorded, Recorder
from laplace.backprop.uses import Use, combined
from laplace.batches import Inputs
from laplace.errors import LaplaceError, ModelError, quiet
from laplace.weights.layout import Layout

EXAMPLES = 5  # on which the audit is made


@dataclass
class Owner:
    """A module with a rule, and the parameters that it explains: their names inside it -> in the layout."""

    rule: Rule
    keys: dict[str, str] = field(default_factory=dict)
    arrangement: Arrangement = field(default_factory=Arrangement)


@dataclass
class Plan:
    """The rules of a network."""

    owners: dict[str, Owner]
    repeated: set[str] = field(default_factory=set)  # modules whose output is computed once for the whole batch
    unused: set[str] = field(default_factory=set)  # parameters that the outputs do not depend on
    examples: int = 0  # that the audit saw
    width: int = 0  # numbers in the recorded outputs, per example
    seconds: dict[bool, float] = field(default_factory=dict)  # of a backward pass, batched or not

    def rule_of(self, name: str) -> str:
        """The name of the rule that explains a parameter."""
        owners = [(path, owner.rule.name) for path, owner in self.owners.items() if name in owner.keys.values()]
        rules = {f"{rule} in {path!r}" if rule == "generic" else rule for path, rule in owners}
        return "unused" if name in self.unused else " + ".join(sorted(rules))

    def uses(self, layout: Layout, calls: list[tuple[Recorded, list[Tensor]]], n: int, v: Tensor, inputs: Inputs,
             network: nn.Module, reduce: bool, first: bool) -> list[Use | None]:  # fmt: skip
        """The uses of all parameters, given the gradients at the outputs of every recorded call; None where unused."""
        found: dict[str, list[Use]] = {name: [] for name in layout.names}
        for call, gs in calls:
            owner = self.owners[call.name]
            call.check_unwritten()
            made = Call(call.module, call.args, call.kwargs, owner.arrangement, n)
            for key, use in owner.rule.uses(made, list(owner.keys), gs, reduce, first).items():
                found[owner.keys[key]].append(use)
        root = self.owners.get("")
        if root is not None and isinstance(root.rule, WholeNetwork):
            made = Call(network, (), {"inputs": inputs}, root.arrangement, n)
            for key, use in root.rule.uses(made, list(root.keys), [v], reduce, first).items():
                found[root.keys[key]].append(use)
        named = zip(layout.names, layout.parts, strict=True)
        return [
            combined([use if part is None else use.at(part.index) for use in found[name]]) if found[name] else None
            for name, part in named
        ]

    def fits(self, calls: list[Recorded], n: int) -> bool:
        """Whether the examples are where they were when the plan was made; another length may show otherwise."""
        return all(self.owners[call.name].arrangement.holds(shape, n) for call in calls for shape in call.shapes)

    @property
    def hooked(self) -> list[str]:
        """The modules whose calls must be recorded."""
        return [name for name, owner in self.owners.items() if not isinstance(owner.rule, WholeNetwork)]


def make_plan(replica: nn.Module, layout: Layout, inputs: Inputs) -> Plan:
    """The plan for a network, from a few examples."""
    inputs = inputs.part(0, EXAMPLES)
    names = {id(p): name for name, p in replica.named_parameters() if name in set(layout.names)}
    called = _called(replica, inputs)
    sites: dict[str, list[str]] = {name: [] for name in layout.names}  # where each tensor is registered
    for path, module in replica.named_modules():
        for key, p in module._parameters.items():
            if p is not None and id(p) in names:
                sites[names[id(p)]].append(f"{path}.{key}" if path else key)
    above = dict.fromkeys(layout.names, 0)  # how many called modules above its own a parameter is handed to
    repeated: set[str] = set()
    while True:
        plan = Plan(_owners(replica, sites, above, called), set(repeated))
        if not _audit(plan, replica, layout, inputs, above, repeated, sites, called):
            return plan


def _called(replica: nn.Module, inputs: Inputs) -> set[str]:
    called: set[str] = {""}
    handles = [
        module.register_forward_pre_hook(lambda m, a, name=name: called.add(name))
        for name, module in replica.named_modules()
    ]
    with torch.inference_mode(False), torch.no_grad():
        inputs.call(replica)
    for handle in handles:
        handle.remove()
    return called


def _ladder(site: str, called: set[str]) -> list[str]:
    """The called modules that hold a parameter, from the nearest to the root."""
    parts = site.split(".")[:-1]
    paths = [".".join(parts[:i]) for i in range(len(parts), -1, -1)]
    return [path for path in paths if path in called]


def _owners(
    replica: nn.Module, sites: dict[str, list[str]], above: dict[str, int], called: set[str]
) -> dict[str, Owner]:
    owners: dict[str, Owner] = {}
    for name, places in sites.items():
        for site in places:
            ladder = _ladder(site, called)
            path = ladder[min(above[name], len(ladder) - 1)]
            own = site.rpartition(".")[0]
            module = replica.get_submodule(path)
            special = type(module) in RULES and path == own and above[name] == 0
            if path not in owners:
                rule = RULES[type(module)] if special else WholeNetwork() if path == "" else Generic()
                owners[path] = Owner(rule)
            elif not special and not isinstance(owners[path].rule, Generic):
                owners[path].rule = WholeNetwork() if path == "" else Generic()  # one rule for all of a module
            key = site.removeprefix(f"{path}.") if path else site
            if name not in owners[path].keys.values():
                owners[path].keys[key] = name
    return owners


def _audit(plan: Plan, replica: nn.Module, layout: Layout, inputs: Inputs, above: dict[str, int], repeated: set[str],
           sites: dict[str, list[str]], called: set[str]) -> bool:  # fmt: skip
    """Compare every parameter's gradient with autograd's; whether something had to be changed for another try."""
    parameters = dict(replica.named_parameters())
    recorder = Recorder(replica, plan.hooked, plan.repeated)
    try:
        with torch.inference_mode(False), torch.enable_grad():
            recorder.start(inputs.size)
            f = inputs.call(replica)
            recorder.active = False
        if not f.requires_grad:
            raise ModelError("the network's output does not depend on any uncertain weight (is it detached?).")
        n = f.shape[0]
        v = torch.randn(f.shape, generator=torch.Generator().manual_seed(0)).to(f)
        alone = torch.eye(n, dtype=v.dtype, device=v.device).unsqueeze(2) * v  # (N, N, C): each example by itself
        tracked = [parameters[name] for name in layout.names]
        try:
            expected = torch.autograd.grad(f, tracked, v, retain_graph=True, allow_unused=True)
        except RuntimeError as error:
            raise ModelError(f"autograd cannot differentiate the network: {error}") from error
        edges = [edge for call in recorder.calls for edge in call.edges]
        touched = _sent(f, edges, alone, plan)
        sent = torch.autograd.grad(f, edges, v, allow_unused=True) if edges else ()
    finally:
        recorder.remove()
    plan.examples = n
    plan.unused = {name for name, g in zip(layout.names, expected, strict=True) if g is None}
    plan.width = sum(shape.numel() for call in recorder.calls for shape in call.shapes) // n
    if _arrange(plan, recorder.calls, touched, above, repeated):
        return True
    calls, index = [], 0
    for call in recorder.calls:
        gs = [zeros_for(g, shape, dtype, f)[None] for g, shape, dtype in zip(sent[index:], call.shapes, call.dtypes)]  # noqa: B905
        calls.append((call, gs))
        index += len(call.edges)
    failed = []
    largest = max(float(want.abs().max()) for want in expected if want is not None)
    try:
        found = plan.uses(layout, calls, n, v[None], inputs, replica, False, True)
    except (RuntimeError, ValueError) as error:
        if isinstance(error, LaplaceError):
            raise
        alone = [
            name for owner in plan.owners.values() if isinstance(owner.rule, Generic) for name in owner.keys.values()
        ]
        raise ModelError(
            f"the network, or a part of it, does not run on one example alone, as the gradients of {alone[:3]} need: "
            f"{error} Do examples interact (BatchNorm without running statistics)?"
        ) from error
    for name, use, want in zip(layout.names, found, expected, strict=True):
        if want is None:
            continue
        got = torch.zeros_like(want).flatten() if use is None else use.contracted(slice(None)).detach().sum((0, 1))
        eps = torch.finfo(want.dtype).eps
        allowed = (
            10 * eps**0.5 * float(want.abs().max()) + 1e3 * eps * largest
        )  # some gradients are zero but for rounding
        if float((got - want.flatten()).abs().max()) > allowed:
            failed.append(name)
    return _hand_up(failed, above, sites, called)


def _sent(
    f: Tensor, edges: list[GradientEdge], vectors: Tensor, plan: Plan
) -> list[tuple[Tensor | None, ...]]:  # one for each vector
    """Gradients at the edges, all vectors at once; where an operation cannot do that, the plan remembers it."""
    if not edges:
        return []
    try:
        with quiet():
            out = torch.autograd.grad(f, edges, vectors, is_grads_batched=True, retain_graph=True, allow_unused=True)
        return list(zip(*([None] * len(vectors) if g is None else g for g in out), strict=True))
    except RuntimeError:
        plan.seconds[True] = float("inf")
        return [torch.autograd.grad(f, edges, one, retain_graph=True, allow_unused=True) for one in vectors]


def _arrange(
    plan: Plan,
    calls: list[Recorded],
    touched: Sequence[tuple[Tensor | None, ...]],
    above: dict[str, int],
    repeated: set[str],
) -> bool:
    """Find where the examples are in each module's tensors; whether the plan had to be changed."""
    seen: dict[str, set[Arrangement]] = {}
    changed, index = False, 0
    for call in calls:
        for shape in call.shapes:
            marks = [gradients[index] for gradients in touched]
            index += 1
            masks = [torch.zeros(shape, dtype=torch.bool) if mark is None else mark.cpu() != 0 for mark in marks]
            arrangement = detect(masks) if shape else None
            if arrangement is None and shape[:1] == (1,) and call.name not in repeated:
                repeated.add(call.name)
                changed = True
                continue
            seen.setdefault(call.name, set()).add(arrangement or Arrangement("unknown"))
    for path, kinds in seen.items():
        if len(kinds) == 1 and Arrangement("unknown") not in kinds:
            plan.owners[path].arrangement = kinds.pop()
        elif not changed:
            for name in plan.owners[path].keys.values():
                above[name] += 1
            changed = True
    return changed


def _hand_up(failed: list[str], above: dict[str, int], sites: dict[str, list[str]], called: set[str]) -> bool:
    for name in failed:
        longest = max(len(_ladder(site, called)) for site in sites[name])
        if above[name] >= longest - 1 + (longest == 1):
            raise ModelError(
                f"the gradient of {name!r} on a whole batch is not the sum of its examples' own gradients: examples "
                "interact in the network (BatchNorm without running statistics does that), or it draws random numbers "
                "in eval mode. A posterior needs independent examples: give BatchNorm running statistics."
            )
        above[name] += 1
    return bool(failed)


def zeros_for(g: Tensor | None, shape: torch.Size, dtype: torch.dtype, like: Tensor) -> Tensor:
    """The gradient, or zeros where the outputs do not depend on it."""
    return torch.zeros(shape, dtype=dtype, device=like.device) if g is None else g
