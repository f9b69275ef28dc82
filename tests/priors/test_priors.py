"""Posteriors under priors that are no independent Gaussians, against dense references in float64."""

from __future__ import annotations

import copy
import math
import warnings

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import oracle
from laplace import Laplace
from laplace.errors import InputError, LaplaceWarning, NumericalError, OptionError, UnsupportedError
from laplace.priors import (
    CorrelatedGaussian,
    GaussianPrior,
    Independent,
    Prior,
    SmoothedLaplace,
    StudentT,
    from_log_density,
)
from priors.reference import Reference, gaussian, smoothed_laplace, student_t

PER_WEIGHT = ["full", "block", "diag", "lowrank", "inf"]


class Case:
    """A small network on its data, and the dense ingredients of its posterior."""

    def __init__(self, task: str = "classification", subset: str = "last_layer", deep: bool = False) -> None:
        generator = torch.Generator().manual_seed(3)
        torch.manual_seed(0)
        hidden = [nn.Linear(4, 4), nn.Tanh()] if deep else []
        outputs = 3 if task == "classification" else 2
        self.model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), *hidden, nn.Linear(4, outputs)).double()
        self.x = torch.randn(30, 3, dtype=torch.float64, generator=generator)
        noise = torch.randn(30, 2, dtype=torch.float64, generator=generator)
        self.y = noise[:, 0].gt(0).long() + noise[:, 1].gt(0) if task == "classification" else noise
        self.task, self.subset = task, subset
        names = [name for name, _ in self.model.named_parameters()]
        self.names = names[-2:] if subset == "last_layer" else names
        parameters = dict(self.model.named_parameters())
        self.shapes = [tuple(parameters[name].shape) for name in self.names]
        self.sizes = [parameters[name].numel() for name in self.names]

    def fit(self, prior: Prior, structure: str = "full", **options: object) -> Laplace:
        la = Laplace(self.model, self.task, self.subset, structure, prior=prior, **options)
        return la.fit([(self.x[:20], self.y[:20]), (self.x[20:], self.y[20:])])

    def reference(self, log_density: object, structure: str = "full") -> Reference:
        """Of H as `structure` has it: dense, cut to blocks, or to its diagonal."""
        dense = oracle.fit(self.model, self.names, self.x, self.y, self.task, "full")
        if structure == "block":
            parts = [part.split(self.sizes, 1)[i] for i, part in enumerate(dense.h.split(self.sizes))]
            dense.h = torch.block_diag(*parts)
        elif structure == "diag":
            dense.h = dense.h.diagonal().diag()
        elif structure == "kron":
            dense.h = Laplace(self.model, self.task, self.subset, "kron").fit([(self.x, self.y)]).H.to_matrix()
        return Reference(dense, log_density)  # type: ignore[arg-type]


def same(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-7, atol=1e-9)


def agrees(la: Laplace, reference: Reference, sigma: float = 1.0, temperature: float = 1.0) -> None:
    """Everything that a posterior says, as the dense reference says it."""
    precision = reference.precision(sigma, temperature)
    covariance = torch.linalg.inv(precision)
    found = la.posterior_precision
    found = found if isinstance(found, Tensor) else found.to_matrix()
    same(found.diag() if found.dim() == 1 else found, precision)
    same(la.posterior_covariance, covariance)
    same(la.posterior_variance, covariance.diagonal())
    same(la.log_prior, reference.log_density(reference.fitted.mean))
    same(la.prior_precision_diag, reference.prior_precision.diagonal())
    same(la.log_marginal_likelihood(), reference.evidence(sigma, temperature))
    at = reference.fitted.mean + 0.1 * torch.arange(len(covariance), dtype=torch.float64).cos()
    normal = torch.distributions.MultivariateNormal(reference.fitted.mean, precision_matrix=precision)
    same(la.log_prob(at), normal.log_prob(at))
    draws = la.sample(4000, generator=torch.Generator().manual_seed(0)) - la.mean
    spread = draws.T @ draws / len(draws)
    wide = covariance.diagonal().sqrt()
    assert ((spread - covariance) / torch.outer(wide, wide)).abs().max() < 0.12


class Logistic(Independent):
    """Independent logistic weights, whose curvature autograd finds."""

    name = "logistic"

    def __init__(self, scale: Tensor | float = 1.0, mean: Tensor | float = 0.0) -> None:
        super().__init__({"scale": scale}, mean)

    def log_each(self, u: Tensor, **values: Tensor) -> Tensor:
        u = u / values["scale"]
        return -u - 2 * nn.functional.softplus(-u) - values["scale"].log()


