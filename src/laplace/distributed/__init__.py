"""Fit one posterior on many processes: what they exchange, and who reads which example.

The engine is `torch.distributed`. Whatever has started the processes (torchrun, accelerate, Lightning, Ray) leaves a
process group; `la.fit(loader, group=torch.distributed.group.WORLD)` uses it. `ShardSampler` and `together` are for
users; the rest is inside.
"""

from laplace.distributed.groups import OWN as OWN
from laplace.distributed.groups import Group as Group
from laplace.distributed.groups import reduce_over as reduce_over
from laplace.distributed.ranks import Ranks as Ranks
from laplace.distributed.reduce import Reduce as Reduce
from laplace.distributed.reduce import alone as alone
from laplace.distributed.sampler import ShardSampler
from laplace.distributed.together import together

__all__ = ["ShardSampler", "together"]


def __dir__() -> list[str]:
    return __all__
