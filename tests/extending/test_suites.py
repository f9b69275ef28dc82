"""The suites that outsiders inherit: they hold for parts from outside, and fail for wrong ones."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from extending.test_likelihood import Exponential
from extending.test_structure import Floored
from extending.test_whole_structure import Isotropic
from laplace.likelihoods import ByAutograd, Poisson
from laplace.structures import BlockDiagonal, DiagBlock, Structure
from laplace.testing import LikelihoodConformance, StructureConformance


class TestFloored(StructureConformance):
    def structure(self) -> Structure:
        return Floored(0.01)

    def expected_curvature(self, exact, case):
        return exact.diagonal().clamp(min=0.01).diag()


class TestIsotropic(StructureConformance):
    def structure(self) -> Structure:
        return Isotropic()

    def expected_curvature(self, exact, case):
        return exact.diagonal().mean() * torch.eye(len(exact), dtype=exact.dtype)


class TestExponential(LikelihoodConformance):
    def likelihood(self):
        return Exponential()

    def data(self) -> tuple[Tensor, Tensor]:
        torch.manual_seed(0)
        return torch.randn(5, 2, dtype=torch.float64), torch.rand(5, 2, dtype=torch.float64)


class Half(BlockDiagonal):
    """Half of what it should be."""

    def block_sums(self, moments):
        return {"half": moments.squares() / 2}

    def block(self, sums, shape, eigh):
        return DiagBlock(sums["half"].to(eigh.dtype), shape)


class Leaky(Half):
    """Its sums of two halves of the data are not those of the whole."""

    def block_sums(self, moments):
        return {"half": moments.squares().sqrt()}


def test_a_wrong_structure_fails():
    class Wrong(StructureConformance):
        def structure(self):
            return Half()

        def expected_curvature(self, exact, case):
            return exact.diagonal().diag()

    with pytest.raises(AssertionError, match="H: off by"):
        Wrong().test_the_curvature_is_what_it_should_be()

    class Unsummed(StructureConformance):
        def structure(self):
            return Leaky()

    with pytest.raises(AssertionError, match="sums of"):
        Unsummed().test_fits_on_two_halves_add_up_to_the_whole()
    with pytest.raises(NotImplementedError, match="def structure"):
        StructureConformance().structure()


@pytest.mark.parametrize(
    ("wrong", "test"),
    [
        ({"score": lambda self, f, y: y + f.exp()}, "test_the_score_is_the_derivative_of_log_prob"),
        ({"log_prob": lambda self, f, y, sigma=1.0: (f * y - f.mean(0)).sum(-1)}, "test_examples_are_independent"),
        ({"inverse_link": lambda self, f: f}, "test_a_certain_output_gives_the_inverse_link"),
        ({"sample": lambda self, f, n, g: f.exp().expand(n, *f.shape)}, "test_drawn_labels_have_lambda_as_their"),
    ],
)
def test_a_wrong_likelihood_fails(wrong, test):
    class Suite(LikelihoodConformance):
        def likelihood(self):
            return type("Wrong", (Poisson,), wrong)()

        def data(self):
            torch.manual_seed(0)
            return torch.randn(5, 2, dtype=torch.float64), torch.randint(4, (5, 2))

    name = next(each for each in dir(Suite) if each.startswith(test))
    with pytest.raises(AssertionError):
        getattr(Suite(), name)()


def test_a_subclass_of_by_autograd_needs_log_prob_alone():
    with pytest.raises(TypeError, match=r"abstract method '?log_prob"):
        type("Empty", (ByAutograd,), {})()
