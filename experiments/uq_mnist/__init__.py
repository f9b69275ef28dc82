"""LeNet on MNIST, rotated digits and unknown images: Laplace beside its rivals."""
