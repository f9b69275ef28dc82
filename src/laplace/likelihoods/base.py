"""What a likelihood p(y given f) has to say. It sees outputs and labels, never parameters."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Final

import torch
from torch import Tensor
from torch.distributions import Distribution

from laplace.curvature.output import OutputCurvature
from laplace.errors import InputError, OptionError
from laplace.predictive.response import Outputs, Response, rowwise

if TYPE_CHECKING:
    from laplace.batches import Batch

Sums = dict[str, Tensor]
IGNORED: Final = -100  # the label that stands for none, as in torch's cross_entropy


@dataclass(frozen=True)
class Targets:
    """The labels of a batch, checked, and how much each example counts.

    Attributes:
        y: labels, (N, ...).
        weights: how much each counts, (N,); None: 1.
    """

    y: Tensor
    weights: Tensor | None = None

    def part(self, part: slice) -> Targets:
        """Those of some examples."""
        return Targets(self.y[part], None if self.weights is None else self.weights[part])

    def total(self, values: Tensor) -> Tensor:  # (N,) -> ()
        """The weighted sum of one number per example."""
        return values.sum() if self.weights is None else (self.weights.to(values) * values).sum()


class Likelihood(Response):
    """p(y given f) for outputs f of shape (N, C), everything at unit noise unless a sigma is passed.

    Attributes:
        name: what it is called in options and messages.
        has_noise: whether there is a `sigma_noise`.
        hessian_is_fisher: whether -d2 log p / df2 is Lambda whatever y is.
        pairs: whether an example is a pair of inputs.
        ignored: the label of a position that counts for nothing.
        further: what a batch holds between labels and weights: elements, or keys.
    """

    name: ClassVar[str]
    has_noise: ClassVar[bool] = False
    hessian_is_fisher: ClassVar[bool] = True
    pairs: ClassVar[bool] = False
    ignored: int | None = None
    further: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def check_targets(self, f: Tensor, y: Tensor) -> Tensor:
        """The labels in the dtype that the formulas need, or an InputError."""

    @abstractmethod
    def log_prob(self, f: Tensor, y: Tensor, sigma: Tensor | float = 1.0) -> Tensor:  # (N,)
        """log p(y_n given f_n)."""

    @abstractmethod
    def score(self, f: Tensor, y: Tensor) -> Tensor:  # (N, C)
        """d log p(y given f) / df."""

    @abstractmethod
    def fisher(self, f: Tensor, y: Tensor | None = None) -> OutputCurvature:
        """Lambda: E over y of score score^T. Labels are used only where they hold more than y, such as its noise."""

    @abstractmethod
    def sample(self, f: Tensor, n_samples: int, generator: torch.Generator | None) -> Tensor:
        """Labels drawn from p(y given f), (n_samples, N, ...); example n's do not depend on the batch it is in."""

    def root_times(self, f: Tensor, eps: Tensor, y: Tensor | None = None) -> Tensor:  # (K, N, C), eps: (K, N, C)
        """L eps with L L^T = Lambda."""
        curvature = self.fisher(f, y)
        if curvature.vectors is None:
            assert curvature.diagonal is not None
            return curvature.diagonal.sqrt() * eps
        return torch.einsum("jnc,knj->knc", curvature.vectors, eps)

    def drawn_scores(
        self, f: Tensor, y: Tensor, n_samples: int, generator: torch.Generator | None
    ) -> Tensor:  # (K, N, C)
        """Vectors v with E[v v^T] = Lambda: the scores at labels drawn from the model."""
        return torch.stack([self.score(f, drawn) for drawn in self.sample(f, n_samples, generator)])

    @property
    def response(self) -> Response:
        """What is predicted for new inputs: y, unless nothing is known of how it would be observed there."""
        return self

    @property
    def described(self) -> str:
        """Name and options: posteriors of likelihoods that are described alike are of one kind."""
        return self.name

    def targets(self, f: Tensor, batch: Batch) -> Targets:
        """Labels and weights of a batch, or an InputError where they or the outputs do not fit."""
        self.check_outputs(f)
        y = self.check_targets(f, self.labels_of(f, batch))
        given, own = batch.given.get("weights"), self.label_weights(y)
        if given is None:
            return Targets(y, own)
        given = _checked_weights(given.to(f.device), len(f))
        return Targets(y, given if own is None else given * own.to(given))

    def labels_of(self, f: Tensor, batch: Batch) -> Tensor:
        """The labels with all that a batch says about them."""
        return batch.y.to(f.device)

    def label_weights(self, y: Tensor) -> Tensor | None:  # (N,)
        """How much an example counts for its label; None: all alike."""
        return None

    def sums(self, f: Tensor, targets: Targets) -> Sums:
        """What the evidence needs of the data, additive over examples; always with `loss`, -log p up to constants."""
        return {"loss": -targets.total(self.log_prob(f, targets.y)).double()}

    def log_likelihood(self, sums: Sums, sigma: Tensor) -> Tensor:
        """log p(D given f) from the sums."""
        return -sums["loss"]

    def distribution_at(self, outputs: Outputs, p: Tensor | None, y: Tensor, sigma: Tensor) -> Distribution:
        """p(y given x, data) where labels are there, which may hold more than y, such as its noise."""
        return self.distribution(outputs, p, sigma)

    def log_predictive(self, outputs: Outputs, p: Tensor | None, y: Tensor, sigma: Tensor) -> Tensor:  # (N,)
        """log p(y given x, data)."""
        return rowwise(self.distribution_at(outputs, p, y, sigma).log_prob(self.observed(y)))

    def observed(self, y: Tensor) -> Tensor:
        """What of the labels a loss is to see."""
        return y

    def with_noise(self, sigma: Tensor) -> tuple[Likelihood, Tensor]:
        """The likelihood with the noise `sigma` of its outputs relative to each other, and one level for all, ()."""
        if not (sigma == 1).all():
            raise OptionError(
                f"sigma_noise={sigma.flatten().tolist()[:3]}: {self.name} has no observation noise; leave it at 1."
            )
        return self, sigma.reshape(-1)[0]

    def noise_at(self, level: Tensor) -> Tensor:
        """The noise of the outputs, as `with_noise` was given it."""
        return level

    def curvature_scale(self, curvature: str, sigma: Tensor) -> Tensor:
        """c(sigma): by what the curvature at unit noise is multiplied."""
        return torch.ones_like(sigma)

    def check_outputs(self, f: Tensor) -> None:
        """Refuse outputs that this likelihood has no meaning for."""
        if f.dim() != 2:
            raise InputError(f"the network's output has shape {tuple(f.shape)}; {self.name} needs (N, C).")

    def __eq__(self, other: object) -> bool:
        """Equal to its name, as laplace-torch's likelihoods are; else to itself alone."""
        return self.name == str(getattr(other, "value", other)) if isinstance(other, str) else self is other

    __hash__ = Response.__hash__

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


