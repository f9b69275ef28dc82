"""Classification: y ~ softmax(f), Lambda = diag(p) - p p^T.

With class weights w and label smoothing e, the log-likelihood is that of `cross_entropy(f, y, reduction='sum')`,

    sum_c q_c log p_c,   q = (1 - e) w_y e_y + (e / C) w,

so an example counts Q = sum_c q_c times, and Lambda is minus the second derivative, Q (diag(p) - p p^T).

Labels that are numbers per class, t of shape (N, C), take the place of e_y, as in torch's `cross_entropy`:
q_c = w_c ((1 - e) t_c + e / C). Probabilities sum to 1; of a multi-hot t, every class that is named counts.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributions import Dirichlet, Distribution

from laplace.checks import shown
from laplace.errors import InputError, OptionError, warn
from laplace.likelihoods.base import IGNORED, check_range, class_indices, finite
from laplace.likelihoods.classes import OneOfSeveral, drawn_classes
from laplace.linalg.output_curvature import OutputCurvature
from laplace.linalg.softmax import log_softmax, softmax
from laplace.predictive.links import CATEGORICAL_LINKS, bridge_concentration, bridge_norm_concentration
from laplace.predictive.outputs import OutputGaussian
from laplace.predictive.response import Outputs


class Categorical(OneOfSeveral):
    """Predicts one of C >= 2 classes from C logits; labels are class indices (N,), or class probabilities (N, C).

    Args:
        label_smoothing: e in [0, 1), as in `torch.nn.CrossEntropyLoss`.
        class_weights: How much an example of each class counts, (C,). None means 1 for all.
        ignore_index: The label of examples that do not count, such as -100. If left out, every example counts, and with
            outputs at several positions the positions labelled -100 are left out.

    Raises:
        OptionError: a value is out of range.
    """

    name = "classification"
    has_logits = True
    options = ("label_smoothing", "class_weights", "ignore_index")
    links = CATEGORICAL_LINKS
    default_link = "one_vs_rest"
    only_differences = True
    _warned = False

    def __init__(
        self, label_smoothing: float = 0.0, class_weights: Any = None, ignore_index: int | None = None
    ) -> None:
        if isinstance(label_smoothing, bool) or not 0 <= label_smoothing < 1:
            raise OptionError(
                f"label_smoothing={shown(label_smoothing)} must lie in [0, 1), as in label_smoothing=0.1."
            )
        if ignore_index is not None and (isinstance(ignore_index, bool) or not isinstance(ignore_index, int)):
            raise OptionError(f"ignore_index={shown(ignore_index)} must be a whole number, as in ignore_index=-100.")
        self.label_smoothing, self.ignore_index = float(label_smoothing), ignore_index
        self.class_weights = None if class_weights is None else _checked_class_weights(class_weights)

    @property
    def ignored(self) -> int:  # type: ignore[override]
        return IGNORED if self.ignore_index is None else self.ignore_index

    def check_outputs(self, f: Tensor) -> None:
        super().check_outputs(f)
        if not self._warned and len(f) > 1 and _are_probabilities(f):
            self._warned = True
            warn(
                "every row of the network's outputs is positive and sums to 1, as probabilities do; 'classification' "
                "takes logits, and applies softmax itself. Return the output of the layer before the softmax."
            )
        if f.shape[1] < 2:
            raise InputError(
                f"'classification' needs at least two logits; the network's output has shape {tuple(f.shape)}. Softmax "
                "of one logit is 1 everywhere: write likelihood='binary', which is for one logit, or give the network "
                "two outputs. torch.cat([zeros_like(f), f], -1) is the same model."
            )
        if self.class_weights is not None and len(self.class_weights) != f.shape[1]:
            raise InputError(
                f"class_weights has {len(self.class_weights)} values for {f.shape[1]} classes; give one per class."
            )

    def check_targets(self, f: Tensor, y: Tensor) -> Tensor:
        if y.is_floating_point() and y.shape == f.shape:
            return _checked_probabilities(y.to(f.dtype))
        if y.shape != f.shape[:1] and not y.is_floating_point():
            fix = {
                f.shape: "y.argmax(-1), or y.float() for class probabilities",
                (len(f), 1): "y.squeeze(1)",
            }.get(y.shape, "one label per example")
            raise InputError(
                f"class labels have shape {tuple(y.shape)}; for outputs {tuple(f.shape)} they must be ({f.shape[0]},): "
                f"{fix}."
            )
        y = class_indices(len(f), y)
        counting = y if self.ignore_index is None else y[y != self.ignore_index]
        hint = " To leave out the examples of label {low}, write Categorical(ignore_index={low})."
        check_range(counting, f.shape[1], f"{f.shape[1]} outputs", hint)
        return y

    def label_weights(self, y: Tensor) -> Tensor | None:
        counts = self._counts(y)
        if self.ignore_index is None or y.dim() > 1:
            return counts
        kept = y != self.ignore_index
        return kept.double() if counts is None else counts * kept

    def log_prob(self, f: Tensor, y: Tensor, sigma: Tensor | float = 1.0) -> Tensor:
        log_p = log_softmax(f)
        if self.label_smoothing == 0 and y.dim() == 1:
            return log_p.gather(-1, self._index(y).unsqueeze(-1)).squeeze(-1)
        return (self._target_probs(f, y) * log_p).sum(-1)

    def score(self, f: Tensor, y: Tensor) -> Tensor:
        return self._target_probs(f, y) - softmax(f)

    def fisher(self, f: Tensor, y: Tensor | None = None) -> OutputCurvature:
        p = softmax(f)
        return OutputCurvature(diagonal=p, vectors=p.unsqueeze(0), sign=-1)

    def root_times(self, f: Tensor, eps: Tensor, y: Tensor | None = None) -> Tensor:
        p = softmax(f)
        v = p.sqrt() * eps
        return torch.addcmul(v, p, v.sum(-1, keepdim=True), value=-1)

    def drawn_scores(self, f: Tensor, y: Tensor, n_samples: int, generator: torch.Generator | None) -> Tensor:
        drawn = self.sample(f, n_samples, generator)
        # Without label smoothing: the outer products of smoothed scores do not average to Lambda.
        return torch.nn.functional.one_hot(drawn, f.shape[-1]).to(f.dtype) - f.softmax(-1)

    def sample(self, f: Tensor, n_samples: int, generator: torch.Generator | None) -> Tensor:
        return drawn_classes(f.double().softmax(-1), n_samples, generator)

    def inverse_link(self, f: Tensor) -> Tensor:
        return softmax(f)

    def distribution(self, outputs: Outputs, p: Tensor | None, sigma: Tensor, link: str = "") -> Distribution:
        """Return the distribution of y; for the bridge links, the Dirichlet distribution of p instead."""
        if isinstance(outputs, OutputGaussian) and link in ("bridge", "bridge_norm"):
            concentration = bridge_concentration if link == "bridge" else bridge_norm_concentration
            return Dirichlet(concentration(outputs.mean, outputs.contrast_variance))
        return super().distribution(outputs, p, sigma, link)

    def _index(self, y: Tensor) -> Tensor:
        """Return labels that are safe to index with. Ignored ones become 0: their weight is 0 anyway."""
        return y if self.ignore_index is None or y.dim() > 1 else y.where(y != self.ignore_index, 0)

    def _counts(self, y: Tensor) -> Tensor | None:  # (N,)
        """Return Q, or None if it is 1 for every label."""
        e = self.label_smoothing
        if y.dim() > 1:
            w = y.new_ones(y.shape[1]) if self.class_weights is None else self.class_weights.to(y)
            counts = (1 - e) * (w * y).sum(-1).double() + e * w.mean()
            return None if bool(((counts - 1).abs() < 1e-5).all()) else counts
        if self.class_weights is None:
            return None
        w = self.class_weights.to(y.device)
        return (1 - e) * w[self._index(y)] + e * w.mean()

    def _target_probs(self, f: Tensor, y: Tensor) -> Tensor:  # (N, C)
        """Return q / Q, the probabilities at which the score is zero."""
        t = y.to(f) if y.dim() > 1 else torch.nn.functional.one_hot(self._index(y), f.shape[-1]).to(f.dtype)
        if self.label_smoothing == 0 and y.dim() == 1:
            return t
        w = torch.ones_like(f[0]) if self.class_weights is None else self.class_weights.to(f)
        q = (1 - self.label_smoothing) * t * w + self.label_smoothing * w / f.shape[-1]
        return q / q.sum(-1, keepdim=True).clamp(min=torch.finfo(q.dtype).tiny)  # a label of zeros counts 0 times


def _checked_probabilities(y: Tensor) -> Tensor:  # (N, C)
    """Return class probabilities. Refuse negative values; rows need not sum to 1, as in torch's cross_entropy."""
    if len(finite(y)) and bool((y < 0).any()):
        raise InputError(
            f"labels (N, C) are class probabilities or multi-hot; the smallest here is {float(y.min()):g}. For numbers "
            "write likelihood='regression', for logits y.softmax(-1)."
        )
    return y


def _checked_class_weights(values: Any) -> Tensor:
    try:
        weights = torch.as_tensor(values, dtype=torch.float64).detach().clone()
    except (TypeError, ValueError, RuntimeError):
        weights = torch.empty(0)
    if weights.dim() != 1 or len(weights) < 2 or not (weights.isfinite() & (weights >= 0)).all() or not weights.any():
        raise OptionError(
            f"class_weights={shown(values)} must be one number per class, none negative and not all 0, as in "
            "class_weights=[1.0, 5.0]."
        )
    return weights


def _are_probabilities(f: Tensor) -> bool:  # (N, C)
    """Return whether all rows lie on the simplex, which logits do not do by chance."""
    f = f.detach()
    return f.shape[1] > 1 and float(f.min()) >= 0 and bool(((f.sum(-1) - 1).abs() < 1e-3).all())
