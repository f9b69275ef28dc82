"""What every structure must do, whatever it keeps: inherited by all of the registry, and by each of their options.

A new structure is covered once it stands in `laplace.structures.STRUCTURES`. One with options of its own writes a
subclass of `Conformance` with `structure` and `options`.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

import oracle
from laplace import Laplace
from laplace.backprop import Forward, Jacobian
from laplace.batches import Inputs
from laplace.curvature import CURVATURES
from laplace.errors import UnsupportedError
from laplace.posterior import Fit, Posterior, added
from laplace.prior import Prior
from laplace.structures import STRUCTURES
from networks import cut

pytestmark = pytest.mark.filterwarnings(r"ignore:\w+ keeps:laplace.errors.LaplaceWarning")
KINDS = [kind for kind in CURVATURES if kind != "hessian"]  # the exact Hessian may be indefinite: test_all_weights.py

TASKS = {"classification": 3, "regression": 2}
KINDS = ["ggn", "ef", "mc", "sketch"]  # sums of J^T v v^T J for vectors v of output space
SLOW = ("ef", "mc")  # only in the slow suite for structures that are built on others of the registry:
MANY = ("block", "ekfac", "inf", "lowrank")
SCALE = 0.7
N, NEW = 9, 4


class Small(nn.Module):
    """A layer of every kind of block: a grouped convolution, a normalisation, a linear layer, in 59 weights at most."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.conv = nn.Conv1d(2, 4, 2, groups=2)
        self.norm = nn.GroupNorm(2, 4)
        self.mix = nn.Linear(4, 3, bias=False)
        self.head = nn.Linear(3, outputs)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.norm(self.conv(x.unflatten(1, (2, 3)))))
        return self.head(torch.tanh(self.mix(h.transpose(1, 2))).mean(1))


@dataclass(frozen=True)
class Case:
    """A fit, and the Jacobian of the outputs at new inputs: from the engine, and from the oracle."""

    la: Laplace
    data: tuple[Tensor, Tensor]
    run: Forward  # at the new inputs
    jac: Tensor  # (NEW, C, P)

    @property
    def fit(self) -> Fit:
        return self.la.posterior.fit

    @functools.cached_property
    def engine(self) -> Jacobian:
        return self.run.jacobian()

    def blocks(self, prior: str) -> list[Tensor]:
        """A prior precision of that structure, as `Curvature.gaussian` takes it."""
        torch.manual_seed(1)
        layout = self.fit.layout
        size = {"scalar": 1, "layerwise": len(layout.names), "diag": layout.n_params}[prior]
        return Prior.of(torch.rand(size, dtype=torch.float64) + 0.4, 0.0).blocks(layout, self.fit.mean)

    def diagonal(self, prior: str) -> Tensor:
        """The same, one value per weight."""
        pairs = zip(self.blocks(prior), self.fit.layout.sizes, strict=True)
        return torch.cat([d.reshape(-1).expand(size) for d, size in pairs])

    def gaussian(self, prior: str, scale: float = SCALE):
        return self.fit.curvature.gaussian(torch.tensor(scale, dtype=torch.float64), self.blocks(prior))

    def gaussians(self):
        """For every prior structure that there is: the Gaussian, its precision, and the inverse of that."""
        for prior in self.fit.structure.prior_structures:
            gaussian = self.gaussian(prior)
            precision = gaussian.precision_matrix()
            yield prior, gaussian, precision, torch.linalg.inv(precision)


@functools.cache
def case(structure: str, subset: str, curvature: str, task: str, options: tuple = ()) -> Case:
    torch.manual_seed(0)
    model = Small(TASKS[task]).double()
    x, new = torch.randn(N, 6, dtype=torch.float64), torch.randn(NEW, 6, dtype=torch.float64)
    y = torch.randint(3, (N,)) if task == "classification" else torch.randn(N, 2, dtype=torch.float64)
    index = oracle.indices_of(model, lambda name, j: j % 3 == 0) if subset == "subnetwork" else None
    la = Laplace(model, task, subset, structure, curvature=curvature, subnetwork_indices=index, **dict(options))
    la.fit(cut(x, y, [4, 1, 2]), generator=torch.Generator().manual_seed(5))
    (run,) = la._runs(Inputs(new), whole=True)
    jac = oracle.jacobian_loop(model, list(la.posterior.fit.layout.names), new)
    return Case(la, (x, y), run, jac if index is None else jac[..., index])


