"""Compute joint Gaussians of the outputs within groups of inputs, and between them and further inputs. For regression.

A joint covariance of all inputs has (N C)^2 numbers. Who needs covariances only within each of G groups of q inputs
gets them from joint covariances of some groups at a time.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from laplace.errors import UnsupportedError
from laplace.inference.predict import call, predict
from laplace.inference.source import Source
from laplace.predictive.response import Latent

_POINTS = 128  # inputs per joint covariance: few enough that entries between groups cost less than the network


@dataclass(frozen=True)
class Blocks:
    """Holds the Gaussians of G groups of q inputs with C outputs each, ordered input after input.

    Attributes:
        mean: (G, q, C).
        covariance: Within each group, (G, q C, q C).
        cross: Between each group and n further inputs, (G, q C, n C). None if there are no further inputs.
        further_mean: (n, C).
        further_covariance: (n C, n C).
    """

    mean: Tensor
    covariance: Tensor
    cross: Tensor | None = None
    further_mean: Tensor | None = None
    further_covariance: Tensor | None = None


def joint_blocks(source: Source, x: Tensor, further: Tensor | None = None) -> Blocks:  # (G, q, ...), (n, ...)
    """Return the joint Gaussian of the outputs within each group of inputs, without observation noise.

    Costs one run of the network for all inputs if q = 1 and there is nothing further, else one for each 128 inputs,
    each time with all of `further`.
    """
    g, q = x.shape[:2]
    if further is None and q == 1:
        mean, covariance = call(source, x.flatten(0, 1))
        c = mean.numel() // g
        return Blocks(mean.reshape(g, 1, c), covariance.reshape(g, c, c))
    parts = [_joint(source, part, further) for part in x.split(max(1, _POINTS // q))]
    mean, covariance = torch.cat([p.mean for p in parts]), torch.cat([p.covariance for p in parts])
    if further is None:
        return Blocks(mean, covariance)
    cross = torch.cat([p.cross for p in parts if p.cross is not None])
    return Blocks(mean, covariance, cross, parts[0].further_mean, parts[0].further_covariance)


def _joint(source: Source, x: Tensor, further: Tensor | None) -> Blocks:
    """Return the blocks of one joint covariance."""
    g, q = x.shape[:2]
    rows = x.flatten(0, 1) if further is None else torch.cat([x.flatten(0, 1), further])
    mean, covariance = call(source, rows, joint=True)
    c = len(mean) // len(rows)
    own = g * q * c
    inner = covariance[:own, :own].reshape(g, q * c, g, q * c).diagonal(dim1=0, dim2=2).movedim(-1, 0)
    if further is None:
        return Blocks(mean.reshape(g, q, c), inner)
    cross = covariance[:own, own:].reshape(g, q * c, -1)
    return Blocks(mean[:own].reshape(g, q, c), inner, cross, mean[own:].reshape(-1, c), covariance[own:, own:])


def noise_variance(source: Source, x: Tensor, instead: str) -> Tensor:  # (N, C)
    """Return the variance of the observation noise at some inputs. `instead` says what to write if it is unknown."""
    if isinstance(source.likelihood.response, Latent):
        raise UnsupportedError(
            f"the likelihood {source.likelihood.name!r} does not say how noisy an observation at a new input is. "
            f"{instead}"
        )
    return predict(source, x, diagonal_output=True).aleatoric.reshape(len(x), -1)
