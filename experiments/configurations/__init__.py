"""Which configuration of a last-layer Laplace is good at both: calibrated probabilities and unknown inputs?"""
