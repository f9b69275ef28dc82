"""Define the interface of a likelihood p(y given f). A likelihood sees outputs and labels, never parameters."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Final, Protocol

import torch
from torch import Tensor
from torch.distributions import Distribution

from laplace.checks import changed_options, written
from laplace.errors import InputError, OptionError
from laplace.keywords import NamedOptions
from laplace.linalg.output_curvature import OutputCurvature
from laplace.predictive.response import Outputs, Response, rowwise

Sums = dict[str, Tensor]
IGNORED: Final = -100  # the label that means "no label here", as in torch's cross_entropy


class Labels(Protocol):
    """Holds the labels of a batch, with whatever else the batch says about its examples.

    Attributes:
        y: Labels, (N, ...).
        given: Further tensors by name, such as `weights` or `noise`.
    """

    @property
    def y(self) -> Tensor: ...

    @property
    def given(self) -> Mapping[str, Tensor]: ...


@dataclass(frozen=True)
class Targets:
    """Holds the checked labels of a batch, and how much each example counts.

    Attributes:
        y: Labels, (N, ...).
        weights: How much each example counts, (N,). None means 1 for all.
    """

    y: Tensor
    weights: Tensor | None = None

    def part(self, part: slice) -> Targets:
        """Return the targets of a slice of the examples."""
        return Targets(self.y[part], None if self.weights is None else self.weights[part])

    def total(self, values: Tensor) -> Tensor:  # (N,) -> ()
        """Return the weighted sum of one number per example."""
        return values.sum() if self.weights is None else (self.weights.to(values) * values).sum()


class Likelihood(NamedOptions, Response):
    """Defines p(y given f) for outputs f of shape (N, C). All formulas are at unit noise unless a sigma is passed.

    Attributes:
        name: The name used in options and messages.
        has_noise: Whether there is a `sigma_noise`.
        has_logits: Whether the outputs are logits, which a `softmax_temperature` may divide in predictions.
        tunes_noise: Whether `la.tune()` sets it unless told what to tune.
        hessian_is_fisher: Whether -d2 log p / df2 equals Lambda for every y.
        pairs: Whether one example is a pair of inputs.
        ignored: The label of a position that does not count.
        further: Names of what a batch holds between labels and weights, as elements or as keys.
        options: The names of the constructor's arguments. Each is an attribute of that name, and enters `described`:
            files of likelihoods with other options are refused, and so are sums with them.
    """

    name: ClassVar[str]
    has_noise: ClassVar[bool] = False
    has_logits: ClassVar[bool] = False
    tunes_noise: ClassVar[bool] = False
    hessian_is_fisher: ClassVar[bool] = True
    pairs: ClassVar[bool] = False
    ignored: int | None = None
    further: ClassVar[tuple[str, ...]] = ()
    options: tuple[str, ...] = ()

    @abstractmethod
    def check_targets(self, f: Tensor, y: Tensor) -> Tensor:
        """Return the labels in the dtype that the formulas need. Raises InputError if they do not fit."""

    @abstractmethod
    def log_prob(self, f: Tensor, y: Tensor, sigma: Tensor | float = 1.0) -> Tensor:  # (N,)
        """Return log p(y_n given f_n)."""

    @abstractmethod
    def score(self, f: Tensor, y: Tensor) -> Tensor:  # (N, C)
        """Return d log p(y given f) / df."""

    @abstractmethod
    def fisher(self, f: Tensor, y: Tensor | None = None) -> OutputCurvature:
        """Return Lambda, the expectation over y of score score^T.

        Labels are used only where they hold more than y, such as the noise of each example.
        """

    @abstractmethod
    def sample(self, f: Tensor, n_samples: int, generator: torch.Generator | None) -> Tensor:
        """Draw labels from p(y given f), (n_samples, N, ...). The draws for an example do not depend on its batch."""

    def root_times(self, f: Tensor, eps: Tensor, y: Tensor | None = None) -> Tensor:  # (K, N, C), eps: (K, N, C)
        """Return L eps with L L^T = Lambda."""
        curvature = self.fisher(f, y)
        if curvature.vectors is None:
            assert curvature.diagonal is not None
            return curvature.diagonal.sqrt() * eps
        return torch.einsum("jnc,knj->knc", curvature.vectors, eps)

    def drawn_scores(
        self, f: Tensor, y: Tensor, n_samples: int, generator: torch.Generator | None
    ) -> Tensor:  # (K, N, C)
        """Return vectors v with E[v v^T] = Lambda: the scores at labels drawn from the model."""
        return torch.stack([self.score(f, drawn) for drawn in self.sample(f, n_samples, generator)])

    @property
    def response(self) -> Response:
        """Return how outputs become a prediction for new inputs.

        This is the likelihood itself, so that y is predicted. A likelihood that does not know how y would be observed
        at new inputs returns `Latent`, and then f is predicted.
        """
        return self

    @property
    def described(self) -> str:
        """Return the name, and the options that differ from the defaults. A subclass without a name has its class's.

        Posteriors are of the same kind if their likelihoods have the same description.
        """
        named = "name" in vars(type(self)) or "name" in vars(self)
        return self._described(self.name if named else type(self).__name__)

    def answers_to(self, described: str) -> bool:
        """Return whether a state has this description. Earlier states have the name that a subclass inherits."""
        return described in (self.described, self._described(self.name))

    def _described(self, name: str) -> str:
        options = changed_options(self)
        return f"{name}({', '.join(options)})" if options else name

    def targets(self, f: Tensor, batch: Labels) -> Targets:
        """Return labels and weights of a batch. Raises InputError if they or the outputs do not fit."""
        self.check_outputs(f)
        y = self.check_targets(f, self.labels_of(f, batch))
        given, own = batch.given.get("weights"), self.label_weights(y)
        if given is None:
            return Targets(y, own)
        given = _checked_weights(given.to(f.device), len(f))
        return Targets(y, given if own is None else given * own.to(given))

    def labels_of(self, f: Tensor, batch: Labels) -> Tensor:
        """Return the labels, together with everything that the batch says about them."""
        return batch.y.to(f.device)

    def label_weights(self, y: Tensor) -> Tensor | None:  # (N,)
        """Return how much each example counts because of its label. None means 1 for all."""
        return None

    def sums(self, f: Tensor, targets: Targets) -> Sums:
        """Return what the evidence needs from the data, as sums over examples.

        The key `loss` is always there: it is -log p up to constants.
        """
        return {"loss": -targets.total(self.log_prob(f, targets.y)).double()}

    def log_likelihood(self, sums: Sums, sigma: Tensor) -> Tensor:
        """Return log p(D given f), computed from the sums."""
        return -sums["loss"]

    def distribution_at(self, outputs: Outputs, p: Tensor | None, y: Tensor, sigma: Tensor) -> Distribution:
        """Return p(y given x, data) at labelled inputs. The labels may hold more than y, such as its noise."""
        return self.distribution(outputs, p, sigma)

    def log_predictive(self, outputs: Outputs, p: Tensor | None, y: Tensor, sigma: Tensor) -> Tensor:  # (N,)
        """Return log p(y given x, data)."""
        return rowwise(self.distribution_at(outputs, p, y, sigma).log_prob(self.observed(y)))

    def observed(self, y: Tensor) -> Tensor:
        """Return the part of the labels that a loss compares with the prediction."""
        return y

    def with_noise(self, sigma: Tensor) -> tuple[Likelihood, Tensor]:
        """Split `sigma`: return a likelihood that holds the relative noise of the outputs, and one common level, ()."""
        if not (sigma == 1).all():
            raise OptionError(
                f"sigma_noise={sigma.flatten().tolist()[:3]}: {self.name} has no observation noise; leave it at 1."
            )
        return self, sigma.reshape(-1)[0]

    def check_softmax_temperature(self, value: float) -> None:
        """Refuse a softmax temperature other than 1 if the outputs are no logits."""
        if value != 1 and not self.has_logits:
            instead = (
                "sigma_noise= widens its predictions"
                if self.has_noise
                else "prior_precision= and temperature= change its posterior"
            )
            raise OptionError(
                f"softmax_temperature={value:g} divides logits; the outputs of {self.name} are none. Leave it at 1: "
                f"{instead}."
            )

    def noise_at(self, level: Tensor) -> Tensor:
        """Return the noise of each output at this level. This undoes `with_noise`."""
        return level

    def curvature_scale(self, curvature: str, sigma: Tensor) -> Tensor:
        """Return c(sigma), the factor from the curvature at unit noise to the curvature at noise sigma."""
        return torch.ones_like(sigma)

    def doubt_of_noise(self, sums: Sums, sigma: Tensor) -> str | None:
        """Return why predictions with the noise sigma will mislead, judged by the sums of the training data, if so."""
        return None

    def check_outputs(self, f: Tensor) -> None:
        """Refuse outputs whose shape this likelihood cannot use."""
        if f.dim() != 2:
            raise InputError(f"the network's output has shape {tuple(f.shape)}; {self.name} needs (N, C).")

    def __eq__(self, other: object) -> bool:
        """Return whether `other` is this likelihood, or its name, as laplace-torch's likelihoods equal strings."""
        return self.name == str(getattr(other, "value", other)) if isinstance(other, str) else self is other

    def __hash__(self) -> int:
        """Return the hash of the name, so that `likelihood in {"regression", "classification"}` holds, too."""
        return hash(self.name)

    def __repr__(self) -> str:
        return written(self)


