"""Multiple choice on a language model: only the logits of the answer tokens, at the last token of the prompt.

Laplace-LoRA (Yang et al., 2024) treats a question with the answers " A", " B", ... as a classification of the next
token among these. The other rows of the vocabulary's head have no influence, so they are left out.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from laplace.checks import shown
from laplace.errors import ModelError, OptionError


class AnswerTokens(nn.Module):
    """Turns a language model into one that answers with one of K tokens: prompts in, (N, K) logits out.

    It shares all tensors with the network, whose head is replaced by the K rows of the answers: no logit of the other
    tokens is computed. The rows are a copy. They are trainable if the head is, and untied from the embedding.

    Args:
        model: a causal language model of transformers, with or without adapters of peft.
        token_ids: the answers, as ids of single tokens; labels are indices into them.

    Raises:
        OptionError: the ids are not different tokens of the vocabulary.
        ModelError: the network has no linear head over a vocabulary.
    """

    def __init__(self, model: nn.Module, token_ids: Sequence[int]) -> None:
        super().__init__()
        find = getattr(model, "get_output_embeddings", None)
        head = find() if callable(find) else None
        if type(head) is not nn.Linear:
            raise ModelError(
                f"the head of {type(model).__name__} is {'missing' if head is None else f'a {type(head).__name__}'}; "
                "answer tokens need a language model with an nn.Linear over the vocabulary. Leave the head out of "
                "target_modules and modules_to_save of its adapters."
            )
        self.token_ids = _checked_ids(token_ids, head.out_features)
        memo = {id(t): t for t in (*model.parameters(), *model.buffers())}  # the same tensors in other modules
        self.model: Any = copy.deepcopy(model, memo)
        self.model.set_output_embeddings(_rows_of(head, self.token_ids))
        self.config, self.training = getattr(model, "config", None), model.training

    @property
    def head(self) -> nn.Linear:
        """Return the head, with the rows of the answer tokens only."""
        return self.model.get_output_embeddings()

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, **others: Any) -> Tensor:  # (N, K)
        """Return the logits of the answers after the last token of each prompt, padded on either side.

        Args:
            input_ids: prompts, (N, T).
            attention_mask: 1 for tokens and 0 for padding, (N, T). Without it, no token is padding.
            **others: passed on to the network.
        """
        f = self.model(input_ids=input_ids, attention_mask=attention_mask, **others).logits
        if attention_mask is None:
            return f[:, -1]
        places = torch.arange(1, f.shape[1] + 1, device=f.device)
        return f[torch.arange(len(f), device=f.device), (attention_mask * places).argmax(1)]


def _rows_of(head: nn.Linear, ids: list[int]) -> nn.Linear:
    """Return a head of some of the rows."""
    weight = head.weight.detach()[ids].clone()
    rows = nn.Linear(1, 1, bias=head.bias is not None, device="meta")
    rows.in_features, rows.out_features = head.in_features, len(ids)
    rows.weight = nn.Parameter(weight, head.weight.requires_grad)
    if head.bias is not None:
        rows.bias = nn.Parameter(head.bias.detach()[ids].clone(), head.bias.requires_grad)
    return rows


def _checked_ids(token_ids: Any, vocabulary: int) -> list[int]:
    try:
        ids = [int(i) for i in token_ids]
    except (TypeError, ValueError):
        ids = []
    if len(ids) < 2 or len(set(ids)) < len(ids) or not all(0 <= i < vocabulary for i in ids):
        raise OptionError(
            f"token_ids={shown(token_ids)} must be two or more different tokens from 0 to {vocabulary - 1}, as in "
            "[tokenizer.encode(' A', add_special_tokens=False)[-1], ...]."
        )
    return ids
