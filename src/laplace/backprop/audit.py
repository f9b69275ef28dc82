"""Make a plan: compare every rule with autograd on a few examples of the first batch.

Every parameter starts with the rule for its module's type. It moves to the generic rule if the module was not called,
if the rule's gradient differs from autograd's, or if a later batch's examples are not where the rule expects them. The
generic rule is applied at the nearest module above that was called, up to the whole network. If even that does not
explain the gradient, an error names the layer.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from laplace.backprop.arrangement import Arrangement, detect, version
from laplace.backprop.inner import find_last_call
from laplace.backprop.layers import Generic, Rule, rule_for
from laplace.backprop.layers.generic import WholeNetwork
from laplace.backprop.plan import Learned, Owner, Plan, RuleFailed, random_vectors, zeros_for
from laplace.backprop.record import NotSeen, Recorded, Recorder, alike
from laplace.backprop.sending import sent_back
from laplace.backprop.uses import Use
from laplace.errors import ModelError, quiet
from laplace.linalg.autocast import rounding
from laplace.network.inputs import Inputs
from laplace.network.sharded import kind_of
from laplace.weights.layout import Layout

EXAMPLES = 5  # in the audit


def make_plan(replica: nn.Module, layout: Layout, inputs: Inputs, learned: Learned | None = None) -> Plan:
    """Make the plan for a network, from a few examples and what is already known of it."""
    inputs = inputs.part(0, EXAMPLES)
    learned = Learned() if learned is None else learned.copy()
    _watch(replica, inputs, learned)
    sites = _sites(replica, layout)
    while True:
        plan = Plan(_owners(replica, sites, learned), learned)
        if _audit(plan, replica, layout, inputs):
            return plan


def _watch(replica: nn.Module, inputs: Inputs, learned: Learned) -> None:
    """Learn which modules are called, and whether the network writes to its inputs."""
    own = inputs.map(torch.clone)
    handles = [
        module.register_forward_pre_hook(lambda m, a, name=name: learned.called.add(name))
        for name, module in replica.named_modules()
    ]
    try:
        with torch.inference_mode(False), torch.enable_grad():  # without grad, fused layers would call no submodules
            own.call(replica)
    finally:
        for handle in handles:
            handle.remove()
    learned.writes |= any(version(t) > 0 for t in own.tensors())


def _sites(replica: nn.Module, layout: Layout) -> dict[str, list[str]]:
    """Return where each tensor is registered: at several places if it is tied."""
    sites: dict[str, list[str]] = {name: [] for name in layout.names}
    names = {id(p): name for name, p in replica.named_parameters() if name in sites}
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
                owners[path].rule = rule  # one rule for all parameters of a module
            owners[path].doubtful = not isinstance(owners[path].rule, Generic) and (rule.checked or _changed(module))
            if name not in owners[path].keys.values():
                owners[path].keys[key] = name
    return owners


def _changed(module: nn.Module) -> bool:
    """Return whether a module may do more than its type does: it has hooks (not yet ours) or another forward."""
    return bool(module._forward_hooks or module._forward_pre_hooks or "forward" in module.__dict__)


def _rule_for(module: nn.Module) -> Rule | None:
    """Return a copy of the rule for a module's type, or None if it would open a module whose forward was replaced."""
    rule = copy.copy(rule_for(kind_of(module)))
    return None if rule is not None and rule.opens and "forward" in module.__dict__ else rule


