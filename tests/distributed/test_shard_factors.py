"""`fit(shard_factors=True)`: the factors of each layer stay on one rank, and the posterior is that of one process."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed, nn
from torch.utils.data import DataLoader, TensorDataset

from laplace import Laplace
from laplace.distributed import ShardSampler, buckets, together
from laplace.errors import LaplaceError, NumericalError
from laplace.structures import Kron
from peak import peak
from ranks import Pool

N = 37


def network(task: str) -> nn.Module:
    torch.manual_seed(0)
    outputs = 3 if task == "classification" else 2
    return nn.Sequential(
        nn.Conv2d(1, 2, 3),
        nn.Tanh(),
        nn.Flatten(),
        nn.LayerNorm(18),
        nn.Linear(18, 7),
        nn.Tanh(),
        nn.Linear(7, outputs),
    ).double()


def data(task: str) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(N, 1, 5, 5, generator=generator).double()
    y = torch.arange(N) % 3 if task == "classification" else torch.randn(N, 2, generator=generator).double()
    return TensorDataset(x, y)


def shards(whole: TensorDataset, cut: str) -> Any:
    """Return this rank's part: every k-th example, almost all on the first rank, or all on the last."""
    rank, size = distributed.get_rank(), distributed.get_world_size()
    if cut == "even":
        return DataLoader(whole, 5, sampler=ShardSampler(whole))
    own = slice(0, N - size + 1) if rank == 0 else slice(N - size + rank, N - size + rank + 1)
    if cut == "on one rank":
        own = slice(0, N) if rank == size - 1 else slice(0, 0)
    return [*DataLoader(TensorDataset(*whole[own]), 5)] if len(whole[own][0]) else []


def away(a: torch.Tensor, b: torch.Tensor) -> float:
    return float(((a - b).abs() / (1 + b.abs())).max())


def compared(structure: str, task: str, cut: str) -> dict[str, float]:
    """By what is asked, how far the answer is from that of one process."""
    world, whole = distributed.group.WORLD, data(task)
    x = whole.tensors[0]
    one = Laplace(network(task), task, "all", structure).fit(DataLoader(whole, 6), group=None)
    la = Laplace(network(task), task, "all", structure)
    room = buckets.TO_ONE
    buckets.TO_ONE = 64 if cut == "uneven" else room  # a few numbers at a time, as of matrices that are large
    try:
        la.fit(shards(whole, cut), group=world, shard_factors=True)
    finally:
        buckets.TO_ONE = room
    found: dict[str, float] = {"examples": abs(la.n_data - N)}
    owned = {key.rpartition("/")[0] for key in la.values.fit.sums}
    names = {name for name, owner in zip(one.values.fit.layout.names, la.values.fit.owners.of, strict=True)
             if owner == distributed.get_rank()}  # fmt: skip
    found["own sums only"] = float(owned != names)
    with together(world):
        found["evidence"] = away(la.log_marginal_likelihood(), one.log_marginal_likelihood())
        delta = [torch.tensor(0.7).double().requires_grad_() for _ in range(2)]
        slopes = [
            torch.autograd.grad(p.log_marginal_likelihood(d), d)[0] for p, d in zip((la, one), delta, strict=True)
        ]
        found["its gradient"] = away(*slopes)
        la.prior_precision = one.prior_precision = 1.0
        draws = [p.sample(4, generator=torch.Generator().manual_seed(3)) for p in (la, one)]
        found["samples"] = away(*draws)
        found["log-density"] = away(la.log_prob(draws[1][0]), one.log_prob(draws[1][0]))
        found["marginal variances"] = away(la.posterior_variance, one.posterior_variance)
        found["la(x)"] = max(away(a, b) for a, b in zip(_tuple(la(x)), _tuple(one(x)), strict=True))
        if task == "regression":
            found["joint"] = away(la(x[:4], joint=True)[1], one(x[:4], joint=True)[1])
    for group in ("scalar", "layerwise", *(["diag"] if structure == "diag" else [])):
        la.prior_precision = one.prior_precision = 1.0
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            la.tune(method="evidence", prior_structure=group, group=world)
            one.tune(method="evidence", prior_structure=group, group=None)
        found[f"tuned {group}"] = away(la.prior_precision, one.prior_precision)
        found[f"tuned {group} noise"] = away(la.sigma_noise, one.sigma_noise)
    for name, inputs in {"tensor": x, "loader": DataLoader(whole, 10)}.items():
        p, q = la.predict(inputs, group=world), one.predict(inputs)
        found[f"predicted {name}"] = max(away(p.mean, q.mean), away(p.variance, q.variance))
    draws = [p.predict(x, "nn", n_samples=3, generator=torch.Generator().manual_seed(2), group=g).mean
             for p, g in ((la, world), (one, None))]  # fmt: skip
    found["nn, finite"] = float(not draws[0].isfinite().all())
    if cut == "even" and one.structure.adds:  # more data, and a second posterior
        la.fit(shards(whole, cut), override=False, group=world, shard_factors=True)
        one.fit(DataLoader(whole, 6), override=False, group=None)
        with together(world):
            found["more data"] = away(la.log_marginal_likelihood(), one.log_marginal_likelihood())
            found["sum of two"] = away((la + la).log_marginal_likelihood(), (one + one).log_marginal_likelihood())
    return found