PRIORS = {
    "student-t": (lambda: StudentT(4.0, 1.5), lambda case: student_t(case.sizes, 4.0, 1.5)),
    "student-t around 0.1": (lambda: StudentT(4.0, 1.5, 0.1), lambda case: student_t(case.sizes, 4.0, 1.5, 0.1)),
    "laplace": (lambda: SmoothedLaplace(0.3, 0.2), lambda case: smoothed_laplace(case.sizes, 0.3, 0.2)),
    "own class": (
        lambda: Logistic(0.4),
        lambda case: lambda theta: _logistic(theta, torch.tensor(0.4, dtype=torch.float64)),
    ),
    "own": (
        lambda: from_log_density(_logistic, independent="weights", scale=0.4),
        lambda case: lambda theta: _logistic(theta, torch.tensor(0.4, dtype=torch.float64)),
    ),
}


def _logistic(theta: Tensor, scale: Tensor) -> Tensor:
    """Independent logistic weights."""
    u = theta / scale
    return (-u - 2 * nn.functional.softplus(-u) - scale.log()).sum()


def _coupled(weights: dict[str, Tensor], width: Tensor) -> Tensor:
    """Weights that share their size, tensors that pull on each other."""
    flat = torch.cat([part.flatten() for part in weights.values()])
    return -0.5 * flat.square().sum() / width - 0.1 * flat.sum() ** 2 - 0.01 * flat.square().sum() ** 2


@pytest.mark.parametrize("task", ["classification", "regression"])
@pytest.mark.parametrize("subset", ["last_layer", "all"])
@pytest.mark.parametrize("structure", ["full", "block", "diag"])
@pytest.mark.parametrize("kind", PRIORS)
def test_posterior_and_evidence_are_those_of_the_definition(kind, structure, subset, task):
    make, density = PRIORS[kind]
    case = Case(task, subset)
    options = {"sigma_noise": 0.7} if task == "regression" else {}
    la = case.fit(make(), structure, temperature=0.8, **options)
    agrees(la, case.reference(density(case), structure), 0.7 if options else 1.0, 0.8)


@pytest.mark.parametrize("structure", PER_WEIGHT)
def test_predictions_take_the_prior_as_the_dense_posterior_does(structure):
    case = Case("regression", deep=True)
    options = {"lowrank": {"rank": 10}, "inf": {"rank": 4}}.get(structure, {})
    la = case.fit(SmoothedLaplace(0.3, 0.2), structure, **options)
    with torch.no_grad():
        mean, covariance = la(case.x)
    jac = oracle.jacobian(case.model, case.names, case.x)
    same(mean, case.model(case.x).detach())
    same(covariance, jac @ la.posterior_covariance @ jac.mT)
    if structure in ("full", "lowrank"):  # of rank 10 of 10
        same(la.posterior_covariance, case.fit(SmoothedLaplace(0.3, 0.2)).posterior_covariance)


def test_hyperparameters_per_tensor_belong_to_their_tensors():
    case = Case(subset="all")
    scales = [0.5, 1.0, 1.5, 2.0]
    la = case.fit(StudentT(torch.tensor([3.0, 4.0, 5.0, 6.0]), torch.tensor(scales)))
    agrees(la, case.reference(student_t(case.sizes, [3.0, 4.0, 5.0, 6.0], scales)))


def test_a_student_t_of_many_degrees_of_freedom_is_the_gaussian():
    case = Case(subset="all")
    la, exact = case.fit(StudentT(1e9, 0.5)), case.fit(GaussianPrior(4.0, 0.0))
    torch.testing.assert_close(la.posterior_covariance, exact.posterior_covariance, rtol=1e-6, atol=1e-9)
    assert float(la.log_marginal_likelihood()) == pytest.approx(float(exact.log_marginal_likelihood()), rel=1e-6)


def test_a_gaussian_prior_as_an_object_is_prior_precision():
    case = Case(subset="all")
    la, plain = case.fit(GaussianPrior(4.0, 0.1)), Laplace(case.model, case.task, "all", "full", prior_precision=4.0)
    plain.prior_mean = 0.1
    plain.fit([(case.x, case.y)])
    same(la.log_marginal_likelihood(), plain.log_marginal_likelihood())
    assert float(la.prior_precision) == 4.0
    dense = torch.full((sum(case.sizes),), 4.0, dtype=torch.float64).diag()
    same(la.log_prior, gaussian(dense, 0.1)(la.mean))
    agrees(la, case.reference(gaussian(dense, 0.1)))


