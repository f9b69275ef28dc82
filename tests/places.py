"""The random numbers of a fit, which follow from the places of the examples in the data."""

from __future__ import annotations

import torch

from laplace.linalg.sampling import Keyed


def drawn_by_place(seed: int, n: int) -> Keyed:
    """What a fit on n examples draws from, if it was given a generator of this seed."""
    of_fit = int(torch.randint(2**62, (), generator=torch.Generator().manual_seed(seed)))
    return Keyed(of_fit, torch.arange(n))
