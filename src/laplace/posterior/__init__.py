"""Define the values: sums over the data, the prior, and the Gaussian that follows from them."""