def test_curvature_in_the_tails_is_set_to_zero_and_said_once():
    case = Case(subset="all")
    la = case.fit(StudentT(2.0, 0.2))
    with pytest.warns(LaplaceWarning, match="negative eigenvalues"):
        la.log_marginal_likelihood()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        agrees(la, case.reference(student_t(case.sizes, 2.0, 0.2)))
        la.prior = StudentT(2.0, 0.21)
        la.log_marginal_likelihood()
    diagonal = case.reference(student_t(case.sizes, 2.0, 0.21)).hessian.diagonal()
    assert la.prior_clipped.count == int((diagonal < 0).sum()) > 0
    lowest = min(float(d.min() / d.abs().max()) for d in diagonal.split(case.sizes))
    assert la.prior_clipped.lowest == pytest.approx(lowest)
    assert case.fit(SmoothedLaplace(0.3)).prior_clipped.count == 0


def test_weights_that_neither_prior_nor_data_holds_are_refused():
    case = Case()
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)).double()
    model[0].bias.data.fill_(-100.0)  # every unit is dead
    la = Laplace(model, "classification", "last_layer", "diag", prior=StudentT(1.0, 1e-3))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        la.fit([(case.x, case.y.clamp(max=1))])
        with pytest.raises(NumericalError, match="not positive definite"):
            la.log_marginal_likelihood()


@pytest.mark.parametrize("task", ["classification", "regression"])
def test_a_density_that_couples_all_weights_is_taken_whole(task):
    case = Case(task, "all")
    la = case.fit(from_log_density(_coupled, by_name=True, width=0.5))
    width = torch.tensor(0.5, dtype=torch.float64)

    def density(theta: Tensor) -> Tensor:
        parts = zip(case.names, theta.split(case.sizes), strict=True)
        return _coupled(dict(parts), width)

    agrees(la, case.reference(density))


@pytest.mark.parametrize("structure", ["full", "block"])
def test_a_density_of_independent_tensors_has_a_matrix_each(structure):
    case = Case(subset="all")

    def density(weights: dict[str, Tensor]) -> Tensor:
        return -torch.stack([w.square().sum() + 0.3 * w.sum() ** 2 for w in weights.values()]).sum()

    la = case.fit(from_log_density(density, independent="tensors", by_name=True), structure)
    flat = lambda theta: density(dict(zip(case.names, theta.split(case.sizes), strict=True)))  # noqa: E731
    agrees(la, case.reference(flat, structure))


