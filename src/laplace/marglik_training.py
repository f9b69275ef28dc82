"""Provide `marglik_training` where laplace-torch has it. It is defined in `laplace.online`."""

from laplace.online import marglik_training

__all__ = ["marglik_training"]
