"""Ranks that make one call differently are refused at once, on all ranks, with what differs."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Subset, TensorDataset

import laplace
from laplace import Laplace, marglik_training
from laplace.distributed import ShardSampler, together

N = 61


def network(outputs: int = 3) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, outputs)).double()


def data(task: str = "classification") -> TensorDataset:
    x = torch.randn(N, 4, generator=torch.Generator().manual_seed(1)).double()
    return TensorDataset(x, torch.arange(N) % 3 if task == "classification" else x.sum(1, keepdim=True).sin())


def shard(whole: Any, size: int = 7) -> DataLoader:
    return DataLoader(whole, size, sampler=ShardSampler(whole))


def said(call: Callable[[], Any]) -> str:
    """Return the error of a call, with its type; what it returned if there is none."""
    try:
        return f"none: {call()}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def fitted(task: str = "classification") -> Laplace:
    outputs = 3 if task == "classification" else 1
    return Laplace(network(outputs), task, "all").fit(shard(data(task)), group=distributed.group.WORLD)


def whole_predictions() -> dict[str, str]:
    world, rank, la = distributed.group.WORLD, distributed.get_rank(), fitted()
    whole, x = data(), data().tensors[0]
    twice = DataLoader(whole, 8, sampler=DistributedSampler(whole, 1, 0))
    return {
        "in order": said(lambda: la.predict(DataLoader(whole, 8), group=world)),
        "shuffled": said(lambda: la.predict(DataLoader(whole, 8, shuffle=True), group=world)),
        "a list": said(lambda: la.predict([x[:20], x[20:]], group=world)),
        "another sampler": said(lambda: la.predict(twice, group=world)),
        "without group": said(lambda: len(la.predict(DataLoader(whole, 8)).mean)),
        "no inputs on one rank": said(lambda: len(la.predict(x[: 5 - 5 * rank], group=world).mean)),
        "no inputs at all": said(lambda: la.predict(x[:0], group=world)),
    }


def test_data_that_every_rank_reads_whole_is_not_predicted_twice(two):
    for found in two.run(whole_predictions):
        for name in ("in order", "shuffled"):
            assert "every rank reads the whole data set of 61 examples, which would be predicted 2 times" in found[name]
        assert re.search("ranks 0 and 1 predict the same 61 examples.*ShardSampler", found["a list"]), found["a list"]
        assert "of rank 0 of 1; this is rank" in found["another sampler"] or "failed" in found["another sampler"]
        assert found["without group"] == "none: 61"
        assert found["no inputs on one rank"] == "none: 5"
        assert found["no inputs at all"].startswith("InputError")


def other_settings(path: str) -> dict[str, str]:
    """By setting, what fit, predict, save, tune and calibrate of a posterior say that has another value on rank 1."""
    world, whole, found = distributed.group.WORLD, data("regression"), {}
    for name in ("prior_precision", "prior_mean", "sigma_noise", "temperature"):
        la = fitted("regression")
        setattr(la, name, 2.0 + 3.0 * distributed.get_rank())
        calls: dict[str, Callable[[], Any]] = {
            "fit": lambda la=la: la.fit(shard(whole), group=world),
            "predict": lambda la=la: la.predict(shard(whole), group=world),
            "save": lambda la=la: la.save(Path(path) / "never", group=world),
            "tune": lambda la=la: la.tune(method="evidence", group=world),
            "calibrate": lambda la=la: la.calibrate(shard(whole), group=world),
        }
        found |= {f"{call} {name}": said(make) for call, make in calls.items()}
    la = Laplace(network(), "classification", "all", prior_precision=torch.ones(4) * (1 + distributed.get_rank()))
    found["vector"] = said(lambda: la.fit(shard(data()), group=world))
    return found


def test_ranks_with_other_priors_noise_or_temperatures_are_refused(two, tmp_path):
    for found in two.run(other_settings, str(tmp_path)):
        assert found.pop("vector").startswith(
            "OptionError: the ranks differ in prior_precision, a vector on rank 0 and"
        )
        for name, message in found.items():
            setting = name.split()[1]
            expected = f"OptionError: the ranks differ in {setting}, 2 on rank 0 and 5 on rank 1."
            assert message.startswith(expected), (name, message)
    assert not [*tmp_path.iterdir()]


def other_arguments(path: str) -> dict[str, str]:
    """By call, what this rank is told if rank 1 makes it with a wrong argument."""
    world, rank, whole = distributed.group.WORLD, distributed.get_rank(), data()
    la, x = fitted(), whole.tensors[0][:5]
    la.save(path, group=world)
    calls: dict[str, Callable[[], Any]] = {
        "link": lambda: la.predict(x, link_approx="probitt" if rank else "probit", group=world),
        "keyword": lambda: la.predict(x, group=world, **({"sample": 3} if rank else {})),
        "positional": lambda: la.predict(x, "gml" if rank else "glm", None, 100, None, None, None, world),
        "inputs": lambda: la.predict(None if rank else x, group=world),
        "method": lambda: la.tune(method="x" if rank else "evidence", group=world),
        "grid": lambda: la.optimize_prior_precision(method="x" if rank else "marglik", group=world),
        "rule": lambda: la.calibrate(shard(whole), rule="x" if rank else "best", group=world),
        "level": lambda: la.conformal(shard(whole), level=2.0 if rank else 0.9, group=world),
        "epochs": lambda: marglik_training(network(), shard(whole), n_epochs="x" if rank else 1, group=world),
        "loader": lambda: Laplace(network(), "classification").fit(None if rank else shard(whole), group=world),
        "path": lambda: la.save(5 if rank else "never", group=world),
        "load": lambda: Laplace.load(path, "x" if rank else network(), group=world),
    }
    return {name: said(call) for name, call in calls.items()}


WRONG = {
    "link": "OptionError.*probitt",
    "keyword": "sample",
    "positional": "OptionError.*gml",
    "inputs": "OptionError.*there are no inputs",
    "method": "OptionError.*method='x'",
    "grid": "OptionError.*method='x'",
    "rule": "OptionError.*rule='x'",
    "level": "OptionError.*level",
    "epochs": "OptionError.*n_epochs='x'",
    "loader": "InputError.*the loader is a NoneType",
    "path": "OptionError.*path",
    "load": "OptionError.*a torch.nn.Module is needed",
}


def test_a_wrong_argument_on_one_rank_is_told_to_all_at_once(two, tmp_path):
    zero, one = two.run(other_arguments, str(tmp_path / "file"), seconds=50)  # the group's timeout is 60 seconds
    for name, message in WRONG.items():
        assert re.match(f"(?!RankError).*{message}", one[name], re.DOTALL), (name, one[name])
        assert re.match(f"RankError: rank 1 failed, .*{message}", zero[name], re.DOTALL), (name, zero[name])


def other_calls() -> list[str]:
    """Rank 1 makes another call than rank 0, and then the same."""
    world, rank, whole, la = distributed.group.WORLD, distributed.get_rank(), data(), fitted()
    x = whole.tensors[0][:5]

    def within() -> Any:
        with together(world):
            return la.predict(x, group=world) if rank else None

    pairs: list[tuple[Callable[[], Any], Callable[[], Any]]] = [
        (lambda: la.fit(shard(whole), group=world), lambda: la.predict(x, group=world)),
        (lambda: la.save("never", group=world), lambda: la.tune(method="evidence", group=world)),
        (within, within),
    ]
    found = [said(pair[rank]) for pair in pairs]
    return [*found, said(lambda: la.fit(shard(whole), group=world).n_data)]


def test_different_calls_are_refused_and_the_next_one_works(two):
    for found in two.run(other_calls, seconds=50):
        assert found[0].startswith(
            "RankError: the ranks make different calls: rank 0 is in la.fit, rank 1 is in la.predict. All ranks"
        )
        assert "rank 0 is in la.save, rank 1 is in la.tune" in found[1]
        together = "laplace.distributed.together"
        assert f"rank 0 is in {together}, rank 1 is in la.predict within {together}" in found[2]
        assert found[3] == "none: 61"


class Broken(Dataset):
    """Examples of which one cannot be read."""

    def __init__(self, error: type[Exception]) -> None:
        self.whole, self.error = data(), error

    def __len__(self) -> int:
        return N

    def __getitem__(self, i: int) -> Any:
        if i == 31:  # rank 1's fourth batch of four
            raise self.error("a file is missing")
        return self.whole[i]


def broken_loaders() -> dict[str, str]:
    world, la, found = distributed.group.WORLD, fitted(), {}
    for error in (ValueError, MemoryError):
        found[error.__name__] = said(lambda error=error: la.fit(shard(Broken(error), 4), group=world))
    found["predict"] = said(lambda: la.predict(shard(Broken(ValueError), 4), group=world))
    return found


def test_the_error_of_a_loader_names_rank_and_batch(two):
    zero, one = two.run(broken_loaders)
    for name, kind in {"ValueError": "ValueError", "MemoryError": "MemoryError", "predict": "ValueError"}.items():
        assert one[name] == f"{kind}: a file is missing"
        assert re.match(f"RankError: rank 1 failed, .*{kind}: a file is missing; .*it read batch 3", zero[name])


def fewer() -> dict[str, list[str]]:
    """By loader, the warnings of a fit."""
    world, whole, found = distributed.group.WORLD, data(), {}
    loaders = {
        "drop_last": DataLoader(whole, 16, sampler=ShardSampler(whole), drop_last=True),
        "sampler": DataLoader(whole, 16, sampler=DistributedSampler(whole, drop_last=True)),
        "all": shard(whole),
    }
    for name, loader in loaders.items():
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            Laplace(network(), "classification").fit(loader, group=world)
        found[name] = [str(each.message) for each in caught if "examples of the data set" in str(each.message)]
    return found


def test_examples_that_no_rank_reads_are_told_once(two):
    zero, one = two.run(fewer)
    assert re.match("the ranks read 32 of the 61 examples of the data set.*drop_last", *zero["drop_last"])
    assert "60 of the 61" in zero["sampler"][0]
    assert not zero["all"]
    assert not any(one.values())


def messages() -> dict[str, str]:
    world, rank, whole, la = distributed.group.WORLD, distributed.get_rank(), data(), fitted()
    sharded = network()
    fully_shard(sharded)
    loaders = [shard(whole), [whole.tensors]]
    return {
        "tune": said(lambda: la.tune()),
        "pieces": said(lambda: Laplace(sharded, "classification").fit(DataLoader(whole, 7))),
        "kinds": said(lambda: Laplace(network(), "classification").fit(loaders[rank], group=world)),
    }


def test_messages_say_what_can_be_written(two):
    for found in two.run(messages):
        assert "a posterior that 2 ranks fitted together, and all of them must tune it alike" in found["tune"]
        assert "batches" not in found["tune"]
        assert "group=torch.distributed.group.WORLD" in found["pieces"]
        assert "group=None" not in found["pieces"]
        assert "rank 0 divides one of 61 examples, rank 1 has no sampler that divides one" in found["kinds"]


def test_plan_knows_what_several_ranks_cannot_fit():
    batch = tuple(t[:8] for t in data().tensors)
    preview = laplace.plan(network(), batch, "classification", ranks=4)
    assert not preview["matrix_free"].fits
    assert "in one process" in preview["matrix_free"].reason
    assert laplace.plan(network(), batch, "classification")["matrix_free"].fits
    with pytest.raises(laplace.errors.OptionError, match=r"shard_factors=True .*ranks=1.* Write ranks="):
        laplace.plan(network(), batch, "classification", shard_factors=True)


def test_shard_factors_without_a_group_says_that_it_has_no_effect():
    with pytest.warns(laplace.errors.LaplaceWarning, match="shard_factors=True has no effect here"):
        Laplace(network(), "classification").fit(DataLoader(data(), 7), group=None, shard_factors=True)


def no_data_on_one_rank() -> dict[str, Any]:
    """Train where one rank has nothing to read, and in one process."""
    world, whole, found = distributed.group.WORLD, data("regression"), {}
    options = {"n_epochs": 3, "optimizer_kwargs": {"lr": 1e-2}}
    one = marglik_training(network(1), [whole.tensors], "regression", group=None, **options)
    for empty in (0, 1):
        batches = [] if distributed.get_rank() == empty else [whole.tensors]
        many = marglik_training(network(1), batches, "regression", group=world, **options)
        found[f"evidence without {empty}"] = max(abs(a - b) for a, b in zip(many[2], one[2], strict=True))
        found[f"n without {empty}"] = many[0].n_data
    found["nobody"] = said(lambda: marglik_training(network(1), [], "regression", group=world, **options))
    return found


def test_a_rank_without_data_trains_with_the_others(two):
    for found in two.run(no_data_on_one_rank):
        assert found.pop("nobody").startswith("InputError")
        for name, value in found.items():
            assert value == N if name.startswith("n ") else value < 1e-8, (name, value)


def subsets() -> int:
    whole, rank = data(), distributed.get_rank()
    la = fitted()
    return len(la.predict(DataLoader(Subset(whole, range(rank, N, 2)), 7), group=distributed.group.WORLD).mean)


def test_subsets_of_each_rank_are_predicted(two):
    assert two.run(subsets) == [N, N]
