"""Compare the likelihood with the loss that a network itself returns when it gets labels, as models of transformers do.

The likelihood that is fitted should be the one that the network was trained by. If its own loss is another one, a
warning names both numbers, and what would make them equal, where that can be found out: another likelihood, label
smoothing, class weights. Labels given apart from the inputs, in pairs `(inputs, labels)`, are not compared.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Final

import torch
from torch import Tensor, nn

from laplace.errors import LaplaceError
from laplace.likelihoods import LIKELIHOODS
from laplace.likelihoods.base import Likelihood, Targets
from laplace.likelihoods.bernoulli import Multilabel
from laplace.likelihoods.categorical import Categorical
from laplace.likelihoods.gaussian import Gaussian
from laplace.network.batches import Batch
from laplace.network.inputs import MASK, Inputs, logits
from laplace.network.replica import replicate
from laplace.predictive.positions import Positions

EXAMPLES: Final = 5  # how many are compared
_CLOSE: Final = 1e-4  # relative difference up to which two losses are equal
AS_GIVEN: Final = "Labels in pairs (inputs, labels) are used as they are, without this comparison."


class OwnLoss:
    """Computes the loss that a network returns when it gets labels."""

    def __init__(self, model: nn.Module, inputs: Inputs) -> None:
        self.model, self.inputs = replicate(model), inputs
        for module in self.model.modules():  # transformers writes the kind of problem there when it first sees labels
            if "config" in module.__dict__:
                module.__dict__["config"] = copy.copy(module.__dict__["config"])

    def __call__(self, y: Tensor, part: slice | None = None) -> tuple[Tensor, Tensor] | None:
        """Return the loss and the logits of all inputs, or of some; None if the network returns no loss."""
        inputs = self.inputs if part is None else self.inputs.part(part.start, part.stop)
        try:
            with torch.inference_mode(False), torch.no_grad():
                output = inputs.copied().call_with_labels(self.model, y)
            loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
            if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.is_floating_point():
                return None
            return loss.detach().reshape(()), logits(output)
        except (LaplaceError, torch.OutOfMemoryError):
            raise
        except Exception:  # a network that takes no labels may raise anything
            return None

    def outputs(self) -> Tensor:
        """Return the logits of all inputs, run without labels."""
        with torch.inference_mode(False), torch.no_grad():
            return self.inputs.copied().call(self.model)


def compare(
    batch: Batch, model: nn.Module, likelihood: Likelihood, class_dim: int | None, warn: Callable[[str], None]
) -> None:
    """Warn if the network's own loss of a few examples is not that of the likelihood."""
    if not _is_compared(likelihood) or MASK in batch.given or batch.inputs.size != len(batch.y):
        return
    y, own = batch.y[:EXAMPLES], OwnLoss(model, batch.inputs.part(0, EXAMPLES))
    try:
        found = own(y)
        if found is None:
            return
        loss, f = found
        at = Positions.of(f, class_dim)
        ours = losses(at.rows(f), at.labels(y), likelihood)
        # Who sets smoothing or class weights, and has the loss without them, has chosen so.
        chosen = losses(at.rows(f), at.labels(y), Categorical()) if isinstance(likelihood, Categorical) else []
    except LaplaceError:
        return  # raised again where labels are checked, with the batch's name
    if any(close(loss, other) for other in [*ours, *chosen]) or loss.isnan():
        return
    why = _reason(loss, at.rows(f), at.labels(y), own, likelihood) if len(y) == at.n and not at.several else ""
    warn(
        f"the network's own loss on {len(y)} examples is {float(loss):.6g}, and that of likelihood={likelihood.name!r} "
        f"is {float(ours[0]):.6g}. {why or 'It has further terms, or smooths or weighs labels.'} The likelihood is "
        f"fitted, not the network's own loss. {AS_GIVEN}"
    )


