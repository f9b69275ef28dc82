"""Which structure of the curvature, with all weights of a small CNN?"""
