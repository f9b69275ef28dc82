"""Shift the labels of causal language models: each token is the label of the position before it.

A model of transformers takes the labels with its inputs and shifts them inside its loss; its logits are not shifted.
So its loss says how the labels are meant: if a network returns a loss, the first batch is compared with it, and labels
are shifted as the network does. Labels given apart from the inputs, in pairs `(inputs, labels)`, are never shifted, and
neither are those of a network without a loss. Labels that are the tokens themselves are refused there, if the logits
explain the next tokens clearly better, and better than a guess.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from laplace.errors import InputError, LaplaceError
from laplace.inference.own_loss import EXAMPLES, OwnLoss, close, losses
from laplace.likelihoods.base import IGNORED, Likelihood
from laplace.likelihoods.categorical import Categorical
from laplace.network.batches import Batch
from laplace.network.inputs import Inputs

_WHOLE = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_CLEARLY = 4.0  # standard errors by which the next tokens must be explained better
_LEARNT = 0.9  # of log C: more nats a token are a guess, as of a network that was not trained
_AS_GIVEN = "To decide yourself, give pairs (inputs, labels): their labels are not shifted."


def shifted(batch: Batch, likelihood: Likelihood) -> Batch:
    """Move each label, and what is given with it, one position earlier. The last position gets no label."""
    if batch.y.dim() != 2:
        return batch  # refused later, where labels are checked
    n_tokens, ignored = batch.y.shape[1], IGNORED if likelihood.ignored is None else likelihood.ignored
    given = {
        key: pad(value[:, 1:], (0, 1)) if value.shape[:2] == (len(batch.y), n_tokens) and value.dim() == 2 else value
        for key, value in batch.given.items()
    }
    return replace(batch, y=pad(batch.y[:, 1:], (0, 1), value=ignored), given=given)


def labels_within(batch: Batch) -> bool:
    """Return whether the labels came in one mapping with the inputs, as for transformers."""
    return isinstance(batch.inputs.x, Mapping) and batch.inputs.keys.y in batch.inputs.x


def are_shifted(
    batch: Batch, model: nn.Module, likelihood: Likelihood, class_dim: int | None, warn: Callable[[str], None]
) -> bool | None:
    """Return whether labels in a mapping have to be shifted by one position, or None if this batch does not tell."""
    later = _network_shifts(batch, model, likelihood, class_dim, warn)
    keys = batch.inputs.keys
    if later and _are_next(batch.y, batch.inputs.x.get(keys.x)):
        warn(
            f"the labels are the next tokens already, and this network's own loss would shift {keys.y!r} once more. "
            f"They are not shifted here. {_AS_GIVEN}"
        )
        return False
    return later


def refuse_tokens_themselves(batch: Batch, model: nn.Module, likelihood: Likelihood, class_dim: int | None) -> None:
    """Refuse a pair (tokens, the same tokens as labels) if the network predicts the next tokens."""
    keys = batch.inputs.keys
    if _equal(batch.y, _tokens(batch.inputs)) and _network_shifts(batch, model, likelihood, class_dim, lambda _: None):
        raise InputError(
            f"batch {batch.index}: the labels are the inputs themselves, and this network's own loss shifts them: each "
            "logit predicts the next token. Labels in a pair are not shifted: write (x[:, :-1], x[:, 1:]), or a "
            f"mapping {{{keys.x!r}: x, {keys.y!r}: x}}, whose labels are shifted as the network does."
        )


def _network_shifts(
    batch: Batch, model: nn.Module, likelihood: Likelihood, class_dim: int | None, warn: Callable[[str], None]
) -> bool | None:
    """Return whether the network's own loss compares logits with the next labels, or None if no label counts.

    Raises:
        InputError: the network has no loss, but predicts the next tokens, and the labels are the tokens themselves.
    """
    if not isinstance(likelihood, Categorical) or batch.y.dtype not in _WHOLE:
        return False
    if class_dim is None or batch.y.dim() != 2 or batch.y.shape[1] < 2:
        return False
    counting = (batch.y[:, 1:] != IGNORED).any(1).nonzero().flatten().tolist()
    if not counting:
        return None
    apart = batch.inputs.size == len(batch.y)  # examples can be separated, and a few are enough
    part = (counting[0], counting[0] + EXAMPLES) if apart else (0, len(batch.y))
    y, own = batch.y[slice(*part)], OwnLoss(model, batch.inputs.part(*part) if apart else batch.inputs)
    with torch.inference_mode(False), torch.no_grad():
        found = own(y)
        if found is None:
            _refuse_unless_explained(batch, y, own, class_dim)
            return False
        loss, f = found
        f = _by_position(f, y, class_dim)
        return False if f is None else _later(loss, f, y, own, likelihood, warn)


def _by_position(f: Tensor, y: Tensor, class_dim: int) -> Tensor | None:  # (N, T, C)
    """Return the logits with classes last; None if labels do not fit, which is an error where they are checked."""
    f = f.movedim(class_dim, -1) if -f.dim() <= class_dim < f.dim() else f
    if f.dim() != 3 or f.shape[:2] != y.shape or bool((((y < 0) & (y != IGNORED)) | (y >= f.shape[2])).any()):
        return None
    return f


def _refuse_unless_explained(batch: Batch, y: Tensor, own: OwnLoss, class_dim: int) -> None:
    """Refuse labels that are the tokens themselves, if the logits of a network without a loss predict the next ones."""
    tokens = _tokens(own.inputs)
    if not _equal(y, tokens):
        return
    try:
        f = _by_position(own.outputs(), y, class_dim)
    except LaplaceError:
        return  # raised again by the run itself
    if f is None:
        return
    both = (y[:, :-1] != IGNORED) & (y[:, 1:] != IGNORED)
    log_p = f[:, :-1][both].double().log_softmax(-1)
    here, later = (-log_p.gather(1, labels[both].long().unsqueeze(1)).squeeze(1) for labels in (y[:, :-1], y[:, 1:]))
    gain = here - later  # by token, in nats
    if len(gain) < 2 or not gain.mean() > _CLEARLY * gain.std() / len(gain) ** 0.5:
        return
    if later.mean() > _LEARNT * math.log(f.shape[2]):
        return
    keys = batch.inputs.keys
    raise InputError(
        f"batch {batch.index}: the labels are the inputs themselves, but the logits explain the next token better "
        f"({float(later.mean()):.3g} nats a token) than the token itself ({float(here.mean()):.3g}), as those of a "
        "language model do. The network returns no loss that would say so: give each position the label of the next. "
        f"Write (x[:, :-1], x[:, 1:]), or batch[{keys.y!r}] = nn.functional.pad(x[:, 1:], (0, 1), value={IGNORED})."
    )


def _tokens(inputs: Inputs) -> Any:
    """Return the main input."""
    return inputs.x.get(inputs.keys.x) if isinstance(inputs.x, Mapping) else inputs.x


def _at_positions(f: Tensor, y: Tensor, likelihood: Likelihood) -> list[Tensor]:  # (N, T, C), (N, T)
    """Return the losses of all positions: of the likelihood, and of labels as they are, which networks compare."""
    rows, labels = f.flatten(0, 1), y.flatten().long()
    rows, labels = rows[labels != IGNORED], labels[labels != IGNORED]
    return [*losses(rows, labels, likelihood), *losses(rows, labels, Categorical())]


def _later(
    loss: Tensor, f: Tensor, y: Tensor, own: OwnLoss, likelihood: Likelihood, warn: Callable[[str], None]
) -> bool:
    """Return whether the loss is that of the next labels. Warn if it is neither that nor the unshifted one."""
    here, later = _at_positions(f, y, likelihood), _at_positions(f[:, :-1], y[:, 1:], likelihood)
    fits = [any(close(loss, other) for other in others) for others in (here, later)]
    if fits == [True, True]:  # all logits are equal: does the first position's label count?
        alone = torch.full_like(y, IGNORED)
        alone[:, 0] = 0
        found = own(alone)
        return found is not None and bool(found[0].isnan())
    if any(fits):
        return fits[1]
    moves = _looks_at_first(loss, y, f.shape[2], own)
    ours = here if moves else later
    warn(
        f"the network's own loss is {float(loss):.6g}, and the mean negative log-likelihood of these labels is "
        f"{float(here[0]):.6g} (of labels one position later {float(later[0]):.6g}): it has further terms, or smooths "
        f"or weighs labels. The likelihood is used, {float(ours[0]):.6g}: "
        + ("labels are not shifted. " if moves else "labels are shifted, as the network's loss does. ")
        + _AS_GIVEN
    )
    return not moves


def _looks_at_first(loss: Tensor, y: Tensor, classes: int, own: OwnLoss) -> bool:
    """Return whether the loss depends on the label of the first position, whatever other terms it has."""
    for step in range(1, min(classes, 4)):  # several, because another label may have the same loss
        other = y.clone()
        other[:, 0] = (other[:, 0].clamp(min=-1) + step) % classes
        found = own(other)
        if found is not None and not close(found[0], loss, exactly=True):
            return True
    return False


def _equal(y: Tensor, x: Any) -> bool:
    """Return whether the labels are the tokens that the network reads, wherever they count."""
    return isinstance(x, Tensor) and x.shape == y.shape and bool(((x == y) | (y == IGNORED)).all())


def _are_next(y: Tensor, ids: Any) -> bool:
    """Return whether the labels are the next tokens, and not the tokens themselves."""
    if not isinstance(ids, Tensor) or ids.shape != y.shape or _equal(y, ids):
        return False
    return _equal(y[:, :-1], ids[:, 1:])
