"""Choose which weights are uncertain."""

from laplace.weights.all_weights import All
from laplace.weights.changes import Snapshot as Snapshot
from laplace.weights.changes import what_changed as what_changed
from laplace.weights.last_layer import FoundLastLayer as FoundLastLayer
from laplace.weights.layout import Layout
from laplace.weights.named import Named
from laplace.weights.predicate import Where
from laplace.weights.selection import Choice, Selection, Subset
from laplace.weights.selection import mean_of as mean_of
from laplace.weights.subnetwork import Subnetwork
from laplace.weights.subset import LastLayer
from laplace.weights.subset import subset_named as subset_named

__all__ = ["All", "Choice", "LastLayer", "Layout", "Named", "Selection", "Subnetwork", "Subset", "Where"]


def __dir__() -> list[str]:
    return __all__