def spd(size: int, seed: int) -> Tensor:
    root = torch.randn(size, size + 2, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return root @ root.T / size + 0.1 * torch.eye(size, dtype=torch.float64)


def correlated(case: Case) -> tuple[dict[str, object], list[Tensor]]:
    """A pair of matrices for each weight, one for each bias but the first; and what they are, written out."""
    given: dict[str, object] = {}
    written = []
    for number, (name, shape) in enumerate(zip(case.names, case.shapes, strict=True)):
        sides = [spd(side, 10 * number + k) for k, side in enumerate(shape)]
        if number == 1:
            written.append(torch.eye(shape[0], dtype=torch.float64))
            continue
        given[name] = tuple(sides) if len(sides) == 2 else sides[0]
        written.append(torch.kron(*sides) if len(sides) == 2 else sides[0])
    return given, written


@pytest.mark.parametrize("task", ["classification", "regression"])
@pytest.mark.parametrize("subset", ["last_layer", "all"])
@pytest.mark.parametrize("structure", ["kron", "full", "block"])
def test_a_kronecker_precision_is_added_exactly(structure, subset, task):
    case = Case(task, subset)
    given, written = correlated(case)
    strengths = torch.linspace(0.5, 2.0, len(written), dtype=torch.float64)
    la = case.fit(CorrelatedGaussian(given, strengths, mean=0.1), structure)
    blocks = [d * k for d, k in zip(strengths, written, strict=True)]
    agrees(la, case.reference(gaussian(torch.block_diag(*blocks), 0.1), structure))
    if task == "regression":
        jac = oracle.jacobian(case.model, case.names, case.x)
        same(la(case.x)[1], jac @ la.posterior_covariance @ jac.mT)


class Images(nn.Module):
    """Weights whose rows are inputs (transposed), and outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.conv = nn.ConvTranspose2d(2, 3, 2), nn.Conv2d(3, 2, 2)
        self.head = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.conv(self.up(x.reshape(-1, 2, 2, 2)).tanh()).flatten(1))


class Words(nn.Module):
    """A table, of whose input factor only the diagonal is kept."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(5, 3), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.table(x[:, :2].abs().mul(2).long().clamp(max=4)).flatten(1))


@pytest.mark.parametrize("network", [Images, Words])
def test_a_kronecker_precision_of_any_layer_is_over_its_rows_and_the_rest(network):
    torch.manual_seed(0)
    model, x, y = network().double(), torch.randn(20, 8, dtype=torch.float64), torch.randn(20, 2, dtype=torch.float64)
    given: dict[str, object] = {}
    written = []
    for number, (name, p) in enumerate(model.named_parameters()):
        sides = [spd(side, number + k) for k, side in enumerate((len(p), p[0].numel() if p.dim() > 1 else 1))]
        given[name] = (sides[0], sides[1])
        written.append(0.7 * torch.kron(*sides))
    la = Laplace(model, "regression", "all", "kron", prior=CorrelatedGaussian(given, 0.7)).fit([(x, y)])
    precision = la.H.to_matrix() + torch.block_diag(*written)
    same(la.posterior_precision.to_matrix(), precision)
    same(la.posterior_covariance, torch.linalg.inv(precision))
    same(la.log_det_posterior_precision, torch.logdet(precision))
    jac = oracle.jacobian(model, list(given), x)
    same(la(x)[1], jac @ torch.linalg.inv(precision) @ jac.mT)


def test_a_kronecker_precision_of_a_grouped_convolution_is_refused():
    model = nn.Sequential(nn.Unflatten(1, (2, 2, 2)), nn.Conv2d(2, 2, 2, groups=2), nn.Flatten()).double()
    prior = CorrelatedGaussian({"1.weight": (spd(2, 0), spd(4, 0))})
    x, y = torch.randn(5, 8, dtype=torch.float64), torch.randn(5, 2, dtype=torch.float64)
    with pytest.raises(UnsupportedError, match="2 groups"):
        _ = Laplace(model, "regression", "all", "kron", prior=prior).fit([(x, y)]).posterior_variance


@pytest.mark.parametrize("structure", ["full", "block"])
def test_a_dense_precision_is_added_exactly(structure):
    case = Case("regression", "all")
    k = spd(12, 1)
    la = case.fit(CorrelatedGaussian({"0.weight": k}, 2.0), structure)
    rest = torch.eye(sum(case.sizes[1:]), dtype=torch.float64)
    agrees(la, case.reference(gaussian(2.0 * torch.block_diag(k, rest)), structure))


def test_the_normaliser_of_the_smoothed_laplace_is_that_of_its_density():
    for scale, smoothing in [(1.0, 0.01), (0.1, 0.5), (0.02, 3.0), (5.0, 1e-6)]:
        w = torch.linspace(-30, 30, 2_000_001, dtype=torch.float64).sinh() * 1e-7
        values = SmoothedLaplace(scale, smoothing).log_each(
            w, **{k: torch.tensor(v, dtype=torch.float64) for k, v in (("scale", scale), ("smoothing", smoothing))}
        )
        assert float(torch.trapezoid(values.exp(), w)) == pytest.approx(1.0, abs=1e-6)


def test_the_log_density_is_twice_differentiable_in_its_hyperparameters():
    case = Case()
    layout = case.fit(StudentT()).posterior.fit.layout
    theta = torch.linspace(-1, 1, sum(case.sizes), dtype=torch.float64)
    for prior, names in ((StudentT(3.0, 0.5), ("df", "scale")), (SmoothedLaplace(0.3, 0.2), ("scale", "smoothing"))):

        def density(a: Tensor, b: Tensor, prior: Prior = prior, names: tuple[str, str] = names) -> Tensor:
            return prior.with_hyperparameters(**dict(zip(names, (a, b), strict=True))).log_density(theta, layout)

        at = [prior.hyperparameters[name].clone().requires_grad_() for name in names]
        assert torch.autograd.gradcheck(density, at)
        assert torch.autograd.gradgradcheck(density, at)


REFUSED = [
    (StudentT(), "kron", UnsupportedError, "'full', 'diag', 'block', 'inf' or 'lowrank'"),
    (StudentT(), "ekfac", UnsupportedError, "a precision per weight"),
    (StudentT(), "gp", UnsupportedError, "a precision per weight"),
    (from_log_density(_logistic, scale=1.0), "block", UnsupportedError, "hessian_structure='full'"),
    (from_log_density(_logistic, independent="tensors", scale=1.0), "diag", UnsupportedError, "'full' or 'block'"),
    (CorrelatedGaussian({"2.weight": spd(12, 0)}), "kron", UnsupportedError, "'full' or 'block'"),
    (CorrelatedGaussian({"2.weight": (spd(3, 0), spd(4, 0))}), "diag", UnsupportedError, "'full', 'kron' or 'block'"),
    (CorrelatedGaussian({"2.weight": (spd(3, 0), spd(4, 0))}), "ekfac", UnsupportedError, "'full', 'kron' or 'block'"),
    (CorrelatedGaussian({"2.weight": (spd(4, 0), spd(3, 0))}), "full", OptionError, r"a pair \(3, 3\) and \(4, 4\)"),
    (
        CorrelatedGaussian({"bias": spd(3, 0)}),
        "full",
        OptionError,
        "not an uncertain tensor. These are: 2.weight, 2.bias",
    ),
    (StudentT(torch.ones(5)), "full", OptionError, "allowed are 1 or 2"),
    (StudentT(mean=torch.ones(5)), "full", OptionError, "allowed are 1 or 15"),
    (CorrelatedGaussian({}, torch.ones(5)), "full", OptionError, "allowed are 1 or 2"),
]


@pytest.mark.parametrize(("prior", "structure", "error", "words"), REFUSED)
def test_what_a_structure_cannot_take_is_refused_with_those_that_can(prior, structure, error, words):
    with pytest.raises(error, match=words):
        Case().fit(prior, structure)


def test_what_is_known_before_the_data_is_refused_before_it():
    model = Case().model
    for prior in (StudentT(), from_log_density(_logistic, scale=1.0)):
        with pytest.raises(UnsupportedError, match="which this hessian_structure does not accept"):
            Laplace(model, "classification", prior=prior)
    la = Laplace(model, "classification")
    with pytest.raises(UnsupportedError, match="Take hessian_structure='full'"):
        la.prior = SmoothedLaplace()


def test_some_weights_of_tensors_have_the_prior_of_those_weights():
    case = Case(subset="all")
    index = torch.tensor([0, 3, 5, 12, 17, 20, 30])
    la = Laplace(case.model, case.task, "subnetwork", "full", subnetwork_indices=index, prior=StudentT(4.0, 1.5))
    la.fit([(case.x, case.y)])
    whole = case.reference(student_t(case.sizes, 4.0, 1.5))
    same(la.posterior_precision, whole.precision()[index][:, index])
    same(la.log_prior, student_t([7], 4.0, 1.5)(whole.fitted.mean[index]))


def test_a_damped_kron_refuses_a_kronecker_precision():
    with pytest.raises(UnsupportedError, match="damping"):
        Case().fit(CorrelatedGaussian({"2.bias": spd(3, 0)}), "kron", damping=True)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: StudentT(df=-1.0), "df must be positive"),
        (lambda: StudentT(scale=0.0), "scale must be positive"),
        (lambda: StudentT(scale=torch.ones(2, 2)), "one number, or a vector"),
        (lambda: SmoothedLaplace(smoothing=math.nan), "smoothing holds NaN"),
        (lambda: StudentT().with_hyperparameters(width=1.0), "no hyperparameter 'width'. It has: 'df', 'scale'"),
        (lambda: CorrelatedGaussian({"a": -torch.eye(2)}), "not positive definite"),
        (lambda: CorrelatedGaussian({"a": torch.tensor([[2.0, 1.0], [0.0, 2.0]])}), "not symmetric"),
        (lambda: CorrelatedGaussian({"a": torch.ones(3)}), "square"),
        (lambda: CorrelatedGaussian(torch.eye(2)), "a mapping"),
        (lambda: CorrelatedGaussian({"a": (torch.eye(2),) * 3}), "a pair of matrices"),
        (lambda: from_log_density(3), "a function is needed"),
        (lambda: from_log_density(_logistic, independent="rows"), "Valid: 'weights', 'tensors', 'nothing'"),
        (lambda: from_log_density(_logistic, scale=-1.0), "scale must be positive"),
        (lambda: from_log_density(_logistic, unrestricted=["shift"], scale=1.0), "no hyperparameter 'shift'"),
        (lambda: Case().fit(StudentT), "is a class"),
        (lambda: Case().fit("student_t"), "Give a prior of laplace.priors"),
        (lambda: Case().fit(StudentT(), prior_precision=2.0), "leave prior_precision"),
    ],
)
def test_values_that_no_prior_has_are_refused(make, words):
    with pytest.raises(OptionError, match=words):
        make()


