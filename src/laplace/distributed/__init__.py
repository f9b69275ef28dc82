"""Fit one posterior on many processes: what they exchange, and who reads which example.

The engine is `torch.distributed`. Whatever has started the processes (torchrun, accelerate, Lightning, Ray) leaves a
process group; `la.fit(loader, group=torch.distributed.group.WORLD)` uses it.
"""

from laplace.distributed.groups import OWN, Group, reduce_over
from laplace.distributed.ranks import Ranks
from laplace.distributed.reduce import Reduce, alone
from laplace.distributed.sampler import ShardSampler

__all__ = ["OWN", "Group", "Ranks", "Reduce", "ShardSampler", "alone", "reduce_over"]
