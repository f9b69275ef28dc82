"""Networks as users have them in many processes: in DistributedDataParallel, sharded by FSDP2, tensor-parallel."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from laplace import Laplace
from laplace.distributed import ShardSampler
from laplace.errors import LaplaceError

pytestmark = pytest.mark.slow  # the first DistributedDataParallel of a process takes seconds
N = 23


def parts(normed: bool = True) -> tuple[nn.Module, TensorDataset]:
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(6) if normed else nn.Identity()
    model = nn.Sequential(nn.Linear(4, 6), norm, nn.Tanh(), nn.Linear(6, 3)).double()
    return model, TensorDataset(torch.randn(N, 4).double(), torch.arange(N) % 3)


def wrapped(path: str) -> dict[str, Any]:
    model, data = parts()
    network = DistributedDataParallel(model)
    shard, world = DataLoader(data, 4, sampler=ShardSampler(data)), distributed.group.WORLD
    rank, x = distributed.get_rank(), data.tensors[0]
    model.train()
    one = Laplace(model, "classification", "all").fit(DataLoader(data, 5), group=None)
    la = Laplace(network, "classification", "all").fit(shard, group=world)
    compiled = Laplace(torch.compile(network), "classification").fit(shard, group=world)
    la.save(Path(path) / "posterior", group=world)
    back = Laplace.load(Path(path) / "posterior", parts()[0])
    found: dict[str, Any] = {
        "equal": float((la.log_marginal_likelihood() - one.log_marginal_likelihood()).abs()),
        "names": [row.name for row in la.coverage().rows],
        "loaded": bool(torch.equal(back(x), la(x))),
        "mode": model.training,
        "compiled": compiled.n_data,
    }
    if rank == 0:  # alone: the other rank does not predict, and nothing waits for it
        found["alone"] = float((la(x) - one(x)).abs().max())
    try:
        Laplace(network, "classification").fit(DataLoader(data, 5))
    except LaplaceError as error:
        found["refused"] = str(error)
    return found


def test_a_network_in_ddp_is_taken_out_of_it(two, tmp_path):
    zero, one = two.run(wrapped, str(tmp_path))
    assert zero["alone"] < 1e-12
    for found in (zero, one):
        assert found["equal"] < 1e-10
        assert found["names"][0] == "0.weight"
        assert found["loaded"]
        assert found["mode"]
        assert found["compiled"] == N
        assert "this is a network in DistributedDataParallel, on 2 ranks. Write group=" in found["refused"]


def sharded(subset: Any) -> dict[str, Any]:
    model, data = parts(normed=subset != "all")
    model.eval()
    x = data.tensors[0]
    one = Laplace(model, "classification", subset).fit(DataLoader(data, 5), group=None)
    evidence, probs = one.log_marginal_likelihood(), one(x)
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    fully_shard(model)
    before = {name: (type(p).__name__, tuple(p.to_local().shape)) for name, p in model.named_parameters()}
    size = N - 3 if distributed.get_rank() == 0 else 3
    at = slice(0, size) if distributed.get_rank() == 0 else slice(N - 3, N)
    la = Laplace(model, "classification", subset).fit([(t[0], t[1]) for t in [data[at]]], group=distributed.group.WORLD)
    found = {
        "equal": float((la.log_marginal_likelihood() - evidence).abs()),
        "untouched": before == {n: (type(p).__name__, tuple(p.to_local().shape)) for n, p in model.named_parameters()},
        "runs": float((model(x).softmax(-1) - la.model(x).softmax(-1)).abs().max().detach()),
    }
    if distributed.get_rank() == 1:
        found["alone"] = float((la(x) - probs).abs().max())
    return found


@pytest.mark.parametrize("subset", ["last_layer", "all", ["0"]])
def test_a_network_sharded_by_fsdp_has_the_posterior_of_the_plain_one(two, subset):
    zero, one = two.run(sharded, subset)
    assert one["alone"] < 1e-10
    for found in (zero, one):
        assert found["equal"] < 1e-10
        assert found["untouched"]
        assert found["runs"] < 1e-12


def parallel() -> str:
    model, _ = parts()
    mesh = init_device_mesh("cpu", (2,))
    parallelize_module(model, mesh, {"3": ColwiseParallel()})
    try:
        Laplace(model, "classification")
    except LaplaceError as error:
        return str(error)
    return "nothing"


def test_tensor_parallel_heads_are_refused(two):
    for said in two.run(parallel):
        assert re.search("'3.weight' is tensor-parallel.*fully_shard", said)


def unequal_buffers() -> str:
    """After training with DDP, every rank has running statistics of its own."""
    model, data = parts()
    network = DistributedDataParallel(model)
    for x, _ in DataLoader(data, 4, sampler=ShardSampler(data)):
        network(x)
        break
    try:
        Laplace(network, "classification").fit(
            DataLoader(data, 4, sampler=ShardSampler(data)), group=distributed.group.WORLD
        )
    except LaplaceError as error:
        return str(error)
    return "nothing"


def test_buffers_that_differ_between_ranks_are_refused_with_what_to_write(two):
    assert all(re.search(r"'1.running_mean' has other values.*torch.distributed.broadcast", said)
               for said in two.run(unequal_buffers))  # fmt: skip
