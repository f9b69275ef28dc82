"""The three steps of a Laplace approximation in one figure: a mode, a Gaussian around it, predictions with a band."""
