"""The studies run from the command line on a folder of data, write their results, and go on where they were."""

from __future__ import annotations

import importlib
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

ROOT = Path(__file__).parents[2]


def run(study: str, *flags: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    environment.pop("LAPLACE_DATA", None)
    command = [sys.executable, "-m", f"experiments.{study}", *flags]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


def grey(folder: Path) -> None:
    rng = np.random.default_rng(0)
    for name in ("mnist", "fashion_mnist", "kmnist", "femnist_digits"):
        arrays = {}
        for part, n in (("train", 300), ("test", 240)):
            y = rng.integers(10, size=n).astype(np.uint8)
            x = rng.integers(60, size=(n, 28, 28)).astype(np.uint8)
            x[np.arange(n), 2 * y + 2] = 255  # a line whose height tells the class
            arrays |= {f"x_{part}": x, f"y_{part}": y}
        np.savez(folder / f"{name}.npz", **arrays)


def mosaic(n: int, seed: int) -> np.ndarray:
    image = pytest.importorskip("PIL.Image")
    pixels = np.random.default_rng(seed).integers(255, size=(-(-n // 100) * 32, 3200, 3)).astype(np.uint8)
    buffer = io.BytesIO()
    image.fromarray(pixels).save(buffer, "WEBP", lossless=True)
    return np.frombuffer(buffer.getvalue(), dtype=np.uint8)


def module(name: str) -> ModuleType:
    sys.path.append(str(ROOT))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(ROOT))


def tables(folder: Path, n: int = 80) -> None:
    rng = np.random.default_rng(0)
    (folder / "uci").mkdir()
    for name in ("energy", "concrete"):
        x, order = rng.normal(size=(n, 3)), rng.permutation(n)[None]
        y = x.sum(1) + 0.1 * rng.normal(size=n)
        np.savez(folder / "uci" / f"{name}.npz", X=x, y=y, train_idx=order[:, :60], test_idx=order[:, 60:])


def nothing(folder: Path) -> None:
    assert folder.is_dir()


def colour(folder: Path, n: int = 60) -> None:
    networks = module("benchmarks.harm.networks")
    y, count = np.arange(n).astype(np.uint8) % 10, np.array([n])
    test = {"n_x_test": count, "webp_x_test_0": mosaic(n, 0), "y_test": y}
    np.savez(folder / "cifar10_webp.npz", **test, n_x_train=count, webp_x_train_0=mosaic(n, 1), y_train=y)
    for name in ("svhn_test10k", "cifar100_test"):
        np.savez(folder / f"{name}_webp.npz", **test)
    corrupted = {f"n_x_sev{s}": count for s in range(1, 6)} | {f"webp_x_sev{s}_0": mosaic(n, s) for s in range(1, 6)}
    np.savez(folder / "cifar10c_2k_webp.npz", **corrupted, y_test=y, test_index=np.arange(n).astype(np.int16))
    (folder / "models").mkdir()
    for layers in (20, 32, 44, 56):
        save_file(
            networks.ResNet((layers - 2) // 6).state_dict(), folder / "models" / f"cifar10_resnet{layers}.safetensors"
        )


STUDIES = {
    "uq_mnist": (grey,),
    "uq_cifar10": (colour,),
    "cost": (grey, colour),
    "configurations": (grey, colour),
    "structures_fmnist": (grey,),
    "selection": (tables,),
    "three_steps": (nothing,),
}


def flags(folder: Path) -> list[str]:
    return ["--data", str(folder), "--quick", "--cache", str(folder / "cache"), "--results", str(folder / "out")]


def rows_of(folder: Path, study: str) -> dict[str, dict]:
    """Run a study twice at toy size and return its rows; the second time, nothing is computed again."""
    pytest.importorskip("matplotlib")
    for fill in STUDIES[study]:
        fill(folder)
    first = run(study, *flags(folder))
    assert first.returncode == 0, first.stderr
    results = folder / "out" / f"{study.replace('_', '-')}-quick.json"
    assert results.with_suffix(".png").exists()
    written = results.stat().st_mtime_ns
    assert run(study, *flags(folder)).returncode == 0
    assert results.stat().st_mtime_ns == written
    return json.loads(results.read_text())["rows"]


@pytest.mark.slow
@pytest.mark.parametrize("study", ["uq_mnist", "uq_cifar10"])
def test_a_study_of_uncertainty_runs_at_toy_size_and_goes_on_where_it_was(tmp_path, study):
    found = rows_of(tmp_path, study)
    assert {"MAP", "temperature", "LA", "mixture of LA"} <= {name.split("/")[0] for name in found}
    if study == "uq_cifar10":
        whole = json.loads((tmp_path / "out" / "uq-cifar10-whole-quick.json").read_text())["rows"]
        assert {
            "MAP",
            "LA all weights",
            "LA all weights evidence",
            "LA all weights calibrated",
            "SWAG",
            "SWAG temperature",
        } <= set(whole)
        found |= whole
        ended = run("uq_cifar10.why", *flags(tmp_path))
        assert ended.returncode == 0, ended.stderr
        why = json.loads((tmp_path / "out" / "uq-cifar10-why-quick.json").read_text())["rows"]
        assert {"MAP", "temperature", "1, one_vs_rest", "1, probit", "1, probit of differences"} <= set(why)
        assert all(row["test"] > 0 for row in why.values())
    for row in found.values():
        for scores in row["sets"].values():
            assert scores["nll"] > 0
            assert 0 <= scores["accuracy"] <= 1
        for scores in row["ood"].values():
            assert 0 <= scores["confidence"] <= 1


@pytest.mark.slow
def test_costs_are_measured_at_toy_size(tmp_path):
    for library in ("bayesian_torch", "ivon", "posteriors"):
        pytest.importorskip(library)
    found = rows_of(tmp_path, "cost")
    assert {"MAP", "LA", "DE-5", "mixture of LA", "SWAG", "VB", "IVON", "CSGHMC"} <= set(found["lenet"]["methods"])
    assert {"MAP", "LA", "LA all weights", "SWAG", "ensemble of 4"} <= set(found["resnet20"]["methods"])
    for case in found.values():
        alone = case["methods"]["MAP"]
        assert alone["training"] == 1
        assert all(row["training"] >= 1 for name, row in case["methods"].items() if name != "MC dropout")
        assert all(row["mb"] >= alone["mb"] for row in case["methods"].values())


@pytest.mark.slow
def test_configurations_are_tried_at_toy_size(tmp_path):
    found = rows_of(tmp_path, "configurations")
    assert {"cifar10/MAP/0", "fmnist/temperature/0", "fmnist/all/kron/ggn/auto/one_vs_rest/0"} <= set(found)
    assert all(row["nll"] > 0 and 0 <= row["auroc_confidence"] <= 1 for row in found.values())


@pytest.mark.slow
def test_structures_are_trained_at_toy_size(tmp_path):
    found = rows_of(tmp_path, "structures_fmnist")
    assert set(found) == {
        f"{name}/0" for name in ("MAP", "MAP, best temperature", "diag", "kron", "ekfac", "block", "full")
    }
    assert all(row["log_likelihood"] < 0 and 0 <= row["auroc"] <= 1 for row in found.values())


@pytest.mark.slow
def test_networks_are_selected_at_toy_size(tmp_path):
    found = rows_of(tmp_path, "selection")
    assert any(name.endswith("-jitter") for name in found)
    assert all({"evidence_all", "evidence_last_layer", "log_likelihood"} <= set(row) for row in found.values())


@pytest.mark.slow
def test_the_three_steps_are_drawn_at_toy_size(tmp_path):
    (measured,) = rows_of(tmp_path, "three_steps").values()
    assert 0 <= measured["truth_in_band_near_data"] <= 1


@pytest.mark.slow
def test_tasks_in_a_row_are_learnt_at_toy_size_and_go_on_where_they_were(tmp_path):
    pytest.importorskip("matplotlib")
    grey(tmp_path)
    results = tmp_path / "out" / "continual-quick.json"

    def go() -> dict[str, list[dict]]:
        ended = run("continual", *flags(tmp_path))
        assert ended.returncode == 0, ended.stderr
        return json.loads(results.read_text())["methods"]

    found = go()
    assert set(found) == {"map", "diag", "kron"}
    for rows in found.values():
        assert [len(row["each"]) for row in rows] == [1, 2, 3, 4, 5]
        assert all(row["mean"] == pytest.approx(sum(row["each"]) / len(row["each"])) for row in rows)
    assert go() == found  # nothing was computed again: not even the CPU seconds differ


@pytest.mark.parametrize("study", ["shift", "continual_limits", "uq_cifar10", "three_steps", "selection"])
def test_a_flag_that_a_study_does_not_use_is_refused(study, capsys):
    main = module(f"experiments.{study}.__main__").main
    with pytest.raises(SystemExit):
        main(["--epochs", "3", "--data", "."])
    assert "unrecognized arguments: --epochs 3" in capsys.readouterr().err


def test_flags_win_over_the_settings_of_the_page_and_of_quick(tmp_path):
    started = module("experiments.uq.start").started

    def chosen(*flags: str) -> tuple[int, int]:
        where = ["--data", str(tmp_path), "--cache", str(tmp_path), "--results", str(tmp_path)]
        study = started("toy", "A toy.", [*where, *flags], seeds=3, epochs=8)
        return study.seeds, study.epochs

    threads = torch.get_num_threads()
    try:
        assert chosen() == (3, 8)
        assert chosen("--quick") == (1, 1)
        assert chosen("--epochs", "2") == (3, 2)
        assert chosen("--quick", "--seeds", "2", "--epochs", "5") == (2, 5)
    finally:
        torch.set_num_threads(threads)


def test_rows_keep_the_cpu_seconds_of_all_runs(tmp_path):
    rows, path = module("experiments.uq.start").Rows, tmp_path / "toy.json"

    def spent(name: str) -> float | None:
        rows(path, {"n": 1}).get(name, lambda: {"sum": sum(i * i for i in range(2_000_000))})
        return json.loads(path.read_text()).get("cpu_seconds")

    first, second = spent("a"), spent("b")
    assert first is not None
    assert second is not None
    assert 0 < first < second
    assert spent("b") == second  # what is there takes no time
    old = json.loads(path.read_text())
    del old["cpu_seconds"]
    path.write_text(json.dumps(old))
    assert spent("c") is None  # the first runs are not known: a sum of the last one alone would mislead


def test_the_cpu_seconds_of_mnist_count_every_training_once(tmp_path):
    seconds = module("experiments.spent").seconds

    def row(train: float, fit: float, predict: float) -> dict:
        return {"train_seconds": train, "fit_seconds": fit, "seconds": predict}

    rows = {"MAP/0": row(2, 0, 0.1), "LA/0": row(2, 3, 0.2), "DE-5/0": row(10, 0, 0.3)}
    rows |= {"DE-5 temperature/0": row(10, 1, 0.4), "mixture of LA/0": row(10, 15, 0.5), "VB/0": row(2 + 5, 0, 0.6)}
    rows |= {"IVON/0": row(4, 0, 0.7)}
    file = tmp_path / "uq-mnist.json"
    file.write_text(json.dumps({"settings": {}, "rows": rows}))
    # five networks, the temperature, the fits of all five, VB after its first network, IVON, all predictions
    assert seconds(file) == pytest.approx(10 + 1 + 15 + 5 + 4 + 2.8)
    file.write_text(json.dumps({"settings": {}, "cpu_seconds": 7.5, "rows": rows}))
    assert seconds(file) == 7.5


def test_ivon_draws_networks_around_the_one_that_it_trained():
    pytest.importorskip("ivon")
    training = module("experiments.uq_mnist.training")
    rng = torch.Generator().manual_seed(0)
    y = torch.arange(4000) % 10
    x = 0.1 * torch.randn(4000, 1, 28, 28, generator=rng)
    x[torch.arange(4000), 0, 2 * y + 2] = 2.0  # a line whose height tells the class
    states, seconds = training.online((x, y), 6, 0, 5)
    networks, kept = training.unpacked(training.packed(states, seconds))
    assert kept == pytest.approx(seconds, rel=1e-5)
    weights = torch.stack([torch.cat([p.flatten() for p in net.parameters()]) for net in networks])
    assert float(weights.std(0).min()) > 0
    assert all(float((net(x).argmax(1) == y).float().mean()) > 0.9 for net in networks)


def test_the_divergence_of_variational_bayes_is_the_sum_over_all_weights():
    training = module("experiments.uq_mnist.training")
    layer, model = nn.Module(), nn.Module()
    layer.mu_weight, layer.rho_weight = (nn.Parameter(torch.randn(3, 4)) for _ in range(2))
    layer.mu_bias, layer.rho_bias = (nn.Parameter(torch.randn(3)) for _ in range(2))
    model.add_module("layer", layer)
    expected, prior = 0.0, 0.7
    for mu, rho in ((layer.mu_weight, layer.rho_weight), (layer.mu_bias, layer.rho_bias)):
        s, m = rho.detach().double().exp().log1p(), mu.detach().double()
        terms = (prior / s).log() + (s.square() + m.square()) / (2 * prior**2) - 0.5
        expected += float(terms.sum())
    assert training.divergence(model, prior).item() == pytest.approx(expected, rel=1e-5)


def test_the_pareto_front_is_what_no_point_beats_in_both():
    pytest.importorskip("matplotlib")
    pareto = module("experiments.configurations.__main__").pareto
    rng = np.random.default_rng(0)
    points = {f"p{i}": {"nll": a, "auroc_confidence": b} for i, (a, b) in enumerate(rng.random((40, 2)).round(1))}

    def beaten(one: dict, other: dict) -> bool:
        better = other["nll"] <= one["nll"] and other["auroc_confidence"] >= one["auroc_confidence"]
        return better and other != one

    front = {tuple(points[name].values()) for name in pareto(points)}
    expected = {tuple(p.values()) for p in points.values() if not any(beaten(p, q) for q in points.values())}
    assert front == expected


def test_configurations_are_means_over_seeds_beside_the_network_of_the_same_seed():
    pytest.importorskip("matplotlib")
    study = module("experiments.configurations.__main__")
    keys = study.SCORES
    nll, alone = {"a": [0.2, 0.4], "b": [0.5, 0.3]}, [0.3, 0.6]
    rows = {f"toy/{i}/kron/ggn/auto/mc/{s}": dict.fromkeys(keys, v) for i in nll for s, v in enumerate(nll[i])}
    rows |= {f"toy/MAP/{s}": dict.fromkeys(keys[:2], v) for s, v in enumerate(alone)}
    assert study.by_task(rows)["toy"]["a/kron/ggn/auto/mc"] == pytest.approx(dict.fromkeys(keys, 0.3))
    assert study.references(rows, "toy")["MAP"] == pytest.approx(dict.fromkeys(keys[:2], 0.45))
    text = study.fronts(rows, "toy")
    assert "| a, kron, ggn, auto, mc | 0.3000 | -0.1000, -0.2000 | 0.3000 | -0.1000, -0.2000 | 0.3000 |" in text
    assert "| MAP | 0.4500 | - | 0.4500 | - | - |" in text


def test_seeds_of_configurations_have_other_images():
    pytest.importorskip("matplotlib")
    some = module("experiments.configurations.tasks")._some
    values = torch.arange(10)
    first, second, third = (some(values, 4, seed).tolist() for seed in range(3))
    assert first == [0, 1, 2, 3]
    assert second == [4, 5, 6, 7]
    assert third == [8, 9, 0, 1]  # from the start again
    assert some(values, 40, 0).tolist() == values.tolist()


def test_claims_are_judged_by_the_numbers_beside_them():
    claims = module("experiments.claims")

    def row(nll: list[float], auroc: float) -> dict:
        sets = {f"r{i}": {"nll": value} for i, value in enumerate(nll)}
        return {"sets": sets, "ood": {"far": dict.fromkeys(("confidence", "entropy", "epistemic"), auroc)}}

    table = {"MAP": row([0.1, 1.0], 0.8), "temperature": row([0.1, 0.9], 0.8), "DE-5": row([0.1, 0.8], 0.9)}
    table |= {"LA": row([0.11, 0.95], 0.8), "LA calibrated": row([0.1, 0.9], 0.8), "mixture of LA": row([0.1, 1], 0.91)}
    text = claims.verdicts({"toy": table}, None)
    assert "| LA is at least as good as MAP in NLL on every set | no | r0 -0.0100" in text
    assert "loses on 1 of 2, most on r0 (0.0100)" in text
    assert "| LA calibrated is at least as good as MAP in NLL on every set | yes |" in text
    assert "temperature scaling in NLL, mean of shifted sets | no | 0.950 against 0.900 nats" in text
    assert text.count("| yes | 0.9100 against 0.9000 |") == 3


@pytest.mark.parametrize("study", [study for study in module("experiments.quick").STUDIES if study != "three_steps"])
def test_a_missing_folder_or_file_is_named(tmp_path, monkeypatch, study):
    """Every study that reads data; `three_steps` reads none."""
    pytest.importorskip("matplotlib")
    monkeypatch.delenv("LAPLACE_DATA", raising=False)
    name = f"experiments.{study}" if study == "continual" else f"experiments.{study}.__main__"
    main, own = module(name).main, ["--cache", str(tmp_path / "c"), "--results", str(tmp_path / "r")]

    def said(*flags: str) -> str:
        with pytest.raises(SystemExit) as ended:
            main([*flags, *own])
        return str(ended.value)

    threads = torch.get_num_threads()
    try:
        assert re.search("needs real data.* --data FOLDER or LAPLACE_DATA=FOLDER", said())
        assert str(tmp_path / "gone") in said("--data", str(tmp_path / "gone"))
        empty = said("--data", str(tmp_path))
        assert re.match(f"There is no {tmp_path}/.*(npz|safetensors)", empty)
        assert not list(tmp_path.glob("r/*.json"))
    finally:
        torch.set_num_threads(threads)


def test_a_study_that_was_stopped_goes_on_after_the_last_row(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    study, made = module("experiments.selection.__main__"), []
    tables(tmp_path)

    def measured(*kind: object) -> dict[str, float]:
        if len(made) == 5:
            raise KeyboardInterrupt
        made.append(kind[1:])
        keys = ("evidence_all", "evidence_last_layer", "log_likelihood_all", "log_likelihood_last_layer")
        return dict.fromkeys((*keys, "log_likelihood"), float(len(made)))

    monkeypatch.setattr(study, "measured", measured)
    threads, results = torch.get_num_threads(), tmp_path / "out" / "selection-quick.json"
    try:
        with pytest.raises(KeyboardInterrupt):
            study.main(flags(tmp_path))
        first = json.loads(results.read_text())["rows"]
        assert len(first) == 5
        made.append("went on")
        study.main(flags(tmp_path))
    finally:
        torch.set_num_threads(threads)
    whole = json.loads(results.read_text())["rows"]
    assert dict(list(whole.items())[:5]) == first
    assert len(whole) == len(made) - 1 == 16
    assert len(set(made)) == len(made)  # nothing was measured twice


@pytest.mark.parametrize("name", ["experiments.uq.start", "experiments.rows"])
def test_results_are_whole_if_a_run_is_stopped_while_it_writes(tmp_path, monkeypatch, name):
    rows = module(name).Rows
    monkeypatch.setattr(module("experiments.rows"), "RESULTS", tmp_path)
    file = tmp_path / "toy.json"
    where = file if name.endswith("start") else "toy"
    rows(where, {"n": 1}).get("a", lambda: {"x": 1.0})
    before = file.read_text()

    def stopped(path: Path, text: str) -> None:
        path.open("w").write(text[: len(text) // 2])
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "write_text", stopped)
    with pytest.raises(KeyboardInterrupt):
        rows(where, {"n": 1}).get("b", lambda: {"x": 2.0})
    assert file.read_text() == before
    monkeypatch.undo()
    monkeypatch.setattr(module("experiments.rows"), "RESULTS", tmp_path)
    again = rows(where, {"n": 1})
    again.get("b", lambda: {"x": 2.0})
    assert set(json.loads(file.read_text())["rows"]) == {"a", "b"}