def _audit(plan: Plan, replica: nn.Module, layout: Layout, inputs: Inputs) -> bool:
    """Return whether every parameter's gradient agrees with autograd's. The plan learns from failures."""
    parameters = dict(replica.named_parameters())
    recorder = Recorder(replica, plan.hooked, plan.learned.repeated, plan.opened, True, plan.lifted)
    try:
        with torch.inference_mode(False), torch.enable_grad():
            f, recorded = recorder.run(inputs.map(torch.clone), replica)
        if not lifting_changes_nothing(plan, f, inputs, replica):
            raise NotSeen(plan.lifted)
        if not f.requires_grad:
            raise ModelError(
                "the network's output does not depend on any uncertain weight. Look for detach() or torch.no_grad() in "
                "its forward, or choose other weights by subset_of_weights=."
            )
        if elsewhere := plan.read_elsewhere(f, recorded, recorder.leaves, inputs):
            plan.learned.refuse(plan.owners, elsewhere)  # even if it adds nothing for these examples
            return False
        n, v = f.shape[0], random_vectors(f)
        edges = [edge for call in recorded for edge in call.edges]
        probed = torch.linspace(0, n - 1, min(n, EXAMPLES)).round().long()
        elsewhere = any(shape[:1] != (n,) for call in recorded for shape in call.shapes)
        for some in (probed[:1], probed) if elsewhere else (probed,):  # one shows what has no examples
            touched = _sent(f, edges, _alone(v, some), plan)
            if not _arrange(plan, recorded, touched, some.tolist(), n):
                return False
        expected = _expected(f, [parameters[name] for name in layout.names], v)
        last = find_last_call(plan, recorded, f)
        last = last if last is not None and last.begins(f, v) else None
        sent = sent_back(f, edges, v) if edges else ()
    except NotSeen as failure:
        plan.learned.refuse(plan.owners, plan.explained_by(failure.paths))
        return False
    finally:
        recorder.remove()
    plan.examples, plan.outputs = n, tuple(f.shape[1:])
    plan.unused = _unused(layout, expected)
    plan.width = _width(plan, recorded, parameters, n)
    plan.head = None if last is None else last.call.name
    plan.inner = plan.width if last is None else plan.width - last.layer.out_features + last.layer.in_features
    try:
        failed = _differing(plan, layout, f, v, recorded, sent, inputs, replica, expected)
    except RuleFailed as failure:
        if plan.learned.refuse(plan.owners, failure.names):
            raise ModelError(str(failure)) from failure.__cause__
        return False
    _refuse(plan.learned, plan, failed)
    return not failed


def kept_plan(plan: Plan, replica: nn.Module, layout: Layout, inputs: Inputs) -> Plan | None:
    """Return the plan of an earlier fit of this network, if its rules still explain every gradient of a few examples.

    That saves finding the rules and where the examples are. None if another plan has to be made.
    """
    rules = [[(path, type(owner.rule), owner.keys, owner.doubtful) for path, owner in owners.items()]
             for owners in (plan.owners, _owners(replica, _sites(replica, layout), plan.learned))]  # fmt: skip
    inputs = inputs.part(0, EXAMPLES)
    if rules[0] != rules[1] or (inputs.size or 0) < plan.examples:
        return None
    plan = replace(plan, seconds={}, seen=set(), same=set())
    parameters = dict(replica.named_parameters())
    recorder = Recorder(replica, plan.hooked, plan.learned.repeated, plan.opened, True, plan.lifted)
    try:
        with torch.inference_mode(False), torch.enable_grad():
            f, calls = recorder.run(inputs.map(torch.clone), replica)
        if not f.requires_grad or tuple(f.shape[1:]) != plan.outputs:
            return None
        if plan.read_elsewhere(f, calls, recorder.leaves, inputs) or plan.misfits(f, calls):
            return None
        if not lifting_changes_nothing(plan, f, inputs, replica):
            return None
        expected = _expected(f, [parameters[name] for name in layout.names], random_vectors(f))
        last = find_last_call(plan, calls, f)
        if plan.unused != _unused(layout, expected) or plan.head != (None if last is None else last.call.name):
            return None
        return plan if recheck(plan, layout, f, calls, inputs, replica, expected) is plan.learned else None
    except (NotSeen, RuleFailed):
        return None
    finally:
        recorder.remove()


def _unused(layout: Layout, expected: Sequence[Tensor | None]) -> set[str]:
    """Return the parameters that the outputs do not depend on."""
    return {name for name, g in zip(layout.names, expected, strict=True) if g is None}


def lifting_changes_nothing(plan: Plan, f: Tensor, inputs: Inputs, replica: nn.Module) -> bool:
    """Return whether the network returns f also if no module's output gets a dimension of examples.

    Asked once for inputs of each shape: what is added to a tensor with examples is the same with and without one.
    """
    shapes = tuple(t.shape for t in inputs.tensors())
    if not plan.lifted or shapes in plan.same:
        return True
    with torch.inference_mode(False), torch.no_grad():
        plain = inputs.map(torch.clone).call(replica)
    if not alike(f.detach(), plain):
        return False
    plan.same.add(shapes)
    return True


