"""A rank that fails ends the call on all ranks, with an error that names it; and nothing hangs."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed, nn

from laplace import Laplace
from laplace.errors import CheckpointError, InputError, LaplaceError, RankError
from ranks import Pool

WORLD = "world"


def batches(n: int = 6, seed: int = 0) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return some_batches(seed + distributed.get_rank(), n)


def some_batches(seed: int, n: int = 6) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [(torch.randn(5, 4, generator=generator).double(), torch.arange(5) % 3) for _ in range(n)]


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()


class Loader:
    """Batches that do something of their own before one of them is read."""

    def __init__(self, parts: list[Any], at: int, act: Any) -> None:
        self.parts, self.at, self.act = parts, at, act

    def __iter__(self) -> Iterator[Any]:
        for i, part in enumerate(self.parts):
            if i == self.at:
                self.act()
            yield part


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def out_of_memory() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory.")


class Greedy(torch.autograd.Function):
    """Passes values on. Runs out of memory on the way back of large ones."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.large = bool((x.abs() > 90).any())
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        if ctx.large:
            out_of_memory()
        return gradients[0]


class Passing(nn.Module):
    """A layer that runs out of memory with large values: as they come, or on their way back."""

    def __init__(self, back: bool) -> None:
        super().__init__()
        self.back = back

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.back and bool((x.abs() > 90).any()):
            out_of_memory()
        return Greedy.apply(x) if self.back else x


def failures() -> dict[str, tuple[str, str, bool]]:
    """By fault of rank 1, the error of this rank, and whether its earlier posterior is as it was."""
    rank, found = distributed.get_rank(), {}
    la = Laplace(network(), "classification", "all").fit(batches(2), group=distributed.group.WORLD)
    before = la.log_marginal_likelihood()

    def attempt(name: str, loader: Any, model: nn.Module | None = None) -> None:
        one = la if model is None else Laplace(model, "classification", "all")
        try:
            one.fit(loader, group=distributed.group.WORLD)
            found[name] = ("none", "", True)
        except (LaplaceError, RuntimeError, KeyboardInterrupt) as error:
            same = bool(la.log_marginal_likelihood() == before)
            found[name] = (type(error).__name__, str(error), same)

    parts = batches()
    bad = [*parts]
    if rank == 1:
        bad[3] = (bad[3][0] * float("nan"), bad[3][1])
    attempt("NaN", bad)
    wrong = [*parts]
    if rank == 1:
        wrong[2] = (wrong[2][0], wrong[2][1] + 7)
    attempt("labels", wrong)
    attempt("first batch", [(parts[0][0][:, :2], parts[0][1])] if rank == 1 else parts)
    attempt("interrupt", Loader(parts, 4, interrupt) if rank == 1 else parts)
    attempt("memory", Loader(parts, 2, out_of_memory) if rank == 1 else parts)
    huge = [(x * (1e5 if rank == 1 and i == 3 else 1.0), y) for i, (x, y) in enumerate(parts)]
    for name, back in (("memory of the network", False), ("memory of gradients", True)):
        attempt(name, huge, nn.Sequential(network()[0], Passing(back), *network()[1:]))
    attempt("not a loader", 5 if rank == 1 else parts)
    attempt("nobody has data", [])
    other = network()
    with torch.no_grad():
        other[2].bias += rank
    attempt("networks", parts, other)
    attempt("the same data", batches(3, -rank))
    found["options"] = _options(parts, rank)
    return found


def _options(parts: Any, rank: int) -> tuple[str, str, bool]:
    try:
        Laplace(network(), "classification", hessian_structure="diag" if rank else "kron").fit(
            parts, group=distributed.group.WORLD
        )
    except LaplaceError as error:
        return type(error).__name__, str(error), True
    return "none", "", True


EXPECTED = {  # by fault: the error of rank 1, what it says, the error of rank 0
    "NaN": ("InputError", "rank 1: batch 3: .*NaN", "RankError"),
    "labels": ("InputError", "rank 1: batch 2: class labels", "RankError"),
    "first batch": ("ModelError", "rank 1: batch 0", "RankError"),
    "interrupt": ("KeyboardInterrupt", "", "RankError"),
    "memory": ("OutOfMemoryError", "out of memory", "RankError"),
    "memory of the network": ("OutOfMemoryError", "out of memory", "RankError"),
    "memory of gradients": ("OutOfMemoryError", "out of memory", "RankError"),
    "not a loader": ("InputError", "rank 1: the loader is a int", "RankError"),
    "networks": ("ModelError", r"rank 1: .*differ: '2.bias' has other values.*broadcast", "RankError"),
    "options": ("OptionError", "rank 1 and rank 0 differ in structure", "RankError"),
}


