"""Many processes, one posterior: equal to that of one process, however the data is dealt out."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.utils.data import DataLoader, Subset, TensorDataset

from laplace import Laplace
from laplace.distributed import Ranks, ShardSampler
from ranks import Pool

STRUCTURES: dict[str, dict[str, Any]] = {
    "full": {"hessian_structure": "full"},
    "block": {"hessian_structure": "block"},
    "diag": {"hessian_structure": "diag"},
    "kron": {"hessian_structure": "kron"},
    "damped": {"hessian_structure": "kron", "damping": "balanced"},
    "sketched": {"hessian_structure": "kron", "rank": 3},
    "ekfac": {"hessian_structure": "ekfac"},
    "inf": {"hessian_structure": "inf"},
    "lowrank": {"hessian_structure": "lowrank", "rank": 5},
    "gp": {"hessian_structure": "gp", "n_subset": 11},
    "nystrom": {"hessian_structure": "gp", "functional_approximation": "nystrom", "n_subset": 13, "rank": 9},
    "variational": {"hessian_structure": "gp", "functional_approximation": "variational", "n_subset": 13},
}
TASKS = {"classification": 3, "regression": 2}
N = 61


def network(outputs: int, convolutional: bool = False) -> nn.Module:
    torch.manual_seed(0)
    if convolutional:
        layers = [nn.Unflatten(1, (1, 2, 3)), nn.Conv2d(1, 4, 2, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten()]
        return nn.Sequential(*layers, nn.Linear(48, outputs)).double().eval()
    return nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, outputs)).double()


def data(task: str) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(N, 6, generator=generator).double()
    if task == "classification":
        return TensorDataset(x, torch.arange(N) % 3)
    return TensorDataset(x, torch.stack([x[:, :3].sum(1), x.sum(1).sin()], 1))


def uneven(whole: TensorDataset) -> DataLoader:
    """Return three quarters of what is left to each rank but the last; of four ranks, that one has nothing."""
    rank, size = distributed.get_rank(), distributed.get_world_size()
    cuts = [0, *(N - N // 4**i for i in range(1, size)), N]
    cuts = [0, 46, 58, N, N] if size == 4 else cuts
    return DataLoader(Subset(whole, range(cuts[rank], cuts[rank + 1])), 7)


def difference(one: Laplace, other: Laplace, x: Tensor) -> float:
    """The largest difference between two posteriors: evidence and predictive."""

    def values(la: Laplace) -> list[Tensor]:
        spread = la.predict(x)
        found = [la.log_marginal_likelihood().reshape(1), la.log_likelihood.reshape(1)]
        return [*found, spread.mean, spread.variance]

    pairs = zip(values(one), values(other), strict=True)
    return max(float(((a - b).abs() / b.abs().clamp(min=1)).max().detach()) for a, b in pairs)


def differences(names: list[str], task: str, subset: str, convolutional: bool = False) -> dict[str, float]:
    """By structure, how much the posterior of this group differs from that of one process."""
    model, whole = network(TASKS[task], convolutional), data(task)
    found = {}
    for name in names:
        args = (model, task, subset)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.manual_seed(3)
            one = Laplace(*args, **STRUCTURES[name]).fit(DataLoader(whole, 9), group=None)
            torch.manual_seed(3 + distributed.get_rank())  # ranks need not have the same random numbers
            la = Laplace(*args, **STRUCTURES[name]).fit(uneven(whole), group=distributed.group.WORLD)
        assert la.n_data == N
        found[name] = difference(one, la, whole.tensors[0][:10])
    return found


def assert_small(found: list[dict[str, float]]) -> None:
    for of_rank in found:
        wrong = {name: value for name, value in of_rank.items() if not value < (1e-6 if name == "lowrank" else 1e-10)}
        assert not wrong


def test_two_ranks_have_the_posterior_of_one_process(two):
    assert_small(two.run(differences, [*STRUCTURES], "classification", "all"))


@pytest.mark.slow
@pytest.mark.parametrize("subset", ["last_layer", "all"])
@pytest.mark.parametrize("task", TASKS)
def test_some_ranks_have_the_posterior_of_one_process(some, task, subset):
    assert_small(some.run(differences, [*STRUCTURES], task, subset))


@pytest.mark.slow
def test_some_ranks_have_the_posterior_of_a_convolutional_network(some):
    assert_small(some.run(differences, [*STRUCTURES], "classification", "all", True))


class Branches(nn.Module):
    """Uses a weight in another way for some examples, a layer for others alone, and another layer never."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.rare, self.never, self.head = (nn.Linear(*n) for n in ((6, 7), (6, 7), (6, 2), (7, 3)))

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        by_hand, rarely = x[:, :1] > 9, x[:, 1:2] > 9
        if bool(by_hand.any()):
            h = h + by_hand * nn.functional.linear(x, self.a.weight).sin()
        if bool(rarely.any()):
            h = h + rarely * self.rare(x)
        return self.head(h.tanh())


def used_differently(names: list[str]) -> dict[str, float]:
    """By structure, how far from one process the posterior is if the last rank alone sees how weights are used."""
    torch.manual_seed(0)
    model, whole, found = Branches().double(), data("classification"), {}
    x = whole.tensors[0]
    x[N - 2, 0], x[N - 1, 1] = 10.0, 10.0
    rank, size = distributed.get_rank(), distributed.get_world_size()
    own = TensorDataset(*whole[slice(40, N) if rank == size - 1 else slice(20 * rank, 20 * (rank + 1))])
    for name in names:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            one = Laplace(model, "classification", "all", **STRUCTURES[name]).fit(DataLoader(whole, 9), group=None)
            la = Laplace(model, "classification", "all", **STRUCTURES[name])
            la.fit(DataLoader(own, 7), group=distributed.group.WORLD)
        assert la.n_data == N
        assert [row.rule for row in la.coverage().rows] == [row.rule for row in one.coverage().rows]
        found[name] = difference(one, la, x[-10:])
    return found