def close(a: Tensor, b: Tensor, tolerance: float = 1e-8) -> None:
    assert a.shape == b.shape
    assert float((a - b).abs().max()) <= tolerance * max(1.0, float(b.abs().max()))


class Conformance:
    """The suite: `given` is the fit under test."""

    structure: str
    options: tuple = ()
    kinds: Sequence[str] = KINDS

    def expected_precision(self, given: Case, prior: str) -> Tensor:
        """s H + D; a structure that keeps the prior otherwise says how."""
        return SCALE * given.fit.curvature.matrix() + given.diagonal(prior).diag()

    @pytest.fixture
    def given(self, subset, curvature, task) -> Case:
        return case(self.structure, subset, curvature, task, self.options)

    def test_the_curvature_is_symmetric_and_positive_semidefinite(self, given):
        h = given.fit.curvature.matrix()
        close(h, h.T)
        assert float(torch.linalg.eigvalsh(h).min()) > -1e-10 * float(h.diagonal().max())
        assert float(h.diagonal().max()) > 1e-4

    def test_the_precision_is_the_scaled_curvature_plus_the_prior(self, given):
        for prior, _, precision, _ in given.gaussians():
            close(precision, self.expected_precision(given, prior))

    def test_the_covariance_is_the_inverse_of_the_precision(self, given):
        for _, gaussian, precision, covariance in given.gaussians():
            close(precision, precision.T)
            close(gaussian.covariance_matrix(), covariance)
            close(precision @ gaussian.covariance_matrix(), torch.eye(len(precision), dtype=torch.float64))

    def test_the_log_determinant_is_the_precisions(self, given):
        for _, gaussian, precision, _ in given.gaussians():
            close(gaussian.logdet(), torch.logdet(precision))
            assert gaussian.logdet().dtype == torch.float64

    def test_marginal_variances_are_the_covariances_diagonal(self, given):
        for _, gaussian, _, covariance in given.gaussians():
            close(gaussian.marginal_variances(), covariance.diagonal())

    def test_the_quadratic_form_is_the_precisions(self, given):
        for _, gaussian, precision, _ in given.gaussians():
            torch.manual_seed(2)
            v = torch.randn(5, len(precision), dtype=torch.float64)
            close(gaussian.quadratic(v), ((v @ precision) * v).sum(-1))
            close(gaussian.quadratic(v[0]), v[0] @ precision @ v[0])

    def test_colour_is_a_root_of_the_covariance(self, given):
        for _, gaussian, _, covariance in given.gaussians():
            root = gaussian.color(torch.eye(len(covariance), dtype=torch.float64))
            close(root.T @ root, covariance)
            torch.manual_seed(2)
            eps = torch.randn(6, len(covariance), dtype=torch.float64)
            close(gaussian.color(eps), eps @ root)

    def test_output_variances_are_those_of_the_oracles_jacobian(self, given):
        for _, gaussian, _, covariance in given.gaussians():
            expected = given.jac @ covariance @ given.jac.mT
            for _ in range(4):  # a structure may prepare for being asked again
                close(gaussian.variance(given.engine), expected.diagonal(dim1=1, dim2=2))
            close(gaussian.covariance(given.engine), expected)
            close(gaussian.dense_variance(given.jac), expected)

    def test_the_product_is_the_covariance_times_a_vector(self, given):
        torch.manual_seed(2)
        v = torch.randn(given.jac.shape[:2], dtype=torch.float64)
        for _, gaussian, _, covariance in given.gaussians():
            expected = given.jac @ (covariance @ (given.jac.mT @ v.unsqueeze(-1)))
            close(gaussian.product(given.engine, v), expected.squeeze(-1))

    def test_the_joint_covariance_is_that_of_all_rows_of_the_jacobian(self, given):
        rows, shape = given.jac.flatten(0, 1), (*given.jac.shape[:2], *given.jac.shape[:2])
        for _, gaussian, _, covariance in given.gaussians():
            expected = rows @ covariance @ rows.T
            close(gaussian.joint(given.engine), expected.reshape(shape))
            close(gaussian.dense_variance(rows), expected)

    def test_some_outputs_are_a_part_of_all(self, given):
        index = torch.tensor([1, 0]) if given.jac.shape[1] == 2 else torch.tensor([2, 0])
        engine = given.run.jacobian(index)
        jac = given.jac[:, index]
        rows = jac.flatten(0, 1)
        for _, gaussian, _, covariance in given.gaussians():
            expected = jac @ covariance @ jac.mT
            close(gaussian.variance(engine), expected.diagonal(dim1=1, dim2=2))
            close(gaussian.covariance(engine), expected)
            close(gaussian.joint(engine).flatten(2).flatten(0, 1), rows @ covariance @ rows.T)

    def test_a_sweep_gives_the_variances_of_each_gaussian(self, given):
        for prior in given.fit.structure.prior_structures:
            gaussians = [given.gaussian(prior, scale) for scale in (0.1, 1.0, 30.0)]
            swept = list(given.fit.curvature.sweep(given.engine, gaussians))
            assert len(swept) == 3
            for gaussian, variance in zip(gaussians, swept, strict=True):
                covariance = torch.linalg.inv(gaussian.precision_matrix())
                close(variance, torch.einsum("ncp,pq,ncq->nc", given.jac, covariance, given.jac))

    def test_traces_are_those_of_the_covariances_blocks(self, given):
        layout = given.fit.layout
        sizes = {"scalar": [layout.n_params], "layerwise": layout.sizes, "diag": [1] * layout.n_params}
        for (_, gaussian, _, covariance), groups in itertools.product(
            given.gaussians(), given.fit.structure.prior_structures
        ):
            t, m = gaussian.traces(groups)
            rows = covariance.split(sizes[groups])
            squares = torch.stack([torch.stack([b.square().sum() for b in r.split(sizes[groups], 1)]) for r in rows])
            close(t, torch.stack([d.sum() for d in covariance.diagonal().split(sizes[groups])]))
            assert t.dtype == m.dtype == torch.float64
            if m.dim() == 1:  # the groups are independent
                close(squares, squares.diagonal().diag())
                close(m, squares.diagonal())
            else:
                close(m, squares)

    def test_fits_on_two_halves_add_up_to_the_whole(self, given):
        x, y = given.data
        la = given.la
        if given.fit.structure.passes > 1:  # what is kept depends on all data
            with pytest.raises(UnsupportedError, match=r"override=False.*cannot be added to"):
                la.fit(cut(x, y, 3), override=False)
            return

        def fit(parts, generator):
            other = Laplace(la.model, la.likelihood, la.subset_of_weights, self.structure,
                            curvature=la.curvature, subnetwork_indices=la.subnetwork_indices,
                            **dict(self.options))  # fmt: skip
            return other.fit(parts, generator=generator)

        generator = torch.Generator().manual_seed(5)
        first = fit(cut(x[:5], y[:5], 3), generator).posterior.fit
        second = fit(cut(x[5:], y[5:], 3), generator).posterior.fit
        sums = added(first.sums, second.sums)
        assert set(sums) == set(given.fit.sums)
        for key, value in given.fit.sums.items():
            close(sums[key], value)
        whole = first.plus(second)
        close(whole.curvature.matrix(), given.fit.curvature.matrix())
        assert whole.n_data == N

    def test_the_log_determinant_has_the_right_gradients(self, given):
        curvature, layout = given.fit.curvature, given.fit.layout

        def logdet(scale, precision):
            prior = Prior(precision, torch.tensor(0.0)).blocks(layout, given.fit.mean)
            return curvature.gaussian(scale, prior).logdet()

        for prior in given.fit.structure.prior_structures:
            torch.manual_seed(1)
            size = {"scalar": 1, "layerwise": len(layout.names), "diag": layout.n_params}[prior]
            precision = (torch.rand(size, dtype=torch.float64) + 0.4).requires_grad_()
            scale = torch.tensor(SCALE, dtype=torch.float64, requires_grad=True)
            assert torch.autograd.gradcheck(logdet, (scale, precision))

    def test_output_variances_have_the_right_gradients(self, given):
        curvature, layout = given.fit.curvature, given.fit.layout

        def variance(scale, precision):
            prior = Prior(precision, torch.tensor(0.0)).blocks(layout, given.fit.mean)
            return curvature.gaussian(scale, prior).variance(given.engine)

        scale = torch.tensor(SCALE, dtype=torch.float64, requires_grad=True)
        for size in {1, len(layout.names)}:
            precision = torch.linspace(0.5, 1.5, size, dtype=torch.float64).requires_grad_()
            assert torch.autograd.gradcheck(variance, (scale, precision))

    def test_the_evidence_is_its_formula(self, given):
        posterior = given.la.posterior
        assert isinstance(posterior, Posterior)
        scatter = given.fit.mean.square().sum()
        logdet = torch.logdet(posterior.gaussian.precision_matrix())  # the prior is 1 everywhere
        close(posterior.log_evidence, posterior.log_likelihood - 0.5 * (scatter + logdet))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if metafunc.cls is not None and issubclass(metafunc.cls, Conformance):
        kinds = [
            pytest.param(
                subset, kind, marks=[pytest.mark.slow] if kind in SLOW and metafunc.cls.structure in MANY else []
            )
            for subset, kind in itertools.product(["last_layer", "all"], metafunc.cls.kinds)
        ]
        if STRUCTURES[metafunc.cls.structure].scattered:
            kinds.append(("subnetwork", "ggn"))
        metafunc.parametrize(("subset", "curvature"), kinds)
        metafunc.parametrize("task", TASKS)