def losses(f: Tensor, y: Tensor, likelihood: Likelihood) -> list[Tensor]:  # (M, C), (M, ...)
    """Return what a network may return as the loss of these rows: means and sums. The first is the mean over rows."""
    ignored = likelihood.ignored
    if ignored is not None and y.dim() == 1:
        f, y = f[y != ignored], y[y != ignored]
    f = f.to(torch.promote_types(f.dtype, torch.float32))
    y = likelihood.check_targets(f, y)
    targets, rows = Targets(y, likelihood.label_weights(y)), f.new_tensor(len(f)).double()
    total = -targets.total(likelihood.log_prob(f, y)).double()
    counted = rows if targets.weights is None else targets.weights.double().sum()
    found = [total / counted, total / rows, total]
    if isinstance(likelihood, Multilabel):
        found.append(total / (rows * f.shape[1]))
    if isinstance(likelihood, Gaussian):
        squares = (y - f).double().square()
        found = [way * half for half in (1.0, 0.5) for way in (squares.mean(), squares.sum(), squares.sum() / rows)]
    return found


def close(loss: Tensor, other: Tensor, exactly: bool = False) -> bool:
    """Return whether two losses are equal up to rounding. NaN, the mean of nothing, equals NaN."""
    tolerance = 1e-7 if exactly else max(_CLOSE, 4 * torch.finfo(loss.dtype).eps)
    same = (loss.double() - other.double()).abs() <= tolerance * other.abs().clamp(min=1e-3)
    return bool(same | (loss.isnan() & other.isnan()))


def _is_compared(likelihood: Likelihood) -> bool:
    """Return whether networks usually return the loss of such a likelihood. Others differ from it on purpose."""
    kinds = Categorical, Multilabel, Gaussian
    return isinstance(likelihood, kinds) and not likelihood.further and not likelihood.pairs


def _reason(loss: Tensor, f: Tensor, y: Tensor, own: OwnLoss, likelihood: Likelihood) -> str:
    """Say what would make both equal, or ''."""
    for name in _others(likelihood):
        try:
            there = losses(f, y, LIKELIHOODS[name]())
        except LaplaceError:
            continue
        if any(close(loss, other) for other in there):
            return f"It is that of likelihood={name!r}: write that, if the network was trained by it."
    if not isinstance(likelihood, Categorical) or y.dim() != 1:
        return ""
    if (smoothing := _smoothing(loss, f, y, own)) is not None:
        return f"It smooths labels: write likelihood=Categorical(label_smoothing={smoothing:.3g})."
    if _weighs_classes(f, y, own):
        return "It weighs classes: write likelihood=Categorical(class_weights=[...]) with its weights."
    return ""


def _others(likelihood: Likelihood) -> Iterator[str]:
    yield from (name for name in ("classification", "multilabel", "regression") if name != likelihood.name)


def _smoothing(loss: Tensor, f: Tensor, y: Tensor, own: OwnLoss) -> float | None:
    """Return the label smoothing e that explains the loss of all examples and of the first alone, or None."""

    def parts(f: Tensor, y: Tensor) -> tuple[float, float]:
        log_p = f.double().log_softmax(-1)
        return -float(log_p.gather(1, y.long().unsqueeze(1)).mean()), -float(log_p.mean())

    plain, even = parts(f, y)
    if abs(even - plain) < 1e-6 or len(y) < 2:
        return None
    e = (float(loss) - plain) / (even - plain)
    alone = own(y[:1], slice(0, 1))
    if not 0 < e < 1 or alone is None:
        return None
    plain, even = parts(f[:1], y[:1])
    return e if close(alone[0], loss.new_tensor((1 - e) * plain + e * even)) else None


def _weighs_classes(f: Tensor, y: Tensor, own: OwnLoss) -> bool:
    """Return whether single examples have their plain loss: then weights, which cancel there, explain the others."""
    for i in range(len(y)):
        alone = own(y[i : i + 1], slice(i, i + 1))
        if alone is None or not close(alone[0], losses(f[i : i + 1], y[i : i + 1], Categorical())[0]):
            return False
    return True
