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
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from laplace import Laplace, marglik_training
from laplace.distributed import ShardSampler, together
from laplace.errors import LaplaceError
from laplace.network.pieces import _in_one_exchange
from ranks import Pool

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
    x, world, rank = data.tensors[0], distributed.group.WORLD, distributed.get_rank()
    plain = parts(normed=subset != "all")[0].eval()
    one = Laplace(plain, "classification", subset).fit(DataLoader(data, 5), group=None)
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    fully_shard(model)
    before = state_of(model)
    at = slice(0, N - 3) if rank == 0 else slice(N - 3, N)
    batches = [*DataLoader(TensorDataset(*data[at]), 4)]  # five on rank 0, one on rank 1
    la = Laplace(model, "classification", subset).fit(batches, group=world)
    found: dict[str, Any] = {
        "equal": float((la.log_marginal_likelihood() - one.log_marginal_likelihood()).abs()),
        "untouched": before == state_of(model),
        "predicted": [],
        "still sharded": sorted(name for name, p in la.model.named_parameters() if p.untyped_storage().nbytes() == 8),
    }
    for mine in (x, x[: 3 + rank]):  # as many inputs on each rank, or not
        with together(world):
            found["predicted"].append(float((la(mine) - one(mine)).abs().max()))
    with together(world):
        found["nn"] = bool(la.predict(x, "nn", n_samples=2).mean.isfinite().all())
    shard = DataLoader(data, 4, sampler=ShardSampler(data))
    found["predicted"].append(float((la.predict(shard, group=world).mean - one.predict(x).mean).abs().max()))
    found["alone"] = said(lambda: la(x))
    if subset == "last_layer":
        found["module"] = said(la.module)
    found["bad batch"] = said(
        lambda: la.fit(batches if rank == 0 else [(x * float("nan"), data.tensors[1])], group=world)
    )
    found["without group"] = said(lambda: Laplace(model, "classification", subset).fit(batches))
    found["trained"] = said(lambda: marglik_training(model, batches, "classification", group=world))
    found["untouched after it"] = before == state_of(model)
    return found


def state_of(model: nn.Module) -> dict[str, Any]:
    """Return what must be as it was: classes, hooks, flags, and the pieces of the parameters."""
    modules = {name: (type(m).__name__, m.training, len(m._forward_hooks), len(m._forward_pre_hooks))
               for name, m in model.named_modules()}  # fmt: skip
    pieces = {name: (type(p).__name__, p.requires_grad, p.grad is None, p.to_local().flatten().tolist())
              for name, p in model.named_parameters()}  # fmt: skip
    return modules | pieces


def said(call: Any) -> str:
    try:
        call()
    except LaplaceError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


@pytest.mark.parametrize("subset", ["last_layer", "all", ["0"]])
def test_a_network_sharded_by_fsdp_has_the_posterior_of_the_plain_one(two, subset):
    zero, one = two.run(sharded, subset)
    for found in (zero, one):
        assert found["equal"] < 1e-10
        assert max(found["predicted"]) < 1e-10
        assert found["nn"]
        assert found["untouched"]
        assert found["untouched after it"]
        assert re.search(r"of fully_shard .*DistributedDataParallel; or .*Laplace\(model, ...\).fit", found["trained"])
        assert "this is a network in fully_shard, on 2 ranks. Write group=" in found["without group"]
        there = {"all": "1", "last_layer": "3"}.get(str(subset), "0").split()  # without a norm, 1 has no weights
        assert found["still sharded"] == [f"{i}.{key}" for i in "013" if i not in there for key in ("bias", "weight")]
        assert "UnsupportedError: the network is sharded by fully_shard" in found["alone"]
        if subset == "last_layer":
            assert "and a module has to hold all of it. Write la.save(path, group=...)" in found["module"]
    assert "rank 1: batch 0" in one["bad batch"]
    assert "rank 1 failed" in zero["bad batch"]


