"""Train with DistributedDataParallel and fit one posterior on all processes.

torchrun --standalone --nproc-per-node 2 examples/many_processes/with_torchrun.py
"""

from __future__ import annotations

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from laplace import Laplace
from laplace.distributed import ShardSampler


def data(seed: int, n: int = 501) -> TensorDataset:
    """Points of two classes around a curve."""
    x = torch.randn(n, 2, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(x, (x[:, 1] > x[:, 0].sin()).long())


def main() -> None:
    """Train, fit, tune on shards, and predict."""
    distributed.init_process_group("gloo")  # "nccl" on GPUs
    rank, world = distributed.get_rank(), distributed.group.WORLD
    train, val = data(0), data(1)

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 2))
    network = DistributedDataParallel(model)
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-2)
    sampler = DistributedSampler(train)
    for epoch in range(5):
        sampler.set_epoch(epoch)
        for x, y in DataLoader(train, 32, sampler=sampler):
            optimizer.zero_grad()
            nn.functional.cross_entropy(network(x), y).backward()
            optimizer.step()

    la = Laplace(network, "classification", "all")
    la.fit(DataLoader(train, 32, sampler=ShardSampler(train)), group=world)  # all ranks: the posterior of all data
    la.tune(method="validation", val_loader=DataLoader(val, 32, sampler=ShardSampler(val)), group=world)
    prediction = la.predict(DataLoader(val, 32, sampler=ShardSampler(val)), group=world)  # in the order of `val`
    right = (prediction.label == val.tensors[1]).float().mean()
    la.save("posterior.safetensors", group=world)  # rank 0 writes
    if rank == 0:
        print(f"{la.n_data} examples, log evidence {float(la.log_marginal_likelihood()):.1f}, accuracy {right:.2f}")
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
