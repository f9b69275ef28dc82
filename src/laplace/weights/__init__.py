"""Which weights are uncertain."""

from laplace.weights.changes import Snapshot, what_changed
from laplace.weights.last_layer import LastLayer
from laplace.weights.layout import Layout
from laplace.weights.selection import Choice, Selection, Subset
from laplace.weights.subnetwork import Subnetwork
from laplace.weights.subset import Last, subset_named

__all__ = [
    "Choice",
    "Last",
    "LastLayer",
    "Layout",
    "Selection",
    "Snapshot",
    "Subnetwork",
    "Subset",
    "subset_named",
    "what_changed",
]