def recheck(
    plan: Plan,
    layout: Layout,
    f: Tensor,
    calls: list[Recorded],
    inputs: Inputs,
    replica: nn.Module,
    expected: list[Tensor | None] | None = None,  # autograd's gradients of the random vectors, if they are known
) -> Learned:
    """Check every rule against autograd on further examples, and return what is known afterwards.

    Returns the plan's own `learned`, the same object, if all gradients agree.
    """
    parameters, v = dict(replica.named_parameters()), random_vectors(f)
    expected = expected or _expected(f, [parameters[name] for name in layout.names], v)
    if not all(g is None or bool(g.isfinite().all()) for g in expected):
        return plan.learned  # bad data, which is reported when the sums are checked
    edges = [edge for call in calls for edge in call.edges]
    sent = sent_back(f, edges, v) if edges else ()
    failed = _differing(plan, layout, f, v, calls, sent, inputs, replica, expected)
    if not failed:
        return plan.learned
    learned = plan.learned.copy()
    _refuse(learned, plan, failed)
    return learned


def _expected(f: Tensor, tracked: Sequence[Tensor], v: Tensor) -> list[Tensor | None]:
    """Return autograd's gradients of <v, f>."""
    try:
        grads = sent_back(f, tracked, v)
    except RuntimeError as error:
        raise _not_differentiable(error) from error
    return [g.to_dense() if g is not None and g.is_sparse else g for g in grads]


def _not_differentiable(error: RuntimeError) -> ModelError:
    return ModelError(f"autograd cannot differentiate the network: {error}")


def _refuse(learned: Learned, plan: Plan, failed: Mapping[str, tuple[float, float]]) -> None:
    """Pass parameters with wrong gradients to a module above. Refuses the network if there is none left."""
    _require_right(plan, failed)
    if stuck := learned.refuse(plan.owners, failed):
        raise ModelError(
            f"the gradient of {stuck[0]!r} on a whole batch is not the sum of its examples' own gradients: examples "
            "interact in the network (BatchNorm without running statistics does that), or it draws random numbers "
            "in eval mode. A posterior needs independent examples: give BatchNorm running statistics."
        )


def _width(plan: Plan, calls: list[Recorded], parameters: Mapping[str, Tensor], n: int) -> int:
    written = {key for o in plan.owners.values() if isinstance(o.rule, Generic) for key in o.keys.values()}
    outputs = sum(shape.numel() for call in calls for shape in call.shapes)
    return outputs // n + sum(parameters[name].numel() for name in written)


def _alone(v: Tensor, examples: Tensor) -> Tensor:  # (N, C), (k,) -> (k, N, C)
    """Return the vectors of some examples, each with zeros for all other examples."""
    alone = v.new_zeros(len(examples), *v.shape)
    alone[torch.arange(len(examples)), examples] = v[examples]
    return alone


def _differing(
    plan: Plan,
    layout: Layout,
    f: Tensor,
    v: Tensor,
    calls: list[Recorded],
    sent: Sequence[Tensor | None],  # gradients of <v, f> at the outputs of the calls
    inputs: Inputs,
    replica: nn.Module,
    expected: Sequence[Tensor | None],
) -> dict[str, tuple[float, float]]:
    """Return the largest difference and the largest entry of each gradient that is not the expected one.

    Gradients that are zero up to rounding are left out.
    """
    given, index = [], 0
    for call in calls:
        gs = [zeros_for(g, shape, dtype, f)[None] for g, shape, dtype in zip(sent[index:], call.shapes, call.dtypes)]  # noqa: B905
        given.append((call, gs))
        index += len(call.edges)
    found = plan.uses(layout, given, f.shape[0], v[None], inputs, replica, False, True)
    dtypes = {f.dtype, *(p.dtype for p in replica.parameters() if p.requires_grad)}
    eps = rounding(dtypes | {dtype for call in calls for dtype in call.dtypes})
    sizes = [0.0 if want is None else float(want.abs().max()) for want in expected]
    each, all_ = min(10 * eps**0.5, 0.1), min(1e3 * eps, 0.02) * max(sizes)
    failed = {}
    for name, use, want, size in zip(layout.names, found, expected, sizes, strict=True):
        if want is None:
            continue
        got = torch.zeros_like(want).flatten() if use is None else _summed(use)
        difference = float((got - want.flatten()).abs().max())
        if not difference <= each * size + all_:
            failed[name] = difference, size
    return _beyond_rounding(failed, f, replica, v)