def test_functions_that_are_no_log_density_are_refused():
    for fn, words in [
        (lambda w: w, "it must return one number"),
        (lambda w: -w.square().sum() * math.inf, "returned -inf"),
        (lambda w: w @ torch.eye(2, dtype=torch.float64) @ w, "failed with weights"),
        (lambda w: 3.0, "returned a float"),
    ]:
        with pytest.raises(InputError, match=words):
            _ = Case().fit(from_log_density(fn)).posterior_variance


@pytest.mark.parametrize(
    "coupling",
    [
        lambda w: w.sum() ** 2,
        lambda w: (w[::2].sum()) ** 2,  # no weight with its neighbour
        lambda w: w[0] * w[2],
        lambda w: (w[:-4] * w[4:]).sum(),
        lambda w: (1 + w.reshape(-1, 1)[:8].reshape(2, 4).square().sum(0)).sqrt().sum(),  # columns of a matrix
    ],
)
def test_a_density_that_couples_weights_is_not_taken_for_independent(coupling):
    def log_p(w):
        return -w.square().sum() - 0.1 * coupling(w)

    with pytest.raises(OptionError, match="not a sum over independent weights"):
        _ = Case().fit(from_log_density(log_p, independent="weights"), "diag").posterior_variance
    assert Case().fit(from_log_density(log_p)).posterior_variance.isfinite().all()

    class Coupled(Independent):
        name = "coupled"

        def __init__(self):
            super().__init__({}, 0.0)

        def log_each(self, u):
            return -u.square() - 0.1 * (coupling(u) if len(u) > 7 else 0.0) / len(u)

    with pytest.raises(OptionError, match=r"Coupled\.log_each couples weights.*from_log_density"):
        _ = Case().fit(Coupled(), "diag").posterior_variance


