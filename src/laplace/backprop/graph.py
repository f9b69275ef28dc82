"""Read autograd's graph to find where a run of the network used its parameters.

The graph shows every use, whatever it contributes. If a weight is also used outside of its recorded layer (by hand,
perhaps only for some inputs), the graph has another node that reads it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from torch import Tensor, nn
from torch.autograd import _get_sequence_nr as next_number  # number of the next node that autograd makes in this thread
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from laplace.network.pieces import Gathered

__all__ = ["Leaves", "next_number"]

# Operations that give the same numbers in another form: whoever reads their result reads the parameter. (Autocast casts
# a weight once for all its readers.)
_FORMS = frozenset(
    f"{name}Backward{i}"
    for name in ("T", "ToCopy", "Transpose", "View", "ReshapeAlias", "Permute", "Alias", "Clone", "Unsqueeze")
    for i in (0, 1)
) | {f"{Gathered.__name__}Backward"}


class Leaves:
    """Finds the graph nodes of a network's uncertain parameters."""

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
        seen: set[Node | None] = {t.grad_fn for t in inputs} | {start, None}
        name, passed = self._behind(start, f.output_nr)
        found = set[str]()
        if name in spans and not _is_returned(passed, returned.get(name, ())):
            found.add(name)  # the network returns its weight
        stack = [(start, start.name() in _FORMS)]
        while stack:
            node, form = stack.pop()  # of a form, look at its readers instead
            for child, nr in node.next_functions:
                leaf = child in self.names
                yields = leaf or (child is not None and child.name() in _FORMS)
                if yields and not form:
                    name, passed = self._behind(child, nr)
                    if (
                        name in spans
                        and not any(node._sequence_nr() in span for span in spans[name])
                        and not _is_returned(passed, returned.get(name, ()))
                    ):
                        found.add(name)
                if not leaf and child is not None and child not in seen:
                    seen.add(child)
                    stack.append((child, yields))
        return found

    def _behind(self, node: Node | None, nr: int) -> tuple[str, list[tuple[Node, int]]]:
        """Return the parameter that a node yields, in whatever form, or '' if none, and the edges that lead to it."""
        passed = []
        while node is not None:
            passed.append((node, nr))
            if node in self.names:
                return self.names[node], passed
            if node.name() not in _FORMS:
                break
            ((node, nr),) = node.next_functions
        return "", passed


def _is_returned(passed: list[tuple[Node, int]], returned: Collection[GradientEdge]) -> bool:
    """Return whether one of the edges is a recorded call's output."""
    return any((edge.node, edge.output_nr) in passed for edge in returned)