def shaped_like_outputs(f: Tensor, y: Tensor, what: str) -> Tensor:
    """Return real labels, one per output, in the dtype of the outputs. With one output, labels may be (N,)."""
    if y.shape == f.shape[:1] and f.shape[1] == 1:
        y = y.unsqueeze(1)
    if y.shape != f.shape:
        raise InputError(f"{what} labels have shape {tuple(y.shape)}, the outputs {tuple(f.shape)}; make them equal.")
    if y.is_complex():
        raise InputError(f"{what} labels have dtype {y.dtype}; real numbers are needed.")
    return finite(y.to(f.dtype))


def finite(y: Tensor) -> Tensor:  # (N, ...)
    """Return the labels. Refuse NaN and infinite values."""
    bad = ~y.flatten(1).isfinite().all(1)
    if bad.any():
        first = int(bad.nonzero()[0])
        raise InputError(
            f"the labels hold NaN or infinite values for {int(bad.sum())} of {len(y)} rows, the first is number "
            f"{first}. Leave these examples out, or give them weight 0 and any label."
        )
    return y


def class_indices(n: int, y: Tensor) -> Tensor:
    """Return integer labels (N,) for n examples. Labels (N, 1) are accepted too."""
    if y.is_floating_point() or y.is_complex() or y.dtype is torch.bool:
        raise InputError(
            f"class labels have dtype {y.dtype}; integers are needed. Write y.long(), y.astype(int) for an array, or "
            "y.argmax(-1) if one-hot."
        )
    y = y.squeeze(1) if y.shape == (n, 1) else y
    if y.shape != (n,):
        raise InputError(f"class labels have shape {tuple(y.shape)}; they must be ({n},), one label per example.")
    return y.long()