def test_rounding_where_second_derivatives_vanish_is_no_coupling():
    class Sharp(Independent):
        name = "sharp"

        def __init__(self, scale=1.0):
            super().__init__({"scale": scale}, 0.1)

        def log_each(self, u, **values):
            return -u.square().sqrt() / values["scale"] - values["scale"].log()

    class Closed(Sharp):
        def bend_each(self, u, **values):
            return torch.zeros_like(u)

    whole = from_log_density(lambda w: -(w - 0.1).square().sqrt().sum(), independent="weights")
    for prior in (Sharp(), Sharp(1e-3), Closed(), whole):
        assert float(Case().fit(prior, "diag").prior_precision_diag.max()) < 1e-6


def test_a_density_in_place_of_that_of_a_student_t_is_not_given_its_curvature():
    class Narrow(StudentT):
        def log_each(self, u, **values):
            return super().log_each(u, **values) - 5 * u.square()

    with pytest.raises(OptionError, match=r"Narrow\.bend_each is .*bend_each = Independent\.bend_each"):
        _ = Case().fit(Narrow(), "diag").posterior_variance
    Narrow.bend_each = Independent.bend_each
    la, usual = Case().fit(Narrow(), "diag"), Case().fit(StudentT(), "diag")
    torch.testing.assert_close(la.prior_precision_diag, usual.prior_precision_diag + 10)


def test_a_gaussian_has_defaults_like_the_keywords_and_is_equal_to_one_with_the_same_values():
    assert repr(GaussianPrior()) == "GaussianPrior(precision=1, mean=0)"
    assert GaussianPrior(3.0) == GaussianPrior(torch.tensor(3.0), torch.tensor(0.0))
    each = GaussianPrior(torch.tensor([1.0, 2.0]))
    assert each == GaussianPrior([1.0, 2.0]) != GaussianPrior([1.0, 3.0])
    assert each != GaussianPrior([1.0, 2.0], 0.1)
    assert GaussianPrior(2.0) != StudentT(2.0)
    assert len({each, GaussianPrior([1.0, 2.0])}) <= 2