def shaped_like_outputs(f: Tensor, y: Tensor, what: str) -> Tensor:
    """Real labels, one per output, in the dtype of the outputs; (N,) will do for one output."""
    if y.shape == f.shape[:1] and f.shape[1] == 1:
        y = y.unsqueeze(1)
    if y.shape != f.shape:
        raise InputError(f"{what} labels have shape {tuple(y.shape)}, the outputs {tuple(f.shape)}: equal needed.")
    if y.is_complex():
        raise InputError(f"{what} labels have dtype {y.dtype}; real numbers needed.")
    return finite(y.to(f.dtype))


def finite(y: Tensor) -> Tensor:  # (N, ...)
    """Labels without NaN and infinity."""
    bad = ~y.flatten(1).isfinite().all(1)
    if bad.any():
        first = int(bad.nonzero()[0])
        raise InputError(
            f"the labels hold NaN or infinite values for {int(bad.sum())} of {len(y)} rows, the first is number "
            f"{first}. Leave these examples out, or give them weight 0 and any label."
        )
    return y


def class_indices(n: int, y: Tensor) -> Tensor:
    """Integer labels (N,) for n examples, which may come as (N, 1)."""
    if y.is_floating_point() or y.is_complex() or y.dtype is torch.bool:
        raise InputError(
            f"class labels have dtype {y.dtype}; integers needed. Write y.long() (or y.argmax(-1) of one-hot)."
        )
    y = y.squeeze(1) if y.shape == (n, 1) else y
    if y.shape != (n,):
        raise InputError(f"class labels have shape {tuple(y.shape)}; it must be ({n},), one label per example.")
    return y.long()


def check_range(y: Tensor, classes: int, what: str) -> None:
    """Refuse labels other than 0 to classes - 1."""
    low, high = (int(y.min()), int(y.max())) if len(y) else (0, 0)
    if low < 0 or high >= classes:
        raise InputError(f"class labels lie in [{low}, {high}]; {what} need labels in [0, {classes - 1}].")


def _checked_weights(weights: Tensor, n: int) -> Tensor:
    if weights.shape == (n, 1):
        weights = weights.squeeze(1)
    if weights.shape != (n,):
        raise InputError(
            f"the weights have shape {tuple(weights.shape)}; one per example, ({n},), is needed. In a batch (x, y, w) "
            "the third element is weights; several inputs go into a tuple: ((x1, x2), y)."
        )
    if weights.is_complex():
        raise InputError(f"the weights have dtype {weights.dtype}; real numbers needed.")
    weights = weights if weights.is_floating_point() else weights.double()
    if not (weights.isfinite() & (weights >= 0)).all():
        raise InputError(
            f"the weights hold negative, NaN or infinite values (the smallest is {float(weights.min()):g}); an example "
            "that counts for nothing has weight 0."
        )
    return weights