def _beyond_rounding(
    failed: dict[str, tuple[float, float]], f: Tensor, replica: nn.Module, v: Tensor
) -> dict[str, tuple[float, float]]:
    """Drop gradients that are nothing but rounding, as that of a key's bias, which softmax cancels.

    Two parts of v are sent back. The difference between the sum of their gradients and the gradient of v is rounding.
    """
    if not failed:
        return failed
    parameters = dict(replica.named_parameters())
    tracked = [parameters[name] for name in failed]
    share = v * torch.rand(v.shape, generator=torch.Generator().manual_seed(0)).to(v)
    parts = [torch.autograd.grad(f, tracked, one, retain_graph=True) for one in (v, share, v - share)]
    rounded = [float((whole - a - b).to_dense().abs().max()) for whole, a, b in zip(*parts, strict=True)]
    return {
        name: (difference, size)
        for (name, (difference, size)), error in zip(failed.items(), rounded, strict=True)
        if not difference <= 100 * error
    }


def _require_right(plan: Plan, failed: Mapping[str, tuple[float, float]]) -> None:
    """Refuse user-written rules that are wrong."""
    for path, owner in plan.owners.items():
        wrong = [name for name in owner.keys.values() if name in failed] if owner.rule.checked else []
        if wrong:
            difference, size = failed[wrong[0]]
            raise ModelError(
                f"the rule {owner.rule.name} gives another gradient of {wrong[0]!r} (layer {path!r}) than autograd: "
                f"the largest difference is {difference:.3g}, the largest number {size:.3g}. Correct the rule."
            )


def _summed(use: Use) -> Tensor:  # (p,)
    """Return the gradient of one vector, summed over all examples."""
    return use.back(use.g.new_ones(1, use.shape[1], 1)).detach().flatten()


def _sent(
    f: Tensor, edges: list[GradientEdge], vectors: Tensor, plan: Plan
) -> list[tuple[Tensor | None, ...]]:  # one for each vector
    """Return the gradients at the edges, for all vectors at once. The plan remembers if an operation cannot do that."""
    if not edges:
        return []
    try:
        with quiet():
            out = sent_back(f, edges, vectors, batched=True)
        return list(zip(*([None] * len(vectors) if g is None else g for g in out), strict=True))
    except RuntimeError:
        plan.seconds[True] = float("inf")
    try:
        return [sent_back(f, edges, one) for one in vectors]
    except RuntimeError as error:
        raise _not_differentiable(error) from error


def _arrange(
    plan: Plan,
    calls: list[Recorded],
    touched: Sequence[tuple[Tensor | None, ...]],  # one for each probed example
    probed: list[int],
    n: int,
) -> bool:
    """Find where the examples are in each module's tensors. Modules with no known arrangement are recorded."""
    seen: dict[str, set[Arrangement | None]] = {}
    repeated, lifted, index = plan.learned.repeated, plan.learned.lifted, 0
    found = len(repeated) + len(lifted)
    for call in calls:
        for shape in call.shapes:
            marks = [gradients[index] for gradients in touched]
            index += 1
            masks = [torch.zeros(shape, dtype=torch.bool) if mark is None else mark.cpu() != 0 for mark in marks]
            arrangement = detect(masks, probed, n) if shape and shape.numel() else None
            if arrangement is None and shape[:1] == (1,) and call.name not in repeated:
                repeated.add(call.name)
            elif arrangement is None and _may_be_lifted(plan.owners[call.name], shape, n):
                lifted.add(call.name)
            seen.setdefault(call.name, set()).add(arrangement)
    if len(repeated) + len(lifted) > found:
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


def _may_be_lifted(owner: Owner, shape: torch.Size, n: int) -> bool:
    """Return whether a module's output may have no dimension of examples, as a position embedding of arange(T)."""
    return not isinstance(owner.rule, Generic) and not owner.rule.opens and shape[:1] not in ((1,), (n,))
