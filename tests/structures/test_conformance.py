"""What every structure must do: `laplace.testing` for all of the registry, and for each of their options.

A new structure is covered once it stands in `laplace.structures.STRUCTURES`. One with options of its own writes a
subclass of `Conformance` with `of` and `options`.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence

import pytest
import torch
from torch import Tensor

import oracle
from laplace.spec import estimator_named
from laplace.structures import STRUCTURES, MatrixFree, Structure
from laplace.testing import StructureConformance
from laplace.testing.reference import close
from laplace.testing.structures import SCALE, TASKS, Case, Small, fitted
from places import drawn_by_place

pytestmark = pytest.mark.filterwarnings(r"ignore:\w+ keeps:laplace.errors.LaplaceWarning")

KINDS = ["ggn", "ef", "mc", "sketch"]  # sums of J^T v v^T J for vectors v of output space
SLOW = ("ef", "mc")  # only in the slow suite for structures that are built on others of the registry:
MANY = ("block", "ekfac", "inf", "lowrank", "matrix_free")


@functools.cache
def case(structure: Structure | str, subset: str, curvature: str, task: str, options: tuple = ()) -> Case:
    index = oracle.indices_of(Small(TASKS[task]), lambda name, j: j % 3 == 0) if subset == "subnetwork" else None
    return fitted(structure, subset, curvature, task, subnetwork_indices=index, **dict(options))


class Conformance(StructureConformance):
    """The suite, one fit at a time: `given` is the fit under test."""

    of: str
    options: tuple = ()
    kinds: Sequence[str] = KINDS
    made: Structure | None = None  # given in place of the name, for options that `Laplace` has no keywords for

    @pytest.fixture(autouse=True)
    def given(self, subset, curvature, task) -> Case:
        self.case = case(self.made or self.of, subset, curvature, task, self.options)
        return self.case

    def cases(self) -> Iterator[Case]:
        yield self.case


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if metafunc.cls is not None and issubclass(metafunc.cls, Conformance):
        kinds = [
            pytest.param(subset, kind, marks=[pytest.mark.slow] if kind in SLOW and metafunc.cls.of in MANY else [])
            for subset, kind in itertools.product(["last_layer", "all"], metafunc.cls.kinds)
        ]
        if STRUCTURES[metafunc.cls.of].scattered:
            kinds.append(("subnetwork", "ggn"))
        metafunc.parametrize(("subset", "curvature"), kinds)
        metafunc.parametrize("task", TASKS)


def dense(structure: str, subset: str, curvature: str, task: str) -> tuple[Tensor, Tensor]:
    """The curvature of a case, and sum of J^T Lambda J with the Lambda of the same labels and generator."""
    given = case(structure, subset, curvature, task)
    x, y = given.data
    f = given.la.model(x).detach()
    draws = drawn_by_place(5, len(x))
    lam = estimator_named(curvature, 1, None, None)(given.la.likelihood, f, y, draws).dense()
    jac = oracle.jacobian_loop(given.la.model, list(given.fit.layout.names), x)
    return given.fit.curvature.matrix(), torch.einsum("ncp,ncd,ndq->pq", jac, lam, jac)


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("curvature", KINDS)
@pytest.mark.parametrize("subset", ["last_layer", "all"])
def test_every_kind_of_curvature_is_what_was_sent_back(subset, curvature, task):
    h, expected = dense("full", subset, curvature, task)
    close(h, expected)
    h, _ = dense("diag", subset, curvature, task)
    close(h, expected.diagonal().diag())


def _registered(name: str) -> type[Conformance]:
    return type(f"Test{name.capitalize()}", (Conformance,), {"of": name})


globals().update({f"Test{name.capitalize()}": _registered(name) for name in STRUCTURES})


class TestLowRank(Conformance):
    """Fewer eigenvalues than there are."""

    of, options = "lowrank", (("rank", 4),)


class TestLowRankOfAll(Conformance):
    """As many as there are weights, but for those without curvature: the same as full."""

    of, options, kinds = "lowrank", (("tol", 1e-15),), ("ggn",)

    def test_the_curvature_is_that_of_full(self, given, subset, curvature, task):
        close(given.fit.curvature.matrix(), case("full", subset, curvature, task).fit.curvature.matrix())


class TestReducedKron(Conformance):
    of, options, kinds = "kron", (("weight_sharing", "reduce"),), ("ggn",)


class TestReducedEkfac(Conformance):
    of, options, kinds = "ekfac", (("weight_sharing", "reduce"),), ("ggn",)


@pytest.mark.slow
class TestMatrix_free(Conformance):  # in place of the one from the registry, whose evidence is estimated
    """With a probe for every weight and small residuals, it answers as the matrix itself would."""

    of, made, kinds = "matrix_free", MatrixFree(residual=1e-12, probes=100), ("ggn", "ef", "mc")

    def test_the_curvature_is_that_of_full(self, given, subset, curvature, task):
        if curvature in ("ggn", "ef"):  # others draw by the structure's own seed
            close(given.fit.curvature.matrix(), case("full", subset, curvature, task).fit.curvature.matrix())


@pytest.mark.slow
class TestMatrixFreeWithEkfac(Conformance):
    of, made, kinds = "matrix_free", MatrixFree(residual=1e-12, probes=100, preconditioner="ekfac"), ("ggn",)


@pytest.mark.slow
class TestMatrixFreeAlone(Conformance):
    of, made, kinds = "matrix_free", MatrixFree(residual=1e-12, probes=100, preconditioner="none"), ("ggn",)


class TestInfOfLowRank(Conformance):
    of, options, kinds = "inf", (("rank", 2),), ("ggn", "ef")


class TestInfOfAShare(Conformance):
    of, options, kinds = "inf", (("rank", 0.6), ("weight_sharing", "reduce")), ("ggn",)


class TestDampedKron(Conformance):
    """(s B + sqrt(delta) I) (x) (A + sqrt(delta) I) of every weight with Kronecker factors."""

    of, options, kinds = "kron", (("damping", True),), ("ggn",)

    def expected_precision(self, case: Case, prior: str) -> Tensor:
        sums, layout, blocks = case.fit.sums, case.fit.layout, []
        for name, shape, delta in zip(layout.names, layout.shapes, case.blocks(prior), strict=True):
            if f"{name}/H" in sums:
                blocks.append(SCALE * sums[f"{name}/H"] + delta * torch.eye(shape[0], dtype=torch.float64))
                continue
            pairs = zip(SCALE * sums[f"{name}/B"], sums[f"{name}/A"] / sums[f"{name}/count"], strict=True)
            for b, a in pairs:
                if len(shape) == 1:  # a bias has one factor, and its prior is exact
                    blocks.append(b + delta * torch.eye(len(b), dtype=torch.float64))
                    continue
                root = delta.sqrt()
                pi = self.balance(a, b)
                left = b + root / pi * torch.eye(len(b), dtype=torch.float64)
                blocks.append(torch.kron(left, a + root * pi * torch.eye(len(a), dtype=torch.float64)))
        return torch.block_diag(*blocks)

    def balance(self, a: Tensor, b: Tensor) -> Tensor | float:
        return 1.0


class TestBalancedKron(TestDampedKron):
    """The same with the roots divided and multiplied by pi, pi^2 = (tr A / I) / (tr s B / O)."""

    options = (("damping", "balanced"),)

    def balance(self, a: Tensor, b: Tensor) -> Tensor:
        return (a.diagonal().mean() / b.diagonal().mean()).sqrt()
