"""The exact posterior over all weights without its matrix: equal to `full` where that can be had."""
