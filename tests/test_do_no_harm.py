"""The harness of `benchmarks/do_no_harm.py` at small size, on data that comes with scikit-learn."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"

pytest.importorskip("sklearn")


@pytest.fixture(scope="module")
def harm() -> Any:
    """The modules of the harness; the folder goes behind the others, because its files share names with tests."""
    sys.path.append(str(BENCHMARKS))
    try:
        from harm import data, figure, methods, networks, promises, report, tasks
    finally:
        sys.path.remove(str(BENCHMARKS))
    return SimpleNamespace(
        data=data, figure=figure, methods=methods, networks=networks, promises=promises, report=report, tasks=tasks
    )


def _diabetes(tasks: Any) -> Any:
    from sklearn.datasets import load_diabetes

    x, y = (torch.from_numpy(a).float() for a in load_diabetes(return_X_y=True))
    x, y = x / x.std(0), ((y - y.mean()) / y.std()).unsqueeze(1)
    return tasks.Splits(x[:250], y[:250], x[250:350], y[250:350], x[350:], y[350:])


@pytest.fixture(scope="module")
def table(harm: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Every posterior and method of one classification and one regression."""
    cache = tmp_path_factory.mktemp("cache")

    def network(splits: Any) -> Any:
        return harm.networks.perceptron(10, (8,), 1)

    def trained(folder: Any, splits: Any, seed: int) -> Any:
        net = network(splits)
        harm.networks.train(net, splits.train_x, splits.train_y, steps=100, seed=seed, lr=1e-2)
        return net

    diabetes = harm.tasks.Task("diabetes", 1, lambda *_: _diabetes(harm.tasks), trained, network, True)
    rows: dict[str, dict] = {}
    sizes = harm.methods.Sizes(300, 200, 100, 100)
    for task in (harm.tasks.TASKS["digits"], diabetes):
        prepared = task.prepare(harm.data.Folder(cache), cache, 0)
        start = f"{task.name}/0/"
        rows |= {start + name: row for name, row in harm.methods.network_rows(prepared, task.regression, sizes)}
        for weights in harm.methods.weights_of(prepared):
            found = harm.methods.posterior_rows(prepared, weights, task.regression, sizes, lambda _: True, 0)
            rows |= {start + name: row for name, row in found}
    return harm.report.Table(rows)


def test_every_method_is_scored(table: Any) -> None:
    assert table.classes == ["digits"]
    assert table.values == ["diabetes"]
    for task in table.tasks:
        assert table.posteriors(task) == ["last kron", "last full", "all kron"]
    for rows in table.cells.values():
        assert all(math.isfinite(row["nll"]) for row in rows)


@pytest.mark.parametrize("weights", ["last kron", "last full", "all kron"])
def test_neither_tuning_nor_calibration_harms(harm: Any, table: Any, weights: str) -> None:
    """The lines of the benchmark, on the sets that come with scikit-learn: one network each, so no averages."""
    promises = harm.promises
    for task in table.tasks:
        network = table.mean(task, harm.report.named(weights, "network"))
        allowed = max(promises.HARM, promises.HARM_SHARE * abs(network))
        assert table.excess(task, f"{weights} / auto") <= allowed, task
        assert table.excess(task, f"{weights} / calibrate", "temperature") <= promises.CALIBRATED, task


@pytest.mark.parametrize("weights", ["last kron", "last full", "all kron"])
def test_intervals_hold_what_they_say(harm: Any, table: Any, weights: str) -> None:
    for method in ("auto", "calibrate"):
        held = table.mean("diabetes", f"{weights} / {method}", "coverage")
        assert harm.promises.LOW <= held <= harm.promises.HIGH, method


def test_the_evidence_alone_does_harm(table: Any) -> None:
    """Without this the lines above would hold for any tuning."""
    assert table.excess("digits", "last kron / evidence one_vs_rest") > 0.1
    assert table.excess("digits", "all kron / evidence one_vs_rest") > 0.5


def test_the_temperature_is_the_best_one_of_the_validation_data(harm: Any) -> None:
    logits = 3 * torch.randn(400, 5, generator=torch.Generator().manual_seed(0))
    y = torch.distributions.Categorical(logits=logits / 2.5).sample()
    best = harm.methods.best_temperature(logits, y)

    def loss(t: float) -> float:
        return float(torch.nn.functional.cross_entropy(logits.double() / t, y))

    assert loss(best) <= min(loss(0.99 * best), loss(1.01 * best))
    assert best == pytest.approx(2.5, rel=0.2)


def test_what_was_trained_is_read_again(harm: Any, tmp_path: Path) -> None:
    task = harm.tasks.TASKS["digits"]
    first = task.prepare(harm.data.Folder(tmp_path), tmp_path, 1)
    again = task.prepare(harm.data.Folder(tmp_path), tmp_path, 1)
    net, splits = again.whole()
    assert torch.equal(first.features.test_x, again.features.test_x)
    with torch.no_grad():
        assert torch.allclose(net(splits.test_x), first.head(first.features.test_x), atol=1e-6)


def test_tables_halves_and_promises_are_written(harm: Any, table: Any, tmp_path: Path) -> None:
    assert "| digits | last kron |" in table.markdown()
    assert "diabetes  all kron" in table.terminal()
    assert "Chosen on banking77" in harm.promises.halves(table)
    assert "auto, last kron: NLL" in harm.promises.acceptance(table)
    harm.figure.draw(table, tmp_path / "harm.png")
    assert (tmp_path / "harm.png").stat().st_size > 10_000


def test_a_missing_folder_is_named(harm: Any, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"mnist\.npz.*--data DIR"):
        harm.tasks.TASKS["mnist"].prepare(harm.data.Folder(tmp_path), tmp_path, 0)
