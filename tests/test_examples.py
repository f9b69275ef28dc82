"""Every example runs, and finds at its small size what its page says."""

from __future__ import annotations

import gzip
import importlib.util
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
NAMES = ("clinc150", "counts", "lora", "preferences", "resnet", "segmentation", "tabular", "transformer")


def run(name: str, *args: Any) -> Any:
    spec = importlib.util.spec_from_file_location(f"example_{name}", ROOT / "examples" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.main(*args, quick=True)


def assert_finite(rows: dict[Any, dict[str, float]]) -> None:
    assert all(math.isfinite(value) for row in rows.values() for value in row.values())


def code(text: str) -> str:
    return "\n".join(line.strip() for line in text.splitlines() if line.strip())


def test_every_example_has_a_page_and_every_page_an_example():
    assert tuple(sorted(path.stem for path in (ROOT / "examples").glob("*.py"))) == NAMES
    assert tuple(sorted(path.stem for path in (ROOT / "docs" / "examples").glob("*.md"))) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_the_code_of_a_page_stands_in_its_script(name):
    page, script = ((ROOT / path).read_text() for path in (f"docs/examples/{name}.md", f"examples/{name}.py"))
    excerpts = re.findall(r"^```py\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    assert excerpts
    for excerpt in excerpts:
        assert code(excerpt) in code(script)


def test_a_resnet_is_better_for_its_uncertainty_where_the_prior_is_tuned_by_validation():
    pytest.importorskip("sklearn")
    rows = run("resnet")
    assert_finite(rows)
    network = rows["network"]
    assert network["confidence"] > network["accuracy"] + 0.1
    for which in ("last layer", "all weights"):
        tuned = rows[f"{which}, validation"]
        assert tuned["nll"] < network["nll"]
        assert tuned["ece"] < network["ece"]
        assert tuned["unseen"] < network["unseen"]
    assert rows["all weights, evidence"]["confidence"] < rows["all weights, evidence"]["accuracy"] - 0.1


def test_a_transformer_is_less_sure_of_words_it_has_not_seen():
    pytest.importorskip("transformers")
    rows = run("transformer")
    for words in ("seen", "never seen"):
        assert_finite(rows[words])
        assert rows[words]["nothing"]["accuracy"] > 0.7
        for name in ("embeddings", "all weights"):
            assert rows[words][name]["nll"] < rows[words]["nothing"]["nll"]
    for name, times in {"embeddings": 1.1, "all weights": 1.0}.items():
        assert rows["never seen"][name]["epistemic"] > times * rows["seen"][name]["epistemic"]
        assert rows["noticed"][name]["auroc"] > rows["noticed"]["last layer"]["auroc"]


def test_adapters_alone_are_uncertain_and_less_so_with_more_examples():
    pytest.importorskip("peft")
    rows = run("lora")
    assert_finite(rows)
    before = rows.pop(0)
    few, many = rows[min(rows)], rows[max(rows)]
    assert before["own"] > 0.75
    assert many["accuracy"] > before["accuracy"] + 0.15
    assert all(row["only_adapters"] and row["uncertain"] < row["weights"] for row in rows.values())
    assert many["epistemic"] < 0.8 * few["epistemic"]
    assert few["nll"] < few["nll_before"]


def test_real_text_is_read_and_all_methods_are_scored(tmp_path):
    """On a tiny network and sentences of its own making, of the files' form."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("peft")
    (module,) = re.findall(r"^INTENTS = \((.*?)^\)", (ROOT / "examples" / "clinc150.py").read_text(), re.M | re.S)
    intents = re.findall(r'"(\w+)"', module)
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *intents, "please", "now", "weather"]
    (tmp_path / "vocab.txt").write_text("\n".join(words))
    transformers.BertTokenizer(str(tmp_path / "vocab.txt")).save_pretrained(tmp_path / "model")
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    config = transformers.BertConfig(vocab_size=len(words), **sizes)
    transformers.BertModel(config).save_pretrained(tmp_path / "model")
    rows = [(f"please {intents[i]} now"[: 40 + n], i) for i in range(15) for n in range(4)]
    splits = {
        split: {"text": [t for t, _ in rows], "label": [i for _, i in rows]} for split in ("train", "val", "test")
    }
    splits |= {"oos_test": {"text": ["weather now"] * 5, "label": [-1] * 5}, "label_names": intents}
    with gzip.open(tmp_path / "clinc150.json.gz", "wt") as file:
        json.dump(splits, file)
    found = run("clinc150", tmp_path, tmp_path / "model")
    assert list(found) == ["network", "temperature scaling", "last layer", "adapters and head"]
    for name, row in found.items():
        doubt = row.pop("epistemic")
        assert math.isnan(doubt) == (name in ("network", "temperature scaling"))
        assert all(math.isfinite(value) for value in row.values())


def test_a_segmentation_is_least_sure_at_borders():
    rows = run("segmentation")
    assert_finite(rows)
    assert rows["network"]["accuracy"] > 0.9
    assert rows["validation"]["nll"] < rows["evidence"]["nll"] < rows["network"]["nll"]
    assert rows["validation"]["ece"] < rows["network"]["ece"]
    borders, inside, background = (rows[place] for place in ("borders", "inside", "background"))
    assert borders["epistemic"] > 1.2 * inside["epistemic"] > 1.2 * background["epistemic"]
    assert borders["wrong"] > inside["wrong"]


def test_rates_are_less_certain_where_nothing_was_counted_and_the_last_layer_alone_is_too_sure():
    found = run("counts")
    assert all(value.isfinite().all() for value in found.values())
    assert (found["lower"] < found["rate"]).all()
    assert (found["rate"] < found["upper"]).all()
    spread = found["upper"].log() - found["lower"].log()
    counted = found["hour"] < 20
    assert spread[~counted].min() > spread[counted].max()
    assert found["last layer, full"] < found["all, full"] <= found["all, kron"]
    assert found["all, full"] > 0.88


def test_preferences_between_far_options_are_less_sure_and_what_rewards_share_cancels():
    found = run("preferences")
    assert all(value.isfinite().all() for value in found.values())
    assert (found["after"] < found["before"]).all()
    assert (found["loss_after"] < found["loss_before"])[1:].all()  # beyond what was compared
    assert found["after"].argmin() == len(found["after"]) - 1
    assert found["together"] < 0.5 * found["independent"]


def test_a_table_is_better_predicted_with_a_posterior():
    rows = run("tabular")
    for scores in rows.values():
        assert_finite(scores)
        assert scores["last layer"]["nll"] < scores["network"]["nll"] + 0.01
    assert rows["diabetes"]["last layer"]["nll"] < rows["diabetes"]["network"]["nll"]
    held = {name: row["covered"] for name, row in rows["diabetes"].items()}
    assert held["network"] < held["last layer"]
