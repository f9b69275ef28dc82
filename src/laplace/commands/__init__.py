"""Hold what the command `laplace` does that takes more than a few lines. Its arguments are in `laplace.cli`."""
