"""Compute how much labels would tell about a posterior, from draws of class probabilities or from Gaussians.

Tensors in, tensors out. Probabilities of S drawn functions at N inputs are (S, N, K). Given a function, labels at
different inputs are independent; what they share is which function it is. Sums are taken in float64, because the
differences of entropies are small.
"""

from __future__ import annotations

import torch
from torch import Tensor

from laplace.linalg.sampling import uniforms
from laplace.predictive.entropy import entropy

_CHUNK = 2**24  # most elements of an intermediate tensor
_LOOK = 64  # inputs that are looked at together


def predictive_entropy(p: Tensor) -> Tensor:  # (S, N, K) -> (N,)
    """Return the entropy H(y) of the mean prediction."""
    return entropy(p.double().mean(0))


def small_margin(p: Tensor) -> Tensor:  # (S, N, K) -> (N,)
    """Return minus the difference of the two largest mean probabilities: 0 where two classes are equally likely."""
    first, second = p.double().mean(0).topk(2, -1).values.unbind(-1)
    return second - first


def mutual_information(p: Tensor) -> Tensor:  # (S, N, K) -> (N,)
    """Return I(y; function) = H(y) - E[H(y given function)] for each input (BALD)."""
    p = p.double()
    return (entropy(p.mean(0)) - entropy(p).mean(0)).clamp(min=0)


def information_about(p: Tensor, targets: Tensor) -> Tensor:  # (S, N, K), (S, M, K) -> (N,)
    """Return the mean of I(y; y') over the labels y' at M target inputs (EPIG).

    The joint p(y, y') is the mean over functions of p(y) p(y'), a product of two matrices. Costs S N M K^2.
    """
    s, _, k = p.shape
    q, found = targets.double().flatten(1), []
    h_target = entropy(targets.double().mean(0))  # (M,)
    for part in p.double().split(max(1, _CHUNK // (q.shape[1] * k)), 1):
        joint = (part.flatten(1).T @ q / s).unflatten(1, (-1, k)).unflatten(0, (-1, k))  # (n, K, M, K)
        h_joint = entropy(joint.transpose(1, 2).flatten(2))  # (n, M)
        found.append((entropy(part.mean(0)).unsqueeze(1) + h_target - h_joint).clamp(min=0).mean(1))
    return torch.cat(found)


class JointEntropy:
    """Computes the joint entropy of the labels of a growing batch of inputs (BatchBALD).

    All K^n combinations of labels are summed while there are at most `most` of them. After that, `most` combinations
    are drawn from the model, and the entropy with one more label is estimated from them.
    """

    def __init__(self, p: Tensor, most: int, generator: torch.Generator | None) -> None:  # (S, N, K)
        self._p, self._most, self._generator = p.double(), most, generator
        self._given = p.new_ones(1, len(p), dtype=torch.float64)  # p(combination given function), (M, S)
        self._weights = self._given.new_ones(1)  # how many combinations each one stands for
        self._conditional = p.new_zeros((), dtype=torch.float64)  # sum of E[H(y given function)] of the batch

    def best(self, bounds: Tensor) -> tuple[int, Tensor]:  # (N,) -> an index, ()
        """Return the input that adds most to the batch, and I(all labels; function) with it.

        An input adds the less, the more is in the batch. So what it added before is a bound, and inputs whose bound is
        below what another one adds now are not looked at. `bounds` are written to; -inf leaves an input out.
        """
        known, top, best = self.information(), -torch.inf, -1
        for some in bounds.argsort(descending=True).split(_LOOK):
            if float(bounds[some[0]]) <= top:
                break
            some = some[bounds[some] > -torch.inf]
            bounds[some] = self.gains(some) - known
            first = int(bounds[some].argmax())
            if float(bounds[some[first]]) > top:
                top, best = float(bounds[some[first]]), int(some[first])
        return best, known + top

    def information(self) -> Tensor:  # ()
        """Return I(all labels; function) of the batch."""
        return torch.special.entr(self._given.mean(1)) @ self._weights - self._conditional

    def gains(self, among: Tensor) -> Tensor:  # (n,) -> (n,)
        """Return I(all labels; function) of the batch with each of some further inputs."""
        s, _, k = self._p.shape
        found = []
        for part in self._p[:, among].split(max(1, _CHUNK // (len(self._given) * k)), 1):
            joint = (self._given @ part.flatten(1) / s).unflatten(1, (-1, k))  # (M, n, K)
            together = torch.special.entr(joint).sum(-1).T @ self._weights
            found.append(together - self._conditional - entropy(part).mean(0))
        return torch.cat(found)

    def add(self, index: int) -> None:
        """Add an input to the batch."""
        own = self._p[:, index]  # (S, K)
        self._conditional = self._conditional + entropy(own).mean()
        longer = self._given.unsqueeze(1) * own.T  # (M, K, S)
        mean = longer.mean(-1)  # (M, K)
        weights = self._weights.unsqueeze(1).expand_as(mean).flatten()
        if mean.numel() > self._most:
            share = (weights * mean.flatten()).cumsum(0)
            u = uniforms(self._most, 1, 1, share, self._generator).flatten() * share[-1]
            chosen = torch.searchsorted(share, u).clamp(max=len(share) - 1)
            longer, mean = longer.flatten(0, 1)[chosen], mean.flatten()[chosen]
            self._given, self._weights = longer, 1 / (self._most * mean)
        else:
            self._given, self._weights = longer.flatten(0, 1), weights


def gaussian_information(covariance: Tensor, noise: Tensor) -> Tensor:  # (N, C, C), (N, C) -> (N,)
    """Return I(y; f) = 1/2 log det(I + noise^-1/2 S noise^-1/2) for y = f + noise."""
    scale = noise.double().rsqrt()
    inner = scale.unsqueeze(-1) * covariance.double() * scale.unsqueeze(-2)
    eye = torch.eye(inner.shape[-1], dtype=inner.dtype, device=inner.device)
    return 0.5 * torch.linalg.slogdet(eye + inner).logabsdet.clamp(min=0)


def gaussian_information_about(
    covariance: Tensor,  # of y, (N, C, C), with noise
    cross: Tensor,  # with the targets, (N, C, M, C)
    targets: Tensor,  # of the targets' y', (M, C, C), with noise
) -> Tensor:  # (N,)
    """Return the mean over targets of I(y; y') = -1/2 log det(I - V'^-1 C^T V^-1 C) for jointly Gaussian labels."""
    cross, eye = cross.double().transpose(1, 2), torch.eye(covariance.shape[-1]).to(covariance.device).double()
    explained = cross.mT @ torch.linalg.solve(covariance.double().unsqueeze(1), cross)  # (N, M, C, C)
    left = eye - torch.linalg.solve(targets.double(), explained)
    return (-0.5 * torch.linalg.slogdet(left).logabsdet).clamp(min=0).mean(1)
