"""`link_approx="quadrature"` is the integral: against sums in extended precision, for every variance and logit."""

from __future__ import annotations

from functools import cache
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import nn

from laplace import Laplace
from laplace.likelihoods import Bernoulli, Multilabel, Ordinal, Preference
from laplace.linalg.sampling import Draws
from laplace.predictive.logistic import expected_sigmoid
from laplace.predictive.outputs import OutputGaussian

F64 = torch.float64
VARIANCES = (1e-8, 1e-3, 0.3, 1.0, 10.0, 100.0, 1e3, 1e4, 1e6)
LOGITS = (-80.0, -20.0, -3.0, -0.01, 0.0, 0.5, 4.0, 30.0, 80.0)


def integral(values, f, s):
    """E[values(f)] by the trapezoidal rule, a sixth of the narrower width apart."""
    root = np.sqrt(np.longdouble(s))
    step = min(root, np.longdouble(1)) / 6
    reach = 10 * root + min(s, abs(f))
    t = np.arange(-np.ceil(reach / step), np.ceil(reach / step) + 1, dtype=np.longdouble) * step
    weights = np.exp(-((t / root) ** 2) / 2) * (step / (root * np.sqrt(2 * np.longdouble(np.pi))))
    return (values(np.longdouble(f) + t) * weights).sum(-1).astype(np.float64)


def sigmoid(t):
    e = np.exp(-np.abs(t))
    return np.where(t > 0, 1, e) / (1 + e)


def slope(t):
    return sigmoid(t) * sigmoid(-t)


def bend(t):
    return slope(t) * (sigmoid(-t) - sigmoid(t))


def table(*rows):
    f, s = (torch.tensor(rows, dtype=F64)[:, i : i + 1] for i in (0, 1))
    return f, s


GRID = table(*[(f, s) for s in VARIANCES for f in LOGITS])


@cache
def reference(values):
    return torch.tensor([integral(values, f, s) for f, s in torch.cat(GRID, 1).tolist()], dtype=F64)[:, None]


@pytest.mark.parametrize("likelihood", [Bernoulli(), Multilabel(), Preference()], ids=lambda given: given.name)
def test_probabilities_of_a_label_are_the_integral_to_rounding(likelihood):
    p = likelihood.links["quadrature"].apply(OutputGaussian(*GRID), Draws(1))
    torch.testing.assert_close(p, reference(sigmoid), rtol=1e-12, atol=0)


def test_float32_outputs_get_the_probability_of_float64_rounded():
    f, s = (t.float() for t in GRID)
    p = expected_sigmoid(f, s)
    assert p.dtype == torch.float32
    assert torch.equal(p, expected_sigmoid(f.double(), s.double()).float())


def test_derivatives_by_logit_and_variance_are_the_integrals_of_derivatives():
    f, s = (t.clone().requires_grad_() for t in GRID)
    expected_sigmoid(f, s).sum().backward()
    torch.testing.assert_close(f.grad, reference(slope), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(s.grad, reference(bend) / 2, rtol=1e-10, atol=1e-12)


def test_derivatives_may_be_derived_and_vectorised():
    f, s = (t.requires_grad_() for t in table((0.3, 0.4), (-5.0, 3.0), (2.0, 50.0)))
    assert torch.autograd.gradcheck(expected_sigmoid, (f, s))
    assert torch.autograd.gradgradcheck(expected_sigmoid, (f, s))
    slopes = torch.func.vmap(torch.func.grad(lambda m, v: expected_sigmoid(m, v).sum()))(f.detach(), s.detach())
    torch.testing.assert_close(slopes, torch.autograd.grad(expected_sigmoid(f, s).sum(), f)[0])


def test_without_variance_it_is_the_link_itself():
    f = torch.tensor([-800.0, -3.0, 0.0, 2.0, 700.0], dtype=F64, requires_grad=True)
    s = torch.zeros_like(f, requires_grad=True)
    p = expected_sigmoid(f, s)
    torch.testing.assert_close(p, f.sigmoid())
    by_f, by_s = torch.autograd.grad(p.sum(), (f, s))
    torch.testing.assert_close(by_f, f.sigmoid() * (-f).sigmoid())
    torch.testing.assert_close(by_s, f.sigmoid() * (-f).sigmoid() * ((-f).sigmoid() - f.sigmoid()) / 2)


@pytest.mark.parametrize("cuts", [[-1.0, 0.0, 2.0], [-30.0, 0.0, 0.001, 40.0]], ids=["usual", "uneven"])
def test_probabilities_of_ordered_classes_are_the_integral_to_rounding(cuts):
    p = Ordinal(cuts).links["quadrature"].apply(OutputGaussian(*GRID), Draws(1))
    edges = [-np.inf, *cuts, np.inf]

    def classes(t):
        between = [-np.expm1(np.longdouble(low) - np.longdouble(high)) for low, high in pairwise(edges)]
        return np.stack(
            [sigmoid(b - t) * sigmoid(t - a) * w for a, b, w in zip(edges[:-1], edges[1:], between, strict=True)]
        )

    with np.errstate(invalid="ignore"):
        expected = torch.from_numpy(np.stack([integral(classes, f, s) for f, s in torch.cat(GRID, 1).tolist()]))
    torch.testing.assert_close(p, expected, rtol=1e-9, atol=1e-15)
    torch.testing.assert_close(p.sum(-1), torch.ones(len(p), dtype=F64), rtol=0, atol=1e-14)
    f32 = Ordinal(cuts).links["quadrature"].apply(OutputGaussian(*(t.float() for t in GRID)), Draws(1))
    torch.testing.assert_close(f32.double(), p, rtol=1e-6, atol=1e-7)


def test_ordered_classes_have_the_right_derivatives():
    f, s = (t.requires_grad_() for t in table((0.3, 0.4), (-5.0, 3.0), (2.0, 900.0)))
    link = Ordinal([-1.0, 0.0, 2.0]).links["quadrature"]
    assert torch.autograd.gradcheck(lambda f, s: link.apply(OutputGaussian(f, s), Draws(1)), (f, s))


@pytest.mark.parametrize("precision", [1e-4, 1.0])
def test_a_posterior_predicts_with_it(precision):
    torch.manual_seed(0)
    model, x = nn.Linear(3, 1).double(), 5 * torch.randn(20, 3, dtype=F64)
    y = torch.randint(2, (20,))
    la = Laplace(model, "binary", "all", "full", prior_precision=precision).fit([(x[:2], y[:2])])
    p = la.predict(x, link_approx="quadrature")
    expected = [integral(sigmoid, *pair) for pair in torch.cat([p.outputs.mean, p.outputs.variance], 1).tolist()]
    torch.testing.assert_close(p.mean, torch.tensor(expected, dtype=F64)[:, None], rtol=1e-12, atol=0)
