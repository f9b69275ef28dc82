"""Every example runs, and what it finds makes sense."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path
from typing import Any

import pytest
import torch

EXAMPLES = Path(__file__).parent.parent / "examples"


def run(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.main(quick=True)


def assert_finite(rows: dict[Any, dict[str, float]]) -> None:
    assert all(math.isfinite(value) for row in rows.values() for value in row.values())


def test_a_resnet_is_less_confident_with_uncertain_weights():
    pytest.importorskip("sklearn")
    rows = run("resnet")
    assert_finite(rows)
    for name in ("last layer", "all weights"):
        assert rows[name]["confidence"] < rows["network"]["confidence"]
        assert rows[name]["unseen"] < rows[name]["confidence"]


def test_a_transformer_is_less_sure_of_words_it_has_not_seen():
    pytest.importorskip("transformers")
    rows = run("transformer")
    assert_finite(rows)
    assert rows["evidence"]["after"] >= rows["evidence"]["before"]
    assert rows["words never seen"]["epistemic"] > rows["words seen"]["epistemic"]


def test_adapters_alone_are_uncertain_and_less_so_with_more_examples():
    pytest.importorskip("peft")
    rows = run("lora")
    assert_finite(rows)
    assert all(row["only_adapters"] and row["uncertain"] < row["weights"] for row in rows.values())
    assert rows[max(rows)]["epistemic"] < rows[min(rows)]["epistemic"]


def test_rates_are_less_certain_where_nothing_was_counted():
    found = run("counts")
    assert all(value.isfinite().all() for value in found.values())
    assert (found["lower"] < found["rate"]).all()
    assert (found["rate"] < found["upper"]).all()
    spread = found["upper"].log() - found["lower"].log()
    counted = found["hour"] < 20
    assert spread[~counted].min() > spread[counted].mean()


def test_preferences_between_far_options_are_less_sure():
    found = run("preferences")
    assert all(value.isfinite().all() for value in found.values())
    assert (found["after"] < found["before"]).all()
    assert torch.argmin(found["after"]) == len(found["after"]) - 1
