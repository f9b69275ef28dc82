"""Test what every structure must do."""

from __future__ import annotations

import copy
import functools
import itertools
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from laplace.backprop import Forward, Jacobian
from laplace.errors import LaplaceWarning, UnsupportedError
from laplace.laplace import Laplace
from laplace.network.inputs import Inputs
from laplace.posterior.posterior import Fit, added
from laplace.priors.gaussian import GaussianPrior
from laplace.structures import Gaussian, Structure
from laplace.testing.reference import close, jacobian

TASKS = {"classification": 3, "regression": 2}
SCALE = 0.7
N, NEW = 9, 4


class Small(nn.Module):
    """Has a layer for every kind of block: grouped convolution, normalisation, linear. At most 59 weights."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.conv = nn.Conv1d(2, 4, 2, groups=2)
        self.norm = nn.GroupNorm(2, 4)
        self.mix = nn.Linear(4, 3, bias=False)
        self.head = nn.Linear(3, outputs)

    def forward(self, x: Tensor) -> Tensor:
        """Return (N, outputs) for x, (N, 6)."""
        h = torch.tanh(self.norm(self.conv(x.unflatten(1, (2, 3)))))
        return self.head(torch.tanh(self.mix(h.transpose(1, 2))).mean(1))


@dataclass(frozen=True)
class Case:
    """Holds a fit, and the Jacobian of the outputs at new inputs, from the engine and by autograd."""

    la: Laplace
    data: tuple[Tensor, Tensor]
    run: Forward  # at the new inputs
    jac: Tensor  # (NEW, C, P)
    index: Tensor | None = None  # of the uncertain weights in the flat vector, if they are scattered

    def jacobian_at(self, x: Tensor) -> Tensor:  # (N, C, P)
        """Return the Jacobian at some inputs by autograd."""
        jac = jacobian(self.la.model, list(self.fit.layout.names), x)
        return jac if self.index is None else jac[..., self.index]

    @property
    def fit(self) -> Fit:
        """Return the fit."""
        return self.la.posterior.fit

    @functools.cached_property
    def engine(self) -> Jacobian:
        """Return the Jacobian at the new inputs, as structures get it."""
        return self.run.jacobian()

    def blocks(self, prior: str) -> list[Tensor]:
        """Return a prior precision of that structure, as `Curvature.gaussian` takes it."""
        torch.manual_seed(1)
        layout = self.fit.layout
        size = {"scalar": 1, "layerwise": len(layout.names), "diag": layout.n_params}[prior]
        return GaussianPrior.of(torch.rand(size, dtype=torch.float64) + 0.4, 0.0).blocks(layout, self.fit.mean)

    def diagonal(self, prior: str) -> Tensor:  # (P,)
        """Return the same prior precision with one value per weight."""
        pairs = zip(self.blocks(prior), self.fit.layout.sizes, strict=True)
        return torch.cat([d.reshape(-1).expand(size) for d, size in pairs])

    def gaussian(self, prior: str, scale: float = SCALE) -> Gaussian:
        """Return the Gaussian with that prior and scale."""
        return self.fit.curvature.gaussian(torch.tensor(scale, dtype=torch.float64), self.blocks(prior))

    def gaussians(self) -> Iterator[tuple[str, Gaussian, Tensor, Tensor]]:
        """Yield the Gaussian, its precision and its covariance for every accepted prior structure."""
        for prior in self.fit.structure.prior_structures:
            gaussian = self.gaussian(prior)
            precision = gaussian.precision_matrix()
            yield prior, gaussian, precision, torch.linalg.inv(precision)


def parts_of(x: Tensor, y: Tensor, sizes: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
    """Return batches of these sizes, and the rest as a last batch."""
    cuts = [*sizes, len(x) - sum(sizes)]
    return list(zip(x.split(cuts), y.split(cuts), strict=True))


def fitted(structure: Structure | str, subset: Any, curvature: str, task: str, **options: Any) -> Case:
    """Return a small fit of a structure in float64, with its references."""
    torch.manual_seed(0)
    model = Small(TASKS[task]).double()
    x, new = torch.randn(N, 6, dtype=torch.float64), torch.randn(NEW, 6, dtype=torch.float64)
    y = torch.randint(3, (N,)) if task == "classification" else torch.randn(N, 2, dtype=torch.float64)
    la = Laplace(model, task, subset, structure, curvature=curvature, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", LaplaceWarning)  # about tensors in a fallback form
        la.fit(parts_of(x, y, [4, 1, 2]), generator=torch.Generator().manual_seed(5))
    (run,) = la.runner.runs(la.posterior.fit, Inputs(new), whole=True)
    index = la.subnetwork_indices
    jac = jacobian(model, list(la.posterior.fit.layout.names), new)
    return Case(la, (x, y), run, jac if index is None else jac[..., index], index)


class StructureConformance:
    """Tests a structure of weights. A subclass returns the structure.

    Attributes:
        subsets: values of subset_of_weights that it is fitted with.
        curvatures: values of curvature that it is fitted with.
        tasks: some of 'classification' and 'regression'.
    """

    subsets: Sequence[str] = ("last_layer", "all")
    curvatures: Sequence[str] = ("ggn",)
    tasks: Sequence[str] = tuple(TASKS)

    def structure(self) -> Structure:
        """Return the structure under test, a new object each time."""
        raise NotImplementedError("write `def structure(self): return MyStructure()`")

    def expected_curvature(self, exact: Tensor, case: Case) -> Tensor | None:  # (P, P)
        """Return the H that should be kept, given the exact sum of J^T Lambda J. None skips the comparison."""
        return None

    def expected_precision(self, case: Case, prior: str) -> Tensor:  # (P, P)
        """Return s H + D. Override it for a structure that adds the prior in another way."""
        return SCALE * case.fit.curvature.matrix() + case.diagonal(prior).diag()

    def cases(self) -> Iterator[Case]:
        """Yield the fits that every test uses, made once per class."""
        kept = vars(type(self)).get("_cases")
        if kept is None:
            combined = itertools.product(self.subsets, self.curvatures, self.tasks)
            kept = [fitted(self.structure(), subset, curvature, task) for subset, curvature, task in combined]
            type(self)._cases = kept  # type: ignore[attr-defined]
        yield from kept

    def test_it_describes_itself(self) -> None:
        """Check that it has a name, describes what it keeps of each tensor, and counts its bytes."""
        for case in self.cases():
            structure, rows = case.fit.structure, list(case.la.coverage())
            assert structure.name
            assert structure.described.startswith(structure.name)
            assert len(rows) == len(case.fit.layout.names)
            assert all(row.kept for row in rows)
            total = sum(value.nbytes for value in case.fit.sums.values())
            assert abs(sum(row.bytes for row in rows) - total) <= len(rows)
            assert structure.described in repr(case.la)
            assert copy.deepcopy(structure).described == structure.described

    def test_the_curvature_is_what_it_should_be(self) -> None:
        """Check that H is symmetric, positive semi-definite, and equal to `expected_curvature`."""
        for case in self.cases():
            h = case.fit.curvature.matrix()
            close(h, h.T, what="H and its transpose")
            assert float(torch.linalg.eigvalsh(h).min()) > -1e-10 * float(h.diagonal().max())
            assert float(h.diagonal().max()) > 1e-4, "H is zero"
            diagonal = case.fit.curvature.as_diagonal()
            if diagonal is not None:
                close(diagonal.diag(), h, what="as_diagonal of the curvature")
            if case.la.curvature == "ggn":
                x, y = case.data
                lam = case.la.likelihood.fisher(case.la.model(x).detach(), y).dense()
                jac = case.jacobian_at(x)
                expected = self.expected_curvature(torch.einsum("ncp,ncd,ndq->pq", jac, lam, jac), case)
                if expected is not None:
                    close(h, expected, what="H")

    def test_the_precision_is_the_scaled_curvature_plus_the_prior(self) -> None:
        """Check precision = s H + D."""
        for case in self.cases():
            for prior, gaussian, precision, _ in case.gaussians():
                close(precision, self.expected_precision(case, prior), what=f"precision, {prior}")
                diagonal = gaussian.as_diagonal()
                if diagonal is not None:
                    close(diagonal.diag(), precision, what="as_diagonal of the precision")

    def test_the_covariance_is_the_inverse_of_the_precision(self) -> None:
        """Check the dense covariance, the marginal variances, and the scale if there is one."""
        for case in self.cases():
            for prior, gaussian, precision, covariance in case.gaussians():
                close(precision, precision.T, what=f"precision and its transpose, {prior}")
                close(gaussian.covariance_matrix(), covariance, what=f"covariance_matrix, {prior}")
                close(gaussian.marginal_variances(), covariance.diagonal(), what=f"marginal_variances, {prior}")
                scale = gaussian.scale()
                if scale is not None:
                    root = scale.diag() if scale.dim() == 1 else scale
                    close(root @ root.T, covariance, what=f"scale, {prior}")

    def test_the_log_determinant_is_the_precisions(self) -> None:
        """Check log det, in float64."""
        for case in self.cases():
            for prior, gaussian, precision, _ in case.gaussians():
                close(gaussian.logdet(), torch.logdet(precision), what=f"logdet, {prior}")
                assert gaussian.logdet().dtype == torch.float64

    def test_the_quadratic_form_is_the_precisions(self) -> None:
        """Check v^T precision v for one vector and for several."""
        for case in self.cases():
            for prior, gaussian, precision, _ in case.gaussians():
                torch.manual_seed(2)
                v = torch.randn(5, len(precision), dtype=torch.float64)
                close(gaussian.quadratic(v), ((v @ precision) * v).sum(-1), what=f"quadratic, {prior}")
                close(gaussian.quadratic(v[0]), v[0] @ precision @ v[0], what=f"quadratic of one vector, {prior}")

    def test_colour_is_a_root_of_the_covariance(self) -> None:
        """Check color(eps) = eps R with R^T R = covariance."""
        for case in self.cases():
            for prior, gaussian, _, covariance in case.gaussians():
                root = gaussian.color(torch.eye(len(covariance), dtype=torch.float64))
                close(root.T @ root, covariance, what=f"color, {prior}")
                torch.manual_seed(2)
                eps = torch.randn(6, len(covariance), dtype=torch.float64)
                close(gaussian.color(eps), eps @ root, what=f"color is linear, {prior}")

    def test_output_variances_are_those_of_the_jacobian(self) -> None:
        """Check diag(J Sigma J^T), J Sigma J^T and J Sigma J^T v of each example."""
        for case in self.cases():
            torch.manual_seed(2)
            v = torch.randn(case.jac.shape[:2], dtype=torch.float64)
            for prior, gaussian, _, covariance in case.gaussians():
                expected = case.jac @ covariance @ case.jac.mT
                for _ in range(4):  # a structure may keep results after the first call
                    close(gaussian.variance(case.engine), expected.diagonal(dim1=1, dim2=2), what=f"variance, {prior}")
                close(gaussian.covariance(case.engine), expected, what=f"covariance, {prior}")
                close(gaussian.dense_variance(case.jac), expected, what=f"dense_variance, {prior}")
                times = (expected @ v.unsqueeze(-1)).squeeze(-1)
                close(gaussian.product(case.engine, v), times, what=f"product, {prior}")

    def test_the_joint_covariance_is_that_of_all_rows_of_the_jacobian(self) -> None:
        """Check J Sigma J^T over all examples together."""
        for case in self.cases():
            rows, shape = case.jac.flatten(0, 1), (*case.jac.shape[:2], *case.jac.shape[:2])
            for prior, gaussian, _, covariance in case.gaussians():
                expected = rows @ covariance @ rows.T
                close(gaussian.joint(case.engine), expected.reshape(shape), what=f"joint, {prior}")
                close(gaussian.dense_variance(rows), expected, what=f"dense_variance of all rows, {prior}")

    def test_some_outputs_are_a_part_of_all(self) -> None:
        """Check that the Jacobian of chosen outputs gives the chosen variances."""
        for case in self.cases():
            index = torch.tensor([1, 0]) if case.jac.shape[1] == 2 else torch.tensor([2, 0])
            engine, jac = case.run.jacobian(index), case.jac[:, index]
            rows = jac.flatten(0, 1)
            for _, gaussian, _, covariance in case.gaussians():
                expected = jac @ covariance @ jac.mT
                close(gaussian.variance(engine), expected.diagonal(dim1=1, dim2=2), what="variance of some outputs")
                close(gaussian.covariance(engine), expected, what="covariance of some outputs")
                joint = gaussian.joint(engine).flatten(2).flatten(0, 1)
                close(joint, rows @ covariance @ rows.T, what="joint of some outputs")

    def test_a_sweep_gives_the_variances_of_each_gaussian(self) -> None:
        """Check `Curvature.sweep`, which tuning by validation uses."""
        for case in self.cases():
            for prior in case.fit.structure.prior_structures:
                gaussians = [case.gaussian(prior, scale) for scale in (0.1, 1.0, 30.0)]
                swept = list(case.fit.curvature.sweep(case.engine, gaussians))
                assert len(swept) == 3
                for gaussian, variance in zip(gaussians, swept, strict=True):
                    covariance = torch.linalg.inv(gaussian.precision_matrix())
                    expected = torch.einsum("ncp,pq,ncq->nc", case.jac, covariance, case.jac)
                    close(variance, expected, what=f"sweep, {prior}")

    def test_traces_are_those_of_the_covariances_blocks(self) -> None:
        """Check tr(Sigma_gg) and ||Sigma_gh||^2 in float64. Newton's method on the evidence uses them."""
        for case in self.cases():
            layout, able = case.fit.layout, case.fit.structure.prior_structures
            sizes = {"scalar": [layout.n_params], "layerwise": layout.sizes, "diag": [1] * layout.n_params}
            for (prior, gaussian, _, covariance), groups in itertools.product(case.gaussians(), able):
                t, m = gaussian.traces(groups)
                parts = [row.split(sizes[groups], 1) for row in covariance.split(sizes[groups])]
                squares = torch.stack([torch.stack([b.square().sum() for b in row]) for row in parts])
                expected = torch.stack([d.sum() for d in covariance.diagonal().split(sizes[groups])])
                close(t, expected, what=f"traces({groups!r}), {prior}")
                assert t.dtype == m.dtype == torch.float64
                if m.dim() == 1:  # the groups are independent
                    close(squares, squares.diagonal().diag(), what=f"groups {groups!r} are said to be independent")
                close(m, squares.diagonal() if m.dim() == 1 else squares, what=f"squares of {groups!r}, {prior}")

    def test_fits_on_two_halves_add_up_to_the_whole(self) -> None:
        """Check that sums of two halves add up, or that adding data is refused.

        Sums of inputs that are taken without asking `moments.first` fail here. Drawn curvature depends on the places of
        the examples in the data, which differ between a half and the whole.
        """
        for case in self.cases():
            (x, y), la = case.data, case.la
            if not case.fit.structure.adds:  # the sums depend on all data
                try:
                    la.fit(parts_of(x, y, [3]), override=False)
                except UnsupportedError:
                    continue
                raise AssertionError(f"override=False of {case.fit.structure.name} must be refused")

            def fit(batches: Any, generator: torch.Generator, la: Laplace = la) -> Fit:
                options = {"curvature": la.curvature, "subnetwork_indices": la.subnetwork_indices}
                other = Laplace(la.model, la.likelihood, la.subset_of_weights, la.structure, **options)  # type: ignore
                return other.fit(batches, generator=generator).posterior.fit

            with warnings.catch_warnings():
                warnings.simplefilter("ignore", LaplaceWarning)
                generator = torch.Generator().manual_seed(5)
                first = fit(parts_of(x[:5], y[:5], [3]), generator)
                second = fit(parts_of(x[5:], y[5:], [3]), generator)
            sums, whole = added(first.sums, second.sums), first.plus(second)
            assert whole.n_data == N
            expected = whole if la.runner.spec.estimator.draws else case.fit
            assert set(sums) == set(case.fit.sums)
            for key, value in expected.sums.items():
                close(sums[key], value, what=f"sums of {key}")
            close(whole.curvature.matrix(), expected.curvature.matrix(), what="H of two halves")

    def test_gradients_in_scale_and_prior_are_right(self) -> None:
        """Check the derivatives of logdet and output variances in s and D."""
        for case in self.cases():
            curvature, layout, mean = case.fit.curvature, case.fit.layout, case.fit.mean

            def gaussian(scale: Tensor, precision: Tensor, given: Any = (curvature, layout, mean)) -> Gaussian:
                blocks = GaussianPrior(precision, torch.tensor(0.0)).blocks(given[1], given[2])
                return given[0].gaussian(scale, blocks)

            for prior in case.fit.structure.prior_structures:
                torch.manual_seed(1)
                size = {"scalar": 1, "layerwise": len(layout.names), "diag": layout.n_params}[prior]
                precision = (torch.rand(size, dtype=torch.float64) + 0.4).requires_grad_()
                scale = torch.tensor(SCALE, dtype=torch.float64, requires_grad=True)
                assert torch.autograd.gradcheck(lambda s, d, g=gaussian: g(s, d).logdet(), (scale, precision))
                if prior != "diag":
                    engine = case.engine
                    assert torch.autograd.gradcheck(
                        lambda s, d, g=gaussian, j=engine: g(s, d).variance(j), (scale, precision)
                    )

    def test_the_evidence_is_its_formula(self) -> None:
        """Check log Z = log p(data) - 1/2 (scatter + log det) at a prior precision of 1."""
        for case in self.cases():
            posterior = case.la.posterior
            scatter = case.fit.mean.square().sum()
            logdet = torch.logdet(posterior.gaussian.precision_matrix())
            close(posterior.log_evidence, posterior.log_likelihood - 0.5 * (scatter + logdet), what="log evidence")

    def test_it_is_saved_and_loaded(self) -> None:
        """Check that a file gives back the same posterior on the same network."""
        for case in self.cases():
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / "posterior.safetensors"
                case.la.save(path)
                loaded = Laplace.load(path, case.la.model, hessian_structure=case.la.structure)
            tolerance = 0.0
            if case.fit.structure.rereads:
                loaded.attach_data(parts_of(*case.data, [4, 1, 2]))
                tolerance = 1e-10  # the data is read again, and may be added up in another order
            found, expected = (la.posterior.gaussian.precision_matrix() for la in (loaded, case.la))
            close(found, expected, tolerance, what="precision from a file")
            found, expected = (la.log_marginal_likelihood() for la in (loaded, case.la))
            close(found, expected, tolerance, what="evidence from a file")
