"""The study of tasks in a row: its priors and kernels against dense algebra, and that it runs from end to end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from laplace import Laplace

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT))

joining = pytest.importorskip("experiments.continual_limits.joining")
fromp = pytest.importorskip("experiments.continual_limits.fromp")


def fits(count: int = 3):
    """Fit different data at different weights of one small network."""
    found = []
    for seed in range(count):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
        data = torch.randn(20 + seed, 4, dtype=torch.float64), torch.randint(3, (20 + seed,))
        found.append(Laplace(model, "classification", "all", "kron").fit([data]).posterior.fit)
    return found


def dense(fit) -> torch.Tensor:
    """Return the block-diagonal of B (x) A / n, tensor after tensor."""
    blocks = []
    for name in fit.layout.names:
        a, b, count = (fit.sums[f"{name}/{key}"] for key in ("A", "B", "count"))
        blocks.append(torch.kron(b[0].double(), a[0].double() / count))
    return torch.block_diag(*blocks)


def test_each_way_of_joining_is_the_dense_matrix_of_its_formula():
    tasks, delta = fits(), torch.tensor(0.3)
    sums = {key: sum(fit.sums[key] for fit in tasks) for key in tasks[0].sums}
    factors = dense(replace(tasks[0], sums=sums))
    matrices = {"factors": factors, "counted": 3 * factors, "products": sum(dense(fit) for fit in tasks)}
    torch.manual_seed(9)
    theta = torch.randn_like(tasks[0].mean).requires_grad_()
    offset = (theta - tasks[-1].mean).detach()
    assert set(matrices) == set(joining.JOININGS)
    for name, matrix in matrices.items():
        prior = joining.prior_after(tasks, delta, name)
        assert prior.n_data == sum(fit.n_data for fit in tasks)
        precision = matrix + 0.3 * torch.eye(len(offset), dtype=torch.float64)
        value = prior.scatter(theta, prior.layout)
        torch.testing.assert_close(value, offset @ precision @ offset, rtol=1e-4, atol=0)
        (gradient,) = torch.autograd.grad(value, theta)
        torch.testing.assert_close(gradient, 2 * precision @ offset, rtol=1e-3, atol=1e-4)


def test_one_earlier_task_is_the_same_however_it_is_joined():
    tasks = fits(1)
    theta = torch.randn_like(tasks[0].mean)
    values = [
        joining.prior_after(tasks, torch.tensor(2.0), name).scatter(theta, tasks[0].layout) for name in joining.JOININGS
    ]
    torch.testing.assert_close(values[1:], values[:1] * 2, rtol=1e-4, atol=0)


@pytest.mark.parametrize("structure", ["diag", "kron"])
def test_the_kernel_is_that_of_the_linearised_probabilities(structure):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    x, y = torch.randn(30, 4, dtype=torch.float64), torch.randint(3, (30,))
    la = Laplace(model, "classification", "all", structure, prior_precision=0.5).fit([(x, y)])
    found = fromp.memory(la, x[:6])
    names = [name for name, _ in model.named_parameters()]

    def probabilities(*values):
        return torch.func.functional_call(model, dict(zip(names, values, strict=True)), (x[:6],)).softmax(1)

    jacobians = torch.autograd.functional.jacobian(probabilities, tuple(p.detach() for p in model.parameters()))
    rows = torch.cat([j.flatten(2) for j in jacobians], 2)  # (M, C, P)
    covariance = torch.linalg.inv(
        la.posterior_precision.to_matrix() if structure == "kron" else la.posterior_precision.diag()
    )
    for c in range(3):
        kernel = rows[:, c] @ covariance @ rows[:, c].T
        kernel = kernel + fromp.JITTER * kernel.diagonal().mean() * torch.eye(6, dtype=torch.float64)
        torch.testing.assert_close(found.inverse[c] @ kernel, torch.eye(6, dtype=torch.float64), atol=1e-5, rtol=0)
    torch.testing.assert_close(found.p, probabilities(*model.parameters()).detach())
    assert float(found.distance(found.p)) == 0
    assert float(found.distance(found.p + 0.01)) > 0


def test_the_table_has_means_over_shared_seeds_and_differences_within_each_seed():
    report = pytest.importorskip("experiments.continual_limits.report")
    means = {"kron": {0: [0.9, 0.8], 1: [0.9, 0.6]}, "other": {0: [0.9, 0.85], 1: [0.9, 0.7]}}

    def rows() -> dict[str, dict]:
        return {
            f"500/{name}/{seed}/{seen}": {"mean": value}
            for name, seeds in means.items()
            for seed, each in seeds.items()
            for seen, value in enumerate(each, 1)
        }

    blank = " | -" * 8
    assert report.by_variant(rows())[500, "kron"] == pytest.approx([0.9, 0.7])
    assert f"| 500 | other | 0.9000 | 0.7750{blank} | +0.0500, +0.1000 |" in report.table(rows())
    means["short"] = {0: [0.7]}
    assert report.by_variant(rows())[500, "kron"] == pytest.approx([0.9, 0.8])  # of the seed that all have
    assert f"| 500 | other | 0.9000 | 0.8500{blank} | +0.0500, +0.1000 |" in report.table(rows())
    assert f"| 500 | short | 0.7000 | -{blank} | -0.2000 |" in report.table(rows())


@pytest.mark.slow
def test_the_study_runs_at_toy_size_and_goes_on_where_it_was(tmp_path):
    pytest.importorskip("matplotlib")
    rng, arrays = np.random.default_rng(0), {}
    for part, n in (("train", 300), ("test", 200)):
        y = rng.integers(10, size=n).astype(np.uint8)
        x = rng.integers(60, size=(n, 28, 28)).astype(np.uint8)
        x[np.arange(n), 2 * y + 2] = 255  # a line whose height tells the class
        arrays |= {f"x_{part}": x, f"y_{part}": y}
    np.savez(tmp_path / "mnist.npz", **arrays)
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    flags = ["--data", str(tmp_path), "--quick", "--cache", str(tmp_path / "cache"), "--results", str(tmp_path / "out")]

    def run() -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "experiments.continual_limits", *flags]
        return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)

    first = run()
    assert first.returncode == 0, first.stderr
    results = tmp_path / "out" / "continual-limits-quick.json"
    rows = json.loads(results.read_text())["rows"]
    assert results.with_suffix(".png").exists()
    for name in ("kron", "kron, sum of products", "kron, prior per tensor", "FROMP, diag"):
        for seen in (1, 2, 3):
            row = rows[f"1000/{name}/0/{seen}"]
            assert len(row["each"]) == seen
            assert row["mean"] == pytest.approx(sum(row["each"]) / seen, abs=1e-4)
    assert len(rows["1000/kron, prior per tensor/0/3"]["prior_precision"]) == 6
    written = results.stat().st_mtime_ns
    assert run().returncode == 0
    assert results.stat().st_mtime_ns == written  # nothing was computed again