def check_range(y: Tensor, classes: int, what: str, hint: str = "") -> None:
    """Refuse labels outside 0 to classes - 1. A hint says what to write for negative ones; {low} is the lowest."""
    low, high = (int(y.min()), int(y.max())) if len(y) else (0, 0)
    if low < 0 or high >= classes:
        from_one = " If they count from 1, write y - 1." if low == 1 and high == classes else ""
        hint = hint.format(low=low) if low < 0 else from_one
        raise InputError(f"class labels lie in [{low}, {high}]; {what} need labels in [0, {classes - 1}].{hint}")


def _checked_weights(weights: Tensor, n: int) -> Tensor:
    if weights.shape == (n, 1):
        weights = weights.squeeze(1)
    if weights.shape != (n,):
        raise InputError(
            f"the weights have shape {tuple(weights.shape)}; one per example, ({n},), is needed. In a batch (x, y, w) "
            "the third element is weights; several inputs go into a tuple: ((x1, x2), y)."
        )
    if weights.is_complex():
        raise InputError(f"the weights have dtype {weights.dtype}; real numbers are needed.")
    weights = weights if weights.is_floating_point() else weights.double()
    if not (weights.isfinite() & (weights >= 0)).all():
        raise InputError(
            f"the weights hold negative, NaN or infinite values (the smallest is {float(weights.min()):g}). Give "
            "an example that should not count the weight 0."
        )
    return weights