@pytest.mark.parametrize("kept", [np.arange(3.0), [torch.arange(3.0)], {"by": (torch.arange(3.0), "name")}])
def test_priors_of_ones_own_are_compared_by_whatever_they_keep(kept):
    class Keeping(StudentT):
        def __init__(self, kept):
            super().__init__()
            self.kept = kept

    assert Keeping(kept) == Keeping(copy.deepcopy(kept))
    assert Keeping(kept) != Keeping(2.0)
    assert Keeping(2.0) != Keeping(kept)


def test_what_is_of_gaussian_priors_says_what_there_is_instead():
    la = Case().fit(StudentT(4.0, 1.5))
    for read in (
        lambda: setattr(la, "prior_precision", 2.0),
        lambda: la.scatter,
        lambda: la.log_det_prior_precision,
        lambda: la.log_det_ratio,
        lambda: la.log_marginal_likelihood(prior_precision=2.0),
    ):
        with pytest.raises(UnsupportedError, match=r"la\.prior_precision_diag"):
            read()
    with pytest.raises(UnsupportedError, match="on the first task"):
        la.as_prior()
    assert {name: float(value) for name, value in la.prior.hyperparameters.items()} == {"df": 4.0, "scale": 1.5}
    assert "StudentT(df=4, scale=1.5)" in repr(la)
    assert la.prior_precision is None
    assert Case().fit(from_log_density(_logistic, scale=1.0)).prior_mean is None


def test_setting_another_prior_needs_no_refit():
    case = Case()
    la = case.fit(StudentT(4.0, 1.5))
    before = la.log_marginal_likelihood()
    la.prior = SmoothedLaplace(0.3, 0.2)
    same(la.log_marginal_likelihood(), case.fit(SmoothedLaplace(0.3, 0.2)).log_marginal_likelihood())
    la.prior = StudentT(4.0, 1.5)
    same(la.log_marginal_likelihood(), before)
    la.prior_mean = 0.5
    same(la.log_marginal_likelihood(), case.fit(StudentT(4.0, 1.5, 0.5)).log_marginal_likelihood())
    with pytest.raises(OptionError, match="allowed are 1 or 2"):
        la.prior = StudentT(torch.ones(5))


class Halved(StudentT):
    """Half of the curvature that its density has."""

    def bend_each(self, u: Tensor, **values: Tensor) -> Tensor:
        return super().bend_each(u, **values) / 2


class Summed(StudentT):
    def log_each(self, u: Tensor, **values: Tensor) -> Tensor:
        return super().log_each(u, **values).sum()


class Alike(StudentT):
    def bend_each(self, u: Tensor, **values: Tensor) -> Tensor:
        return values["scale"] ** -2


def test_a_curvature_that_is_not_that_of_its_density_is_refused():
    words = r"Halved.bend_each is 0\.\d+ at u = .*; -d2 log_each / du2 is 0\.\d+ there. Leave out bend_each"
    with pytest.raises(OptionError, match=words):
        _ = Case().fit(Halved(4.0, 1.5)).posterior_variance
    for wrong, words in [
        (Summed, r"Summed.log_each returned shape \(\) for u of shape \(12,\)"),
        (Alike, "Alike.bend_each"),
    ]:
        with pytest.raises(OptionError, match=words):
            _ = Case().fit(wrong(4.0, 1.5)).log_marginal_likelihood()


@pytest.mark.parametrize("prior", [StudentT(4.0, 1.5), SmoothedLaplace(0.3, 0.2)])
def test_curvatures_in_closed_form_are_those_of_autograd(prior):
    u = torch.linspace(-4, 4, 101, dtype=torch.float64)
    same(prior.bend_each(u, **prior.hyperparameters), Independent.bend_each(prior, u, **prior.hyperparameters))
    with torch.inference_mode():
        same(Independent.bend_each(prior, u, **prior.hyperparameters), prior.bend_each(u, **prior.hyperparameters))


def test_a_log_each_without_second_derivatives_at_the_weights_is_refused():
    class Kinked(Independent):
        name = "kinked"

        def __init__(self):
            super().__init__({}, 0.0)

        def log_each(self, u):
            return -u.square().sqrt()  # NaN at zero, for autograd

    case = Case()
    nn.init.zeros_(case.model[-1].bias)
    with pytest.raises(InputError, match=r"the second derivative of Kinked\(\) is NaN or infinite .* bend_each"):
        _ = case.fit(Kinked(), "diag").posterior_variance