def dense(structure: str, subset: str, curvature: str, task: str) -> tuple[Tensor, Tensor]:
    """The curvature of a case, and sum of J^T Lambda J with the Lambda of the same labels and generator."""
    given = case(structure, subset, curvature, task)
    x, y = given.data
    f = given.la.model(x).detach()
    generator = torch.Generator().manual_seed(5)
    lam = CURVATURES[curvature](given.la.likelihood, f, y, 1, generator).dense()
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
    return type(f"Test{name.capitalize()}", (Conformance,), {"structure": name})


globals().update({f"Test{name.capitalize()}": _registered(name) for name in STRUCTURES})


class TestLowRank(Conformance):
    """Fewer eigenvalues than there are."""

    structure, options = "lowrank", (("rank", 4),)


class TestLowRankOfAll(Conformance):
    """As many as there are weights, but for those without curvature: the same as full."""

    structure, options, kinds = "lowrank", (("tol", 1e-15),), ("ggn",)

    def test_the_curvature_is_that_of_full(self, given, subset, curvature, task):
        close(given.fit.curvature.matrix(), case("full", subset, curvature, task).fit.curvature.matrix())


class TestReducedKron(Conformance):
    structure, options, kinds = "kron", (("weight_sharing", "reduce"),), ("ggn",)


class TestReducedEkfac(Conformance):
    structure, options, kinds = "ekfac", (("weight_sharing", "reduce"),), ("ggn",)


class TestInfOfLowRank(Conformance):
    structure, options, kinds = "inf", (("rank", 2),), ("ggn", "ef")


class TestInfOfAShare(Conformance):
    structure, options, kinds = "inf", (("rank", 0.6), ("weight_sharing", "reduce")), ("ggn",)


class TestDampedKron(Conformance):
    """(s B + sqrt(delta) I) (x) (A + sqrt(delta) I) of every weight with Kronecker factors."""

    structure, options, kinds = "kron", (("damping", True),), ("ggn",)

    def expected_precision(self, given: Case, prior: str) -> Tensor:
        sums, layout, blocks = given.fit.sums, given.fit.layout, []
        for name, shape, delta in zip(layout.names, layout.shapes, given.blocks(prior), strict=True):
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
