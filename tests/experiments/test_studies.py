"""The studies run from the command line on a folder of data, write their results, and go on where they were."""

from __future__ import annotations

import importlib
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import save_file

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


def colour(folder: Path, n: int = 60) -> None:
    sys.path.append(str(ROOT))
    try:
        networks = importlib.import_module("benchmarks.harm.networks")
    finally:
        sys.path.remove(str(ROOT))
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


@pytest.mark.slow
@pytest.mark.parametrize(("study", "fill"), [("uq_mnist", grey), ("uq_cifar10", colour)])
def test_a_study_runs_at_toy_size_and_goes_on_where_it_was(tmp_path, study, fill):
    pytest.importorskip("matplotlib")
    fill(tmp_path)
    flags = ["--data", str(tmp_path), "--quick", "--cache", str(tmp_path / "cache"), "--results", str(tmp_path / "out")]
    first = run(study, *flags)
    assert first.returncode == 0, first.stderr
    results = tmp_path / "out" / f"{study.replace('_', '-')}-quick.json"
    found = json.loads(results.read_text())["rows"]
    assert results.with_suffix(".png").exists()
    assert {"MAP", "temperature", "LA", "mixture of LA"} <= {name.split("/")[0] for name in found}
    for row in found.values():
        for scores in row["sets"].values():
            assert scores["nll"] > 0
            assert 0 <= scores["accuracy"] <= 1
        for scores in row["ood"].values():
            assert 0 <= scores["confidence"] <= 1
    written = results.stat().st_mtime_ns
    assert run(study, *flags).returncode == 0
    assert results.stat().st_mtime_ns == written  # nothing was computed again


@pytest.mark.slow
@pytest.mark.parametrize("study", ["uq_mnist", "uq_cifar10", "cost"])
def test_a_missing_folder_is_named(tmp_path, study):
    nothing = run(study)
    assert nothing.returncode == 1
    assert "This study needs real data. Say where it is with --data FOLDER or LAPLACE_DATA=FOLDER" in nothing.stderr
    gone = run(study, "--data", str(tmp_path / "gone"))
    assert f"There is no folder {tmp_path / 'gone'}" in gone.stderr
    empty = run(study, "--data", str(tmp_path), "--cache", str(tmp_path / "cache"), "--results", str(tmp_path))
    assert "There is no" in empty.stderr
