"""A network of `fully_shard` may change between `Laplace(model)` and `fit`, which sees it as it is then."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor
from torch.utils.data import DataLoader, TensorDataset

from laplace import Laplace
from laplace.distributed import ShardSampler, together
from laplace.errors import LaplaceWarning, StaleWarning

pytestmark = pytest.mark.slow  # the first DTensor of a process takes seconds
N = 23


class Scaled(nn.Module):
    """A layer without weights that keeps a number."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return (self.scale * x).tanh()


def network() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(4, 6), nn.BatchNorm1d(6), Scaled(), nn.Linear(6, 4), nn.Linear(4, 3)]
    return nn.Sequential(*layers).double().eval()


def examples(dtype: torch.dtype = torch.double) -> TensorDataset:
    x = torch.randn(N, 4, generator=torch.Generator().manual_seed(1)).to(dtype)
    return TensorDataset(x, torch.arange(N) % 3)


def trained(model: nn.Module) -> None:
    """Train with FSDP. Running statistics move, too."""
    optimizer, (x, y) = torch.optim.SGD(model.parameters(), 0.3), examples()[:]
    model.train()
    for _ in range(3):
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval()


def evaluated(model: nn.Module) -> None:
    """Run it, after which FSDP leaves what ran last gathered."""
    with torch.no_grad():
        model(examples(next(model.parameters()).dtype).tensors[0])


def assigned(model: nn.Module) -> None:
    state = {
        name: t
        if not hasattr(t, "full_tensor")
        else distribute_tensor(1.5 * t.full_tensor(), t.device_mesh, t.placements)
        for name, t in model.state_dict().items()
    }
    model.load_state_dict(state, assign=True)


def hooked(model: nn.Module) -> None:
    model[0].register_forward_hook(lambda module, args, output: 0.5 * output)


def rescaled(model: nn.Module) -> None:
    model[2].scale = 2.0


CHANGES: dict[str, Callable[[nn.Module], Any]] = {
    "nothing": lambda model: None,
    "trained": trained,
    "evaluated": evaluated,
    "assigned": assigned,
    "in float32": lambda model: model.float(),
    "frozen": lambda model: model[0].requires_grad_(False),
    "another layer": lambda model: model.__setitem__(2, nn.ReLU()),
    "hooked": hooked,
    "rescaled": rescaled,
}


def sharded(units: str) -> nn.Module:
    model = network()
    ignored = {model[3].weight} if units == "all but one" else None
    if units != "network":
        for i in (0, 1, 4):
            fully_shard(model[i])
    fully_shard(model, ignored_params=ignored)
    return model


def plain(model: nn.Module, change: str) -> nn.Module:
    """Return the same network whole."""
    evaluated(model)
    for module in model.modules():
        if hasattr(module, "reshard"):
            module.reshard()
    whole = network()
    if change not in ("trained", "assigned"):
        CHANGES[change](whole)
    state = {name: t.full_tensor() if hasattr(t, "full_tensor") else t for name, t in model.state_dict().items()}
    whole.load_state_dict(state)
    return whole


def changed(subset: str, units: str) -> dict[str, float]:
    """By change, how far the posterior is from that of the plain network, and whether more changes give a warning."""
    world, found = distributed.group.WORLD, {}
    for name, change in CHANGES.items():
        model = sharded(units)
        if name == "evaluated":
            change(model)
        la = Laplace(model, "classification", subset)
        change(model)
        data = examples(torch.float if name == "in float32" else torch.double)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", LaplaceWarning)
            la.fit(DataLoader(data, 4, sampler=ShardSampler(data)), group=world)
            one = Laplace(plain(model, name), "classification", subset).fit(DataLoader(data, 5), group=None)
        x = data.tensors[0]
        with together(world), warnings.catch_warnings():
            warnings.simplefilter("error", StaleWarning)
            far = float((la(x) - one(x)).abs().max())
            found[name] = max(far, float((la.log_marginal_likelihood() - one.log_marginal_likelihood()).abs()))
        if name in ("nothing", "assigned"):
            assigned(model)
            with together(world), warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                la(x)
            found[f"{name}, later"] = float(not any(w.category is StaleWarning for w in said))
    return found


@pytest.mark.parametrize("subset", ["all", "last_layer"])
@pytest.mark.parametrize("units", ["layers", "network", "all but one"])
def test_a_fit_sees_the_network_as_it_is_then(two, subset, units):
    for found in two.run(changed, subset, units):
        for name, far in found.items():
            assert far < (1e-4 if name == "in float32" else 1e-10), (name, found)
