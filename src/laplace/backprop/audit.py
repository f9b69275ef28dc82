"""Making a plan: on a few examples of the first batch, every rule is compared with autograd.

Every parameter starts with the rule of its module's type. Where a module was not called, or the rule's gradient is not
autograd's, or a later batch's examples are not where the rule looks for them, the parameter goes to the generic rule at
the nearest module above that was called, up to the whole network. A gradient that not even that explains is an error
that names the layer.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from laplace.backprop.arrangement import Arrangement, detect, version
from laplace.backprop.layers import Generic, Rule, rule_for
from laplace.backprop.layers.generic import WholeNetwork
from laplace.backprop.plan import Learned, Owner, Plan, RuleFailed, random_vectors, zeros_for
from laplace.backprop.record import NotSeen, Recorded, Recorder
from laplace.backprop.uses import Use
from laplace.batches import Inputs
from laplace.errors import ModelError, quiet
from laplace.precision import rounding
from laplace.weights.layout import Layout

EXAMPLES = 5  # on which the audit is made


def make_plan(replica: nn.Module, layout: Layout, inputs: Inputs, learned: Learned | None = None) -> Plan:
    """The plan for a network, from a few examples and what is known of it already."""
    inputs = inputs.part(0, EXAMPLES)
    learned = Learned() if learned is None else learned.copy()
    _watch(replica, inputs, learned)
    sites = _sites(replica, layout)
    while True:
        plan = Plan(_owners(replica, sites, learned), learned)
        if _audit(plan, replica, layout, inputs):
            return plan


def _watch(replica: nn.Module, inputs: Inputs, learned: Learned) -> None:
    """Learn which modules are called, and whether inputs are written to."""
    own = inputs.map(torch.clone)
    handles = [
        module.register_forward_pre_hook(lambda m, a, name=name: learned.called.add(name))
        for name, module in replica.named_modules()
    ]
    try:
        with torch.inference_mode(False), torch.enable_grad():  # as it will run: without grad, fused layers call none
            own.call(replica)
    finally:
        for handle in handles:
            handle.remove()
    learned.writes |= any(version(t) > 0 for t in own.tensors())


def _sites(replica: nn.Module, layout: Layout) -> dict[str, list[str]]:
    """Where each tensor is registered: at several places where it is tied."""
    names = {id(p): name for name, p in replica.named_parameters() if name in set(layout.names)}
    sites: dict[str, list[str]] = {name: [] for name in layout.names}
    for path, module in replica.named_modules():
        for key, p in module._parameters.items():
            if p is not None and id(p) in names:
                sites[names[id(p)]].append(f"{path}.{key}" if path else key)
    return sites


def _owners(replica: nn.Module, sites: dict[str, list[str]], learned: Learned) -> dict[str, Owner]:
    owners: dict[str, Owner] = {}
    for name, places in sites.items():
        for site in places:
            path = learned.ladder(site, name)[0]
            module = replica.get_submodule(path)
            key = site.removeprefix(f"{path}.") if path else site
            rule = _rule_for(module)
            open_to_it = path not in learned.closed and path not in learned.refused.get(name, ())
            if rule is None or not open_to_it or ("." in key and key not in rule.below):
                rule = WholeNetwork() if path == "" else Generic()
            if path not in owners:
                owners[path] = Owner(rule)
            elif isinstance(rule, Generic) and not isinstance(owners[path].rule, Generic):
                owners[path].rule = rule  # one rule for all of a module
            if name not in owners[path].keys.values():
                owners[path].keys[key] = name
    return owners


def _rule_for(module: nn.Module) -> Rule | None:
    """Its own copy of the rule for its type; a module whose forward was replaced has none that opens it."""
    rule = copy.copy(rule_for(type(module)))
    return None if rule is not None and rule.opens and "forward" in module.__dict__ else rule


def _audit(plan: Plan, replica: nn.Module, layout: Layout, inputs: Inputs) -> bool:
    """Compare every parameter's gradient with autograd's; what does not agree is learned for another try."""
    parameters = dict(replica.named_parameters())
    recorder = Recorder(replica, plan.hooked, plan.learned.repeated, plan.opened, compare=True)
    try:
        with torch.inference_mode(False), torch.enable_grad():
            f, recorded = recorder.run(inputs.map(torch.clone), replica)
        if not f.requires_grad:
            raise ModelError("the network's output does not depend on any uncertain weight (is it detached?).")
        n, v = f.shape[0], random_vectors(f)
        tracked = [parameters[name] for name in layout.names]
        try:
            grads = torch.autograd.grad(f, tracked, v, retain_graph=True, allow_unused=True)
            expected = [g.to_dense() if g is not None and g.is_sparse else g for g in grads]
        except RuntimeError as error:
            raise ModelError(f"autograd cannot differentiate the network: {error}") from error
        edges = [edge for call in recorded for edge in call.edges]
        probed = torch.linspace(0, n - 1, min(n, EXAMPLES)).round().long()
        touched = _sent(f, edges, _alone(v, probed), plan)
        sent = torch.autograd.grad(f, edges, v, allow_unused=True) if edges else ()
    except NotSeen as failure:
        plan.learned.refuse(plan.owners, plan.explained_by(failure.paths))
        return False
    finally:
        recorder.remove()
    plan.examples, plan.outputs = n, tuple(f.shape[1:])
    plan.unused = {name for name, g in zip(layout.names, expected, strict=True) if g is None}
    plan.width = _width(plan, recorded, parameters, n)
    if not _arrange(plan, recorded, touched, probed.tolist(), n):
        return False
    calls, index = [], 0
    for call in recorded:
        gs = [zeros_for(g, shape, dtype, f)[None] for g, shape, dtype in zip(sent[index:], call.shapes, call.dtypes)]  # noqa: B905
        calls.append((call, gs))
        index += len(call.edges)
    try:
        found = plan.uses(layout, calls, n, v[None], inputs, replica, False, True)
    except RuleFailed as failure:
        if plan.learned.refuse(plan.owners, failure.names):
            raise ModelError(str(failure)) from failure.__cause__
        return False
    eps = rounding({f.dtype, *(p.dtype for p in tracked), *(dtype for call in recorded for dtype in call.dtypes)})
    failed = _differing(layout.names, found, expected, eps)
    _require_right(plan, failed)
    if stuck := plan.learned.refuse(plan.owners, failed):
        raise ModelError(
            f"the gradient of {stuck[0]!r} on a whole batch is not the sum of its examples' own gradients: examples "
            "interact in the network (BatchNorm without running statistics does that), or it draws random numbers "
            "in eval mode. A posterior needs independent examples: give BatchNorm running statistics."
        )
    return not failed


def _width(plan: Plan, calls: list[Recorded], parameters: Mapping[str, Tensor], n: int) -> int:
    written = {key for o in plan.owners.values() if isinstance(o.rule, Generic) for key in o.keys.values()}
    outputs = sum(shape.numel() for call in calls for shape in call.shapes)
    return outputs // n + sum(parameters[name].numel() for name in written)


def _alone(v: Tensor, examples: Tensor) -> Tensor:  # (N, C), (k,) -> (k, N, C)
    """The vectors of some examples, each by itself."""
    alone = v.new_zeros(len(examples), *v.shape)
    alone[torch.arange(len(examples)), examples] = v[examples]
    return alone


def _differing(
    names: Sequence[str], found: Sequence[Use | None], expected: Sequence[Tensor | None], eps: float
) -> dict[str, tuple[float, float]]:
    """The largest difference, and the largest number, of gradients that are not the expected ones.

    Some are zero but for rounding.
    """
    sizes = [0.0 if want is None else float(want.abs().max()) for want in expected]
    each, all_ = min(10 * eps**0.5, 0.1), min(1e3 * eps, 0.02) * max(sizes)
    failed = {}
    for name, use, want, size in zip(names, found, expected, sizes, strict=True):
        if want is None:
            continue
        got = torch.zeros_like(want).flatten() if use is None else _summed(use)
        difference = float((got - want.flatten()).abs().max())
        if not difference <= each * size + all_:
            failed[name] = difference, size
    return failed


def _require_right(plan: Plan, failed: Mapping[str, tuple[float, float]]) -> None:
    """Refuse the user's own rules that are wrong."""
    for path, owner in plan.owners.items():
        wrong = [name for name in owner.keys.values() if name in failed] if owner.rule.checked else []
        if wrong:
            difference, size = failed[wrong[0]]
            raise ModelError(
                f"the rule {owner.rule.name} gives another gradient of {wrong[0]!r} (layer {path!r}) than autograd: "
                f"the largest difference is {difference:.3g}, the largest number {size:.3g}. Correct the rule."
            )