@pytest.mark.slow
def test_ranks_that_use_a_weight_differently_agree_on_one_plan():
    three = Pool(3)
    assert_small(three.run(used_differently, ["full", "block", "diag", "kron", "ekfac"]))
    three.close()


def drawn(kinds: list[str]) -> dict[str, float]:
    """How much estimates of the curvature differ from those of one process with the same seed."""
    model, whole = network(3), data("classification")
    rank, found = distributed.get_rank(), {}
    shard = DataLoader(whole, 4, sampler=ShardSampler(whole))
    for kind in kinds:
        seeds = [torch.Generator().manual_seed(seed) for seed in (7, 7 if rank == 0 else 8)]  # the first rank's counts
        one = Laplace(model, "classification", "all", curvature=kind).fit(
            DataLoader(whole, 9), generator=seeds[0], group=None
        )
        la = Laplace(model, "classification", "all", curvature=kind)
        la.fit(shard, generator=seeds[1], group=distributed.group.WORLD)
        found[kind] = difference(one, la, whole.tensors[0])
        torch.manual_seed(0)  # the same on all ranks: their examples must not get the same noise
        apart = Laplace(model, "classification", "all", curvature=kind).fit(shard, group=distributed.group.WORLD)
        torch.manual_seed(0)
        again = Laplace(model, "classification", "all", curvature=kind).fit(DataLoader(whole, 9), group=None)
        found[f"{kind} by torch's generator"] = difference(again, apart, whole.tensors[0])
    return found


def test_draws_do_not_depend_on_the_number_of_ranks(two):
    assert_small(two.run(drawn, ["sketch", "mc"]))


@pytest.mark.slow
def test_draws_of_some_ranks_are_those_of_one_process(some):
    assert_small(some.run(drawn, ["sketch", "mc"]))


def reductions(names: list[str]) -> dict[str, tuple[int, bool]]:
    """By structure, how often tensors were added up, and whether all sums came in float64."""
    whole, model, total, found = data("classification"), network(3), Ranks.total, {}
    seen: list[set[torch.dtype]] = []
    wide = nn.Sequential(nn.Linear(6, 60), nn.Tanh(), nn.Linear(60, 3)).double()  # on all ranks the same: see `network`

    def counted(ranks: Ranks, sums: dict[str, Tensor], device: torch.device) -> dict[str, Tensor]:
        seen.append({value.dtype for value in sums.values()})
        return total(ranks, sums, device)

    Ranks.total = counted  # type: ignore[method-assign, assignment]
    try:
        for name in names:
            seen.clear()
            la = Laplace(wide if name == "lowrank" else model, "classification", "all", **STRUCTURES[name])
            la.fit(uneven(whole), group=distributed.group.WORLD)
            found[name] = len(seen), all(kinds <= {torch.float64} for kinds in seen)
            if name == "lowrank":
                found["runs of lowrank"] = la.spectrum.passes, True
    finally:
        Ranks.total = total  # type: ignore[method-assign]
    return found


def in_float32() -> dict[str, Any]:
    """Of a network in float32: in which dtypes sums are sent, and those of one process; how far the posterior is."""
    whole = TensorDataset(*(t.float() if t.is_floating_point() else t for t in data("classification").tensors))
    model, total = nn.Sequential(nn.Linear(6, 1100), nn.Tanh(), nn.Linear(1100, 3)).float(), Ranks.total
    with torch.no_grad():
        for i, p in enumerate(model.parameters()):
            p.copy_(torch.randn(p.shape, generator=torch.Generator().manual_seed(i)) / p.shape[-1] ** 0.5)
    sent: dict[str, torch.dtype] = {}

    def noted(ranks: Ranks, sums: dict[str, Tensor], device: torch.device) -> dict[str, Tensor]:
        found = total(ranks, sums, device)
        sent.update({key.removeprefix("sums "): value.dtype for key, value in found.items() if key.startswith("sums ")})
        return found

    one = Laplace(model, "classification", "all").fit(DataLoader(whole, 9), group=None)
    Ranks.total = noted  # type: ignore[method-assign, assignment]
    try:
        la = Laplace(model, "classification", "all").fit(uneven(whole), group=distributed.group.WORLD)
    finally:
        Ranks.total = total  # type: ignore[method-assign]
    dtypes = {key: value.dtype for key, value in one.values.fit.sums.items()}
    return {"sent": sent, "one": dtypes, "away": difference(one, la, whole.tensors[0])}


def test_sums_of_a_network_in_float32_are_added_up_in_float64_where_one_process_has_them_so(two):
    for found in two.run(in_float32):
        assert found["sent"] == found["one"]
        assert {*found["sent"].values()} == {torch.float64}
        assert found["away"] < 1e-5


def test_sums_are_added_up_once_per_run_over_the_data(two):
    for found in two.run(reductions, ["kron", "diag", "full", "ekfac", "inf", "lowrank"]):
        runs, _ = found.pop("runs of lowrank")
        assert runs > 1
        times = {"ekfac": 2, "inf": 2, "lowrank": runs}
        assert found == {name: (times.get(name, 1), True) for name in found}
