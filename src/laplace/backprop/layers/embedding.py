"""nn.Embedding and nn.EmbeddingBag: a is the one-hot vector of an id, and is never written out.

Only the diagonal of A is kept, which counts how often each row was looked up. For an Embedding under expand, that is
all of A. A position that holds padding does not count, so that it does not matter how far a batch was padded.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from laplace.backprop.layers.base import Call, Rule
from laplace.backprop.lookup import Lookup
from laplace.backprop.uses import Use


class Embedding(Rule):
    """Computes G[v] = sum of g over the positions of token v, and zero at `padding_idx`."""

    name = "embedding"

    def uses(self, call: Call, keys: list[str], gs: list[Tensor], reduce: bool, first: bool) -> dict[str, Use]:
        table = call.module
        assert isinstance(table, nn.Embedding)
        ids = call.by_example(call.read("input")).long()
        g = call.gradient(gs[0])
        return {"weight": _lookup(ids.reshape(len(ids), -1, 1), None, g, table, reduce, first)}


class EmbeddingBag(Rule):
    """Computes gradients for bags of tokens, summed with weights or averaged, given as rows or with offsets."""

    name = "embedding bag"

    def uses(self, call: Call, keys: list[str], gs: list[Tensor], reduce: bool, first: bool) -> dict[str, Use]:
        table = call.module
        assert isinstance(table, nn.EmbeddingBag)
        if table.mode == "max":
            raise NotImplementedError("the largest of some rows is not a linear map of them")
        ids, share = _bags(table, *_arguments(call))
        ids, share = call.by_example(ids), call.by_example(share)
        bags = (len(ids), -1, ids.shape[-1])
        return {"weight": _lookup(ids.reshape(bags), share.reshape(bags), call.gradient(gs[0]), table, reduce, first)}


def _lookup(
    ids: Tensor, share: Tensor | None, g: Tensor, table: nn.Embedding | nn.EmbeddingBag, reduce: bool, first: bool
) -> Lookup:  # (N, F, T), (N, F, T), (K, N, ..., D)
    share = torch.ones_like(ids, dtype=g.dtype) if share is None else share.to(g.dtype)
    if table.padding_idx is not None:
        share = share * (ids != table.padding_idx)
    return Lookup(ids, share, g.reshape(*g.shape[:2], -1, g.shape[-1]), table.num_embeddings, reduce, first)


def _arguments(call: Call) -> tuple[Tensor, Tensor | None, Tensor | None]:
    names = ("input", "offsets", "per_sample_weights")
    given = dict(zip(names, call.args, strict=False)) | call.kwargs
    return given["input"], given.get("offsets"), given.get("per_sample_weights")


def _bags(table: nn.EmbeddingBag, ids: Tensor, offsets: Tensor | None, weights: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the ids of each bag, (B, T), and the share of each id. Shorter bags end in shares of zero."""
    share = torch.ones_like(ids, dtype=table.weight.dtype) if weights is None else weights
    if table.padding_idx is not None:
        share = share * (ids != table.padding_idx)
    if offsets is not None:
        ends = offsets[1:] if table.include_last_offset else torch.cat([offsets[1:], offsets.new_tensor([len(ids)])])
        starts = offsets[: len(ends)]
        cuts = [slice(a, b) for a, b in zip(starts.tolist(), ends.tolist(), strict=True)]
        ids, share = (pad_sequence([t[cut] for cut in cuts], batch_first=True) for t in (ids, share))
    if table.mode == "mean":
        share = share / share.sum(1, keepdim=True).clamp(min=1)
    return ids.long(), share