def _tuple(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


def assert_equal(found: list[dict[str, float]]) -> None:
    for of_rank in found:
        for name, difference in of_rank.items():
            assert difference < 1e-8 if name.startswith("tuned") else difference < 1e-10, (name, of_rank)


def test_a_posterior_whose_factors_stay_on_their_ranks_is_that_of_one_process(two):
    assert_equal(two.run(compared, "kron", "classification", "even"))


@pytest.mark.slow
@pytest.mark.parametrize("cut", ["even", "uneven", "on one rank"])
@pytest.mark.parametrize("task", ["classification", "regression"])
@pytest.mark.parametrize("structure", ["kron", "diag", "block", "ekfac", "inf"])
def test_so_it_is_for_all_structures_ranks_and_shards(some, structure, task, cut):
    if some.size == 1:
        pytest.skip("one process keeps all factors")
    assert_equal(some.run(compared, structure, task, cut))


def indefinite() -> dict[str, list[str]]:
    """By prior precision, what this rank and one process say of the evidence: most layers' blocks are indefinite."""
    whole, world = data("regression"), distributed.group.WORLD
    rank, found = distributed.get_rank(), {}
    la, one = (Laplace(network("regression"), "regression", "all", "diag", curvature="hessian") for _ in range(2))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        one.fit(DataLoader(whole, 6), group=None)
        la.fit(shards(whole, "even"), group=world, shard_factors=True)
    lowest = [float(h.min()) for h in one.H.split(one.posterior.fit.layout.sizes)]
    owners = la.values.fit.owners.of
    by_rank = [min(low for low, owner in zip(lowest, owners, strict=True) if owner == r) for r in range(2)]
    between = -sum(by_rank) / 2  # one rank's blocks are positive definite with it, the other's are not
    for delta in (between, 1e3, between / 2, 1e4):
        told = []
        for each in (la, one):
            with together(world if each is la else None):
                try:
                    told.append(f"{float(each.log_marginal_likelihood(delta)):.9g}")
                except NumericalError as error:
                    told.append(str(error).partition(":")[0])
        found[f"{delta}"] = told
    found["definite"] = [str(-by_rank[rank] < between), ""]
    return found


def test_a_block_that_one_rank_cannot_factorise_is_an_error_of_all_and_the_next_answer_is_right(two):
    zero, one = two.run(indefinite)
    assert {zero.pop("definite")[0], one.pop("definite")[0]} == {"True", "False"}
    for found in (zero, one):
        assert len(found) == 4
        for told, expected in found.values():
            assert told == expected
        assert sum("not positive definite" in told for told, _ in found.values()) >= 1
        assert sum(told.startswith("-") for told, _ in found.values()) >= 2


def peak_of_a_fit(shard: bool) -> int:
    """Return by how many bytes the peak of this process grows in a fit, its evidence and its variances."""
    torch.manual_seed(0)
    pairs = [layer for _ in range(10) for layer in (nn.Linear(700, 8, bias=False), nn.Linear(8, 700, bias=False))]
    model = nn.Sequential(*pairs, nn.Linear(700, 3))
    whole = TensorDataset(torch.randn(32, 700), torch.arange(32) % 3)
    few = TensorDataset(torch.randn(8, 4), torch.arange(8) % 3)
    Laplace(nn.Linear(4, 3), "classification", "all").fit(DataLoader(few, 4), group=None).predict(few.tensors[0])
    world, before = distributed.group.WORLD, peak()
    la = Laplace(model, "classification", "all", curvature="sketch")
    la.fit(DataLoader(whole, 8, sampler=ShardSampler(whole)), group=world, shard_factors=shard)
    with together(world):
        la.log_marginal_likelihood()
        la.predict(whole.tensors[0][:4], diagonal_output=True)
    return peak() - before


@pytest.mark.slow
def test_two_ranks_need_about_half_the_memory_each(monkeypatch):
    monkeypatch.setenv(
        "MALLOC_MMAP_THRESHOLD_", str(2**18)
    )  # freed memory goes back at once, as that of large matrices
    grown = {}
    for shard in (False, True):
        pool = Pool(2)  # new processes, whose peaks begin low
        grown[shard] = max(pool.run(peak_of_a_fit, shard))
        pool.close()
    assert grown[True] < 0.7 * grown[False], grown


def kept(path: str) -> dict[str, Any]:
    world, whole = distributed.group.WORLD, data("classification")
    la = Laplace(network("classification"), "classification", "all")
    la.fit(shards(whole, "even"), group=world, shard_factors=True)
    la.save(Path(path) / "posterior", group=world)
    back = Laplace.load(Path(path) / "posterior", network("classification"), group=world)
    x = whole.tensors[0]
    with together(world):
        difference = away(back(x), la(x)) + away(back.log_marginal_likelihood(), la.log_marginal_likelihood())
    alone = said(lambda: Laplace.load(Path(path) / "posterior", network("classification")))
    return {"away": difference, "alone": alone,
            "coverage": [row.kept for row in back.coverage()] == [row.kept for row in la.coverage()]}  # fmt: skip


def said(call: Any) -> str:
    try:
        call()
    except LaplaceError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def test_each_rank_saves_and_loads_its_own_part(two, tmp_path):
    for found in two.run(kept, str(tmp_path)):
        assert found["away"] < 1e-13
        assert found["coverage"]
        assert "Load it on as many ranks, all of them with group=torch.distributed.group.WORLD." in found["alone"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["posterior.rank0of2", "posterior.rank1of2"]


def other_number(path: str) -> str:
    world = distributed.group.WORLD
    return said(lambda: Laplace.load(Path(path) / "posterior", network("classification"), group=world))


@pytest.mark.slow
def test_parts_of_another_number_of_ranks_are_refused(two, tmp_path):
    two.run(kept, str(tmp_path))
    three = Pool(3)
    found = three.run(other_number, str(tmp_path))
    three.close()
    assert all("CheckpointError" in message and "this group has 3." in message for message in found)


def refusals() -> dict[str, str]:
    world, whole = distributed.group.WORLD, data("classification")
    x, rank = whole.tensors[0], distributed.get_rank()

    def fitted(structure: Any = "kron", **options: Any) -> Laplace:
        la = Laplace(network("classification"), "classification", "all", structure)
        return la.fit(shards(whole, "even"), group=world, shard_factors=True, **options)

    la = fitted()
    found = {
        "alone": said(lambda: la.predict(x)),
        "evidence": said(la.log_marginal_likelihood),
        "other inputs": said(lambda: la.predict(x[rank:], group=world)),
        "more inputs": said(lambda: la.predict([x] * (1 + rank), group=world)),
        "a part each": said(lambda: la.predict(DataLoader(whole, 5, sampler=ShardSampler(whole)), group=world)),
        "validation": said(lambda: la.tune(method="validation", val_loader=shards(whole, "even"), group=world)),
        "as_prior": said(la.as_prior),
        "H": said(lambda: la.H),
        "covariance": said(lambda: la.posterior_covariance),
        "full": said(lambda: fitted("full")),
        "lowrank": said(lambda: fitted("lowrank")),
        "damping": said(lambda: fitted(Kron(damping=True))),
        "checkpoint": said(lambda: fitted(checkpoint="fit")),
    }  # fmt: skip
    bad = shards(whole, "uneven")
    if rank == 1:
        bad = [(bad[0][0] * float("nan"), bad[0][1])]
    found["NaN"] = said(lambda: la.fit(bad, group=world, shard_factors=True))
    found["still there"] = said(lambda: la.predict(x, group=world))
    return found


def test_what_needs_all_factors_in_one_place_is_refused_and_nothing_hangs(two):
    zero, one = two.run(refusals)
    for found in (zero, one):
        for name in ("alone", "evidence"):
            assert "UnsupportedError: the factors of this posterior stay on 2 ranks" in found[name]
            assert "la.predict(x, group=...)" in found[name]
        for name in ("other inputs", "more inputs", "a part each"):
            assert "the ranks predict different inputs" in found[name]
        assert "gives each rank a part of the data" in found["validation"]
        for name in ("as_prior", "H", "covariance"):
            assert "needs all factors in one place" in found[name]
        for name in ("full", "lowrank"):
            assert "Take 'kron', 'ekfac', 'inf', 'block' or 'diag', or leave out shard_factors=True." in found[name]
        assert "Leave out damping, or leave out shard_factors=True." in found["damping"]
        assert "checkpoint= with shard_factors=True" in found["checkpoint"]
        assert found["still there"] == "nothing"
    assert "rank 1: batch 0" in one["NaN"]
    assert "RankError: rank 1 failed" in zero["NaN"]
