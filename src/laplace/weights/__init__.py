"""Which parameters are uncertain."""

from laplace.weights.all_weights import AllWeights, find_all_weights
from laplace.weights.changes import Snapshot, what_changed
from laplace.weights.last_layer import LastLayer, find_last_layer
from laplace.weights.layout import Layout

__all__ = ["AllWeights", "LastLayer", "Layout", "Snapshot", "find_all_weights", "find_last_layer", "what_changed"]