def test_a_rank_that_fails_ends_the_call_on_all_ranks(two):
    zero, one = two.run(failures)
    for name, (kind, message, other) in EXPECTED.items():
        assert one[name][0] == kind, (name, one[name])
        assert re.search(message, one[name][1], re.DOTALL), one[name]
        assert zero[name][0] == other, (name, zero[name])
        assert re.search(rf"rank 1 failed, .*{kind}.*{message.removeprefix('rank 1: ')}", zero[name][1], re.DOTALL), (
            zero[name]
        )
    assert "differ.) The posterior is as it was" in zero["networks"][1]
    assert "raised by the loader while it read batch 2" in zero["memory"][1]
    assert re.search("raised in batch(es 0 to 5| 3)", zero["memory of gradients"][1])  # six small batches ran as one
    assert "raised in batch 3." in zero["memory of the network"][1]
    for found in (zero, one):
        assert found["nobody has data"][0] == "InputError"
        assert re.search("ranks 0 and 1 read the same 15 examples", found["the same data"][1])
        assert all(same for *_, same in found.values())


def test_unequal_numbers_of_batches_do_not_hang(two):
    assert two.run(unequal) == [35, 35]


def unequal() -> int:
    parts = batches(1 if distributed.get_rank() else 6)
    return Laplace(network(), "classification", "all", "ekfac").fit(parts, group=distributed.group.WORLD).n_data


def interrupted_while_waiting() -> str:
    """Rank 0 waits at the end of its shard when Ctrl-C comes; rank 1 reads on."""
    rank = distributed.get_rank()
    parts = batches()
    if rank == 0:
        threading.Timer(1.0, interrupt).start()
    try:
        Laplace(network(), "classification").fit(
            Loader(parts, 5, lambda: time.sleep(3)) if rank else parts, group=distributed.group.WORLD
        )
    except (KeyboardInterrupt, RankError) as error:
        return type(error).__name__
    return "none"


@pytest.mark.slow
def test_an_interrupt_while_a_rank_waits_for_the_others_reaches_all(two):
    assert two.run(interrupted_while_waiting) == ["KeyboardInterrupt", "RankError"]


def killed(path: str, structure: str, die: bool) -> Any:
    """Fit with a checkpoint; rank 1 is killed in the midst if `die`. Returns the evidence, or the error."""
    rank, parts, readings = distributed.get_rank(), batches(9), []

    def count() -> None:
        readings.append(1)
        if die and rank == 1 and len(readings) == (1 if structure == "kron" else 2):
            os.kill(os.getpid(), signal.SIGKILL)

    loader = Loader(parts, 6, count)
    la = Laplace(network(), "classification", "all", structure, curvature="sketch")
    options: dict[str, Any] = {"checkpoint": path, "every": 2} if path else {}
    generator = torch.Generator().manual_seed(3)
    try:
        la.fit(loader, group=distributed.group.WORLD, generator=generator, **options)
    except RankError as error:
        return str(error)
    return float(la.log_marginal_likelihood())


def other_number(path: str) -> str:
    try:
        Laplace(network(), "classification").fit(batches(), checkpoint=path, group=distributed.group.WORLD)
    except (CheckpointError, RankError) as error:
        return str(error)
    return "none"


@pytest.mark.slow
@pytest.mark.parametrize("structure", ["kron", "ekfac"])
def test_after_a_kill_the_others_raise_and_the_resumed_job_ends_with_the_same_posterior(tmp_path, structure, two):
    whole = two.run(killed, "", structure, False)
    path = str(tmp_path / "fit")
    pool = Pool(2)
    said, _ = pool.run(killed, path, structure, True, lost=[1])
    pool.close()
    assert "lost the others" in said
    assert len([*tmp_path.iterdir()]) == 2
    three = Pool(3)
    assert all("left by 2 ranks" in message for message in three.run(other_number, path))
    three.close()
    with pytest.raises(CheckpointError, match="was left by 2 ranks; this one would read other parts"):
        Laplace(network(), "classification").fit(some_batches(0), checkpoint=path)
    resumed = two.run(killed, path, structure, False)
    assert resumed == pytest.approx(whole, rel=1e-12)
    assert not [*Path(tmp_path).iterdir()]


def test_the_file_of_one_process_is_refused_by_several(two, tmp_path):
    path = str(tmp_path / "fit")
    with pytest.raises(torch.OutOfMemoryError):
        Laplace(network(), "classification").fit(Loader(some_batches(0), 4, out_of_memory), checkpoint=path, every=2)
    assert Path(path).is_file()
    for message in two.run(other_number, path):
        assert "was left by 1 rank; these 2 would read other parts of the data" in message


def test_group_must_be_a_process_group():
    model = nn.Linear(4, 3).double()
    with pytest.raises(LaplaceError, match=r"group='world' is a str; a process group .*group.WORLD"):
        Laplace(model, "classification").fit([(torch.randn(3, 4).double(), torch.arange(3))], group=WORLD)
    with pytest.raises(InputError, match="no example"):
        Laplace(model, "classification").fit([], group=distributed.group.WORLD)  # None: it was not started