class Adapted(nn.Module):
    """A frozen layer with an adapter of low rank beside it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down, self.up = nn.Linear(base.in_features, 2, bias=False), nn.Linear(2, base.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


def adapted() -> nn.Module:
    torch.manual_seed(0)
    layers = [layer for _ in range(3) for layer in (Adapted(nn.Linear(8, 8)), nn.Tanh())]
    return nn.Sequential(*layers, nn.Linear(8, 3).requires_grad_(False)).double()


def adapters(structure: str, curvature: str) -> dict[str, Any]:
    plain, model, world, rank = adapted(), adapted(), distributed.group.WORLD, distributed.get_rank()
    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(N, 8, generator=generator).double(), torch.arange(N) % 3)
    options: dict[str, Any] = {"hessian_structure": structure, "curvature": curvature}
    one = Laplace(plain, "classification", "all", **options)
    one.fit(DataLoader(data, 5), generator=torch.Generator().manual_seed(4), group=None)
    for block in model:
        if isinstance(block, Adapted):
            fully_shard(block)
    fully_shard(model)
    before, x = state_of(model), data.tensors[0]
    shard = DataLoader(data, 5, sampler=ShardSampler(data))
    la = Laplace(model, "classification", "all", **options)
    la.fit(shard, generator=torch.Generator().manual_seed(4), group=world)
    with together(world):
        away = max(float((la(x[rank:]) - one(x[rank:])).abs().max()),
                   float((la.log_marginal_likelihood() - one.log_marginal_likelihood()).abs()))  # fmt: skip
    gathered = {name for name, p in la.model.named_parameters() if p.untyped_storage().nbytes() > 8}
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    return {"away": away, "only adapters": gathered == trained, "untouched": before == state_of(model)}


@pytest.mark.parametrize("structure", ["kron", "ekfac", "diag"])
@pytest.mark.parametrize("curvature", ["ggn", "sketch"])
def test_adapters_on_a_sharded_frozen_base_leave_the_base_sharded(two, structure, curvature):
    for found in two.run(adapters, structure, curvature):
        assert found["away"] < 1e-10
        assert found["only adapters"]
        assert found["untouched"]


def files(path: str, frozen: bool) -> float:
    """Save the posterior of a sharded network, and load it on the plain one and on the sharded one."""
    plain, model, world = adapted(), adapted(), distributed.group.WORLD
    if not frozen:
        plain.requires_grad_()
        model.requires_grad_()
    data = TensorDataset(torch.randn(N, 8).double(), torch.arange(N) % 3)
    fully_shard(model)
    la = Laplace(model, "classification", "all")
    la.fit(DataLoader(data, 5, sampler=ShardSampler(data)), group=world)
    la.save(Path(path) / "sharded", group=world)
    back, x = Laplace.load(Path(path) / "sharded", plain), torch.ones(2, 8).double()
    again = Laplace.load(Path(path) / "sharded", model, group=world)
    with together(world):
        return max(float((back(x) - la(x)).abs().max()), float((again(x) - la(x)).abs().max()))


@pytest.mark.parametrize("frozen", [True, False])
def test_files_of_a_sharded_network_load_on_the_plain_one_and_on_the_sharded_one(two, tmp_path, frozen):
    assert max(two.run(files, str(tmp_path), frozen)) < 1e-12


def in_a_part_of_the_group() -> str:
    """What two of three ranks are told that share a network of all three."""
    model, data = parts(normed=False)
    fully_shard(model)
    some = distributed.new_group([0, 1])
    if distributed.get_rank() == 2:
        return "not in the group"
    return said(
        lambda: Laplace(model, "classification").fit(
            DataLoader(data, 4, sampler=ShardSampler(data, group=some)), group=some
        )
    )


def gathered_by_rows() -> bool:
    """Whether parameters of which some ranks have more rows than others, or none, are put together as torch does."""
    mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
    shapes = [(n, *rest) for n in range(8) for rest in ((), (2,), (2, 3))]
    generator = torch.Generator().manual_seed(0)
    pieces = [distribute_tensor(torch.randn(shape, generator=generator), mesh, [Shard(0)]) for shape in shapes]
    return all(map(torch.equal, _in_one_exchange(pieces, mesh), [piece.full_tensor() for piece in pieces]))


def test_parameters_of_three_ranks_are_gathered_by_rows_and_a_group_without_some_is_refused():
    three = Pool(3)
    assert all(three.run(gathered_by_rows))
    *told, _ = three.run(in_a_part_of_the_group, seconds=50)  # the group's timeout is 60 seconds
    three.close()
    assert all("sharded by fully_shard over 3 ranks, and group= has 2. Give the group" in message for message in told)


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
