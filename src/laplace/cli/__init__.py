"""What the command `laplace` does. Its arguments are in the module `laplace_cli`, which does not import torch."""
