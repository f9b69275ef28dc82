"""What cannot fit is refused before it is made: with the bytes, and what would fit."""

from __future__ import annotations

import os
import platform
import re
import resource
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from laplace import Laplace
from laplace.budget import Budget, free, give_back_freed_memory, in_bytes
from laplace.errors import LaplaceError, MemoryBudgetError, OptionError


def data(n: int = 8, d: int = 20, c: int = 3):
    torch.manual_seed(0)
    return torch.randn(n, d), torch.arange(n) % c


def wide(hidden: int = 3000) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, hidden), nn.ReLU(), nn.Linear(hidden, 3))


@pytest.mark.parametrize("subset", ["all", "last_layer"])
def test_full_is_refused_with_what_would_fit(subset):
    p = 63_003 + 9_000 if subset == "all" else 9_003
    la = Laplace(wide(), "classification", subset, "full", memory_budget=2 * 10**9)
    if subset == "last_layer":
        la = Laplace(wide(), "classification", subset, "full", memory_budget=10**9)
    with pytest.raises(MemoryBudgetError) as error:
        la.fit([data()])
    assert in_bytes(40 * p**2) in str(error.value)
    assert f"{p:,} weights" in str(error.value)
    assert "'kron' (" in str(error.value)
    assert "'diag' (" in str(error.value)
    assert isinstance(error.value, MemoryError)
    assert isinstance(error.value, LaplaceError)


def test_kron_is_refused_where_only_diag_fits():
    la = Laplace(wide(20_000), "classification", "all", "kron", memory_budget=10**9)
    with pytest.raises(MemoryBudgetError, match=r"What would fit: 'diag' \(\d"):
        la.fit([data()])


def test_without_a_budget_the_limit_is_what_is_free(monkeypatch):
    monkeypatch.setattr("laplace.budget.free", lambda device: 10**9)
    with pytest.raises(MemoryBudgetError, match="1 GB are free"):
        Laplace(wide(), "classification", "all", "full").fit([data()])


def test_nothing_fits():
    with pytest.raises(MemoryBudgetError, match="no structure; take fewer weights"):
        Laplace(wide(), "classification", "all", "diag", memory_budget=10_000).fit([data()])


def test_nothing_was_allocated_before_the_refusal():
    """A process that may take 2 GB of address space more is told, and not killed."""
    program = """
import sys
sys.path[:0] = sys.argv[1:]
from peak import peak
from test_budget import Laplace, MemoryBudgetError, data, wide
la = Laplace(wide(), "classification", "all", "full", memory_budget=2 * 10**9)
model, (x, y) = la.model, data()
before = peak()
try:
    la.fit([(x, y)])
except MemoryBudgetError:
    print(peak() - before)
"""
    done = subprocess.run([sys.executable, "-c", program, *sys.path], capture_output=True, text=True, check=True)
    assert 1024 * int(done.stdout) < 2e8  # of the 207 GB that it would have taken


def test_large_answers_are_refused_too():
    x, _y = data()
    la = Laplace(wide(200), "regression", "all", "kron", memory_budget=3 * 10**7).fit([(x, torch.randn(8, 3))])
    for ask, words in (
        (lambda: la.posterior_covariance, "covariance matrix of all weights"),
        (lambda: la.posterior_precision.to_matrix(), "dense matrix of all weights"),
        (lambda: la.sample(10_000), "10,000 draws of 4,803 weights"),
        (lambda: la(torch.randn(2000, 20), joint=True), "joint covariance of 6,000 outputs"),
        (lambda: la(torch.randn(500_000, 20)), r"an answer of [\d,]+ numbers or more needs .* or diagonal_output=True"),
        (lambda: la.predict(torch.randn(500_000, 20)), "an answer of .* or fewer n_samples"),
        (lambda: la.functional_samples(x, n_samples=2 * 10**5), "an answer of 4,800,000 numbers .* fewer draws"),
        (
            lambda: la.functional_samples(x, n_samples=2 * 10**5, diagonal_output=True),
            "an answer of 4,800,000 numbers",
        ),
        (lambda: la.predictive_samples(x, "nn", n_samples=2 * 10**5), "an answer of 4,800,000 numbers"),
        (lambda: la(x, "nn", n_samples=2 * 10**5), "an answer of 4,800,000 numbers"),
        (lambda: la.predict(x, "nn", n_samples=2 * 10**5), "an answer of 4,800,000 numbers"),
        (lambda: la.predict(x, n_samples=10**7), "10,000,000 draws of 3 outputs"),
        (lambda: la.functional_covariance(torch.zeros(1, 1, 4803).expand(1000, 3, -1)), "covariance of 3,000 outputs"),
    ):
        with pytest.raises(MemoryBudgetError, match=words) as refused:
            ask()
        assert re.search(r"needs .* of memory; 30 MB are allowed by memory_budget\. [A-Z]", str(refused.value))
    assert la.sample(10).shape == (10, 4803)


def test_a_refusal_changes_nothing():
    x, y = data()
    la = Laplace(wide(30), "classification", "all", "diag", memory_budget=2 * 10**5).fit([(x, y)])
    evidence = float(la.log_marginal_likelihood())
    la.runner.spec = replace(la.runner.spec, budget=Budget(100))
    with pytest.raises(MemoryBudgetError):
        la.fit([(x, y)])
    assert float(la.log_marginal_likelihood()) == evidence


@pytest.mark.parametrize("bad", [0, -1, 1.5, True, "2GB"])
def test_a_budget_is_a_number_of_bytes(bad):
    with pytest.raises(OptionError, match="whole number of bytes"):
        Laplace(wide(3), "classification", memory_budget=bad)


def test_what_is_free_is_a_part_of_what_there_is():
    there = resource.getpagesize() * os.sysconf("SC_PHYS_PAGES")
    assert 0 < free(torch.device("cpu")) <= there


@pytest.mark.parametrize(
    ("n", "words"), [(0, "0 bytes"), (999, "999 bytes"), (1500, "1.5 kB"), (2e9, "2 GB"), (7.2e15, "7,200 TB")]
)
def test_bytes_in_words(n, words):
    assert in_bytes(n) == words


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other mallocs have no malloc_trim")
def test_freed_memory_is_given_back():
    blocks = [torch.ones(2**14) for _ in range(2000)]  # of 64 KB, too small to be mapped each on its own
    last, filled = blocks[-1], resident()
    blocks.clear()
    give_back_freed_memory()
    assert resident() < filled - 64 * 2**20
    assert float(last.sum()) == 2**14
