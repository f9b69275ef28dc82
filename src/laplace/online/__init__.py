"""Tune prior and noise by the evidence while the network is trained."""

from laplace.online.calls import marglik_training

__all__ = ["marglik_training"]
