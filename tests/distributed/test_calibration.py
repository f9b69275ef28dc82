"""`calibrate` and `conformal` on shards of the validation data find what one process with all of it finds."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import distributed, nn
from torch.utils.data import DataLoader, Subset, TensorDataset

from laplace import Laplace
from laplace.distributed import ShardSampler

N = 261  # more than the few examples by which a search begins


def network(outputs: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, outputs)).double()


def data(task: str, seed: int, n: int = N) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 4, generator=generator).double()
    noise = torch.randn(n, 1, generator=generator).double()
    y = (x[:, :1] * 2 + noise).squeeze(1).round().clamp(-1, 1).long() + 1
    return TensorDataset(x, y if task == "classification" else x.sum(1, keepdim=True).sin() + 0.3 * noise)


def calibrated(task: str) -> dict[str, tuple[float, float]]:
    """By what was found, the value of this rank and that of one process with all data."""
    world, train, val = distributed.group.WORLD, data(task, 1), data(task, 2)
    rank, size = distributed.get_rank(), distributed.get_world_size()
    cut = [*[0, 230, N, N, N][:size], N]
    loaders: dict[str, Any] = {
        "shards": DataLoader(val, 16, sampler=ShardSampler(val)),
        "a rank without data": [val.tensors] if rank == 0 else [],
        "uneven": DataLoader(Subset(val, range(cut[rank], cut[rank + 1])), 16),
    }
    found = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        one = Laplace(network(3 if task == "classification" else 1), task).fit(DataLoader(train, 32), group=None)
        expected = one.calibrate(DataLoader(val, 20))
        for name, loader in loaders.items():
            la = Laplace(network(3 if task == "classification" else 1), task)
            la.fit(DataLoader(train, 32), group=None)
            result = la.calibrate(loader, group=world)
            found[f"{name}: prior"] = (float(la.prior_precision), float(one.prior_precision))
            found[f"{name}: T"] = (la.softmax_temperature, one.softmax_temperature)
            found[f"{name}: noise"] = (float(la.sigma_noise), float(one.sigma_noise))
            found[f"{name}: score"] = (result.chosen.nll, expected.chosen.nll)
            found[f"{name}: gain"] = (result.gain.mean, expected.gain.mean)
            found[f"{name}: examples"] = (result.n_data, expected.n_data)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("task", ["classification", "regression"])
def test_calibration_on_shards_finds_what_one_process_finds(some, task):
    for found in some.run(calibrated, task):
        for name, (here, there) in found.items():
            # a list of batches cannot say its places: the search begins elsewhere, and ends within its tolerance
            assert here == pytest.approx(there, rel=2e-2 if "without" in name else 1e-9), name


def promised() -> dict[str, float]:
    """By task and method, the largest difference between this rank's thresholds and those of one process."""
    world, rank, found = distributed.group.WORLD, distributed.get_rank(), {}
    cases = [
        ("classification", {"method": "lac"}),
        ("classification", {"method": "aps"}),
        ("classification", {"method": "raps", "class_conditional": True}),
        ("regression", {"method": "scaled"}),
        ("regression", {"method": "cqr"}),
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for task, options in cases:
            val, model = data(task, 2), network(3 if task == "classification" else 1)
            la = Laplace(model, task).fit(DataLoader(data(task, 1), 32), group=None)
            seeded = [torch.Generator().manual_seed(5) for _ in range(3)]
            one = la.conformal(DataLoader(val, 50), generator=seeded[0], **options)
            shards = DataLoader(val, 16, sampler=ShardSampler(val))
            many = la.conformal(shards, generator=seeded[1], **options, group=world)
            assert many.n_calibration == N
            found[f"{task} {options['method']}"] = float((many.threshold() - one.threshold()).abs().max())
            if options["method"] not in ("aps", "raps"):  # a list cannot say its places, which key the random numbers
                part = [val.tensors] if rank == 0 else []
                lone = la.conformal(part, generator=seeded[2], **options, group=world)
                found[f"{task} on rank 0 alone"] = float((lone.threshold() - one.threshold()).abs().max())
    return found


def test_conformal_thresholds_of_shards_are_those_of_one_process(two):
    for found in two.run(promised):
        assert max(found.values()) < 1e-12, found
