"""Published residual networks on CIFAR-10, corrupted images and unknown ones: Laplace beside its rivals."""