def _summed(use: Use) -> Tensor:  # (p,)
    """The gradients of all examples together, of one vector."""
    return use.back(use.g.new_ones(1, use.shape[1], 1)).detach().flatten()


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
    touched: Sequence[tuple[Tensor | None, ...]],  # one for each probed example
    probed: list[int],
    n: int,
) -> bool:
    """Find where the examples are in each module's tensors; where they are in no known place, that is learned."""
    seen: dict[str, set[Arrangement | None]] = {}
    repeated, index = plan.learned.repeated, 0
    found = len(repeated)
    for call in calls:
        for shape in call.shapes:
            marks = [gradients[index] for gradients in touched]
            index += 1
            masks = [torch.zeros(shape, dtype=torch.bool) if mark is None else mark.cpu() != 0 for mark in marks]
            arrangement = detect(masks, probed, n) if shape and shape.numel() else None
            if arrangement is None and shape[:1] == (1,) and call.name not in repeated:
                repeated.add(call.name)
            seen.setdefault(call.name, set()).add(arrangement)
    if len(repeated) > found:
        return False
    unknown = []
    for path, kinds in seen.items():
        arrangement = kinds.pop() if len(kinds) == 1 else None
        if arrangement is None:
            unknown += plan.owners[path].keys.values()
        else:
            plan.owners[path].arrangement = arrangement
    plan.learned.refuse(plan.owners, unknown)
    return not unknown
