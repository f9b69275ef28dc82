"""Read autograd's graph to find where a run of the network used its parameters.

The graph shows every use, whatever it contributes. If a weight is also used outside of its recorded layer (by hand,
perhaps only for some inputs), the graph has another node that reads it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from torch import Tensor, nn
from torch.autograd import _get_sequence_nr as next_number  # number of the next node that autograd makes in this thread
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

__all__ = ["Leaves", "next_number"]

# Operations that give the same numbers in another form: whoever reads their result reads the parameter. (Autocast casts
# a weight once for all its readers.)
_FORMS = frozenset(
    f"{name}Backward{i}"
    for name in ("T", "ToCopy", "Transpose", "View", "ReshapeAlias", "Permute", "Alias", "Clone", "Unsqueeze")
    for i in (0, 1)
)


class Leaves:
    """Graph nodes of a network's uncertain parameters."""

    def __init__(self, network: nn.Module) -> None:
        tracked = {name: p for name, p in network.named_parameters() if p.requires_grad}
        self.names: dict[Node, str] = {get_gradient_edge(p).node: name for name, p in tracked.items()}

    def read_elsewhere(
        self,
        f: Tensor,
        spans: Mapping[str, Collection[range]],
        returned: Mapping[str, Collection[GradientEdge]],
        inputs: Iterable[Tensor],
    ) -> set[str]:
        """Return the parameters that a node on the way to f reads outside of their `spans`.

        A reader of what a span has `returned` reads that call's output, not the parameter. The graph behind `inputs` is
        ignored.
        """
        start = f.grad_fn
        if start is None:
            return set()
        outputs = {name: {(e.node, e.output_nr) for e in edges} for name, edges in returned.items()}
        seen: set[Node | None] = {t.grad_fn for t in inputs} | {start, None}
        stack, found = [start], set[str]()
        name = self._behind(start, f.output_nr, outputs)
        if name is not None and name in spans:
            found.add(name)  # the network returns its weight
        while stack:
            node = stack.pop()
            form = node.name() in _FORMS  # look at its readers instead
            for child, nr in node.next_functions:
                if child is None:
                    continue
                if not form:
                    name = self._behind(child, nr, outputs)
                    if (
                        name is not None
                        and name in spans
                        and not any(node._sequence_nr() in span for span in spans[name])
                    ):
                        found.add(name)
                if child not in seen:
                    seen.add(child)
                    stack.append(child)
        return found

    def _behind(self, node: Node | None, nr: int, outputs: Mapping[str, Collection[tuple[Node, int]]]) -> str | None:
        """Return the parameter that a node yields, in whatever form, or None if it is a recorded call's output."""
        passed = []
        while node is not None:
            passed.append((node, nr))
            if node in self.names:
                name = self.names[node]
                return None if any(edge in outputs.get(name, ()) for edge in passed) else name
            if node.name() not in _FORMS:
                return None
            ((node, nr),) = node.next_functions
        return None
