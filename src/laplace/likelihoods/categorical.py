"""Classification: y ~ softmax(f), Lambda = diag(p) - p p^T."""

from __future__ import annotations

import torch
from torch import Tensor

from laplace.curvature.output import OutputCurvature
from laplace.draws import uniforms
from laplace.errors import InputError
from laplace.likelihoods.base import Likelihood, Sums
from laplace.predictive.links import CATEGORICAL_LINKS


class Categorical(Likelihood):
    """One of C >= 2 classes, from C logits; labels are class indices (N,)."""

    name = "classification"
    links = CATEGORICAL_LINKS

    def check_outputs(self, f: Tensor) -> None:
        super().check_outputs(f)
        if f.shape[1] < 2:
            raise InputError(
                f"'classification' needs at least two logits; the network's output has shape {tuple(f.shape)}. Softmax "
                "of one logit is 1 everywhere: give the network two outputs. torch.cat([zeros_like(f), f], -1) is the "
                "same model."
            )

    def check_targets(self, f: Tensor, y: Tensor) -> Tensor:
        if y.is_floating_point() or y.is_complex() or y.dtype is torch.bool:
            raise InputError(
                f"class labels have dtype {y.dtype}; integers needed. Write y.long() (or y.argmax(-1) of one-hot)."
            )
        if y.shape != f.shape[:1]:
            fix = {f.shape: "y.argmax(-1)", (len(f), 1): "y.squeeze(1)"}.get(y.shape, "one label per example")
            raise InputError(
                f"class labels have shape {tuple(y.shape)}; for outputs {tuple(f.shape)} it must be ({f.shape[0]},): "
                f"{fix}."
            )
        y = y.long()
        low, high = int(y.min()), int(y.max())
        if low < 0 or high >= f.shape[1]:
            raise InputError(
                f"class labels lie in [{low}, {high}]; {f.shape[1]} outputs need labels in [0, {f.shape[1] - 1}]."
            )
        return y

    def log_prob(self, f: Tensor, y: Tensor, sigma: Tensor | float = 1.0) -> Tensor:
        return f.log_softmax(-1).gather(-1, y.unsqueeze(-1)).squeeze(-1)

    def score(self, f: Tensor, y: Tensor) -> Tensor:
        return torch.nn.functional.one_hot(y, f.shape[-1]).to(f.dtype) - f.softmax(-1)

    def fisher(self, f: Tensor) -> OutputCurvature:
        p = f.softmax(-1)
        return OutputCurvature(diagonal=p, vectors=p.unsqueeze(0), sign=-1)

    def root_times(self, f: Tensor, eps: Tensor) -> Tensor:
        p = f.softmax(-1)
        q = p.sqrt()
        return q * eps - p * (q * eps).sum(-1, keepdim=True)

    def sample(self, f: Tensor, n_samples: int, generator: torch.Generator | None) -> Tensor:
        u = uniforms(f.shape[0], n_samples, 1, f, generator).transpose(0, 1).squeeze(-1)
        cdf = f.double().softmax(-1).cumsum(-1)
        labels = torch.searchsorted(cdf, u.contiguous() * cdf[:, -1:], right=True)
        return labels.clamp(max=f.shape[1] - 1).T

    def inverse_link(self, f: Tensor) -> Tensor:
        return f.softmax(-1)

    def sums(self, f: Tensor, y: Tensor) -> Sums:
        return {"loss": -self.log_prob(f, y).sum().double()}

    def log_likelihood(self, sums: Sums, sigma: Tensor) -> Tensor:
        return -sums["loss"]
