"""What goes wrong in laplace-torch 0.3, each by a test of ours named for the defect."""

from __future__ import annotations

import io

import pytest
import torch
from torch import nn

from laplace import Laplace
from laplace.errors import InputError, UnsupportedError
from networks import cut, make


def fitted(task="classification", **options):
    model, x, y = make("mlp", task)
    return Laplace(model, task, **options).fit(cut(x, y, 6)), x, y


@pytest.mark.filterwarnings("ignore::laplace.errors.BoundaryWarning")
def test_grid_search_scores_every_value_afresh():
    """The metric must not carry over from one grid value to the next: reversing the grid finds the same value."""
    la, x, y = fitted()
    seen = []

    class Metric:
        total = 0.0

        def reset(self):
            self.total = 0.0

        def update(self, p, y):
            self.total += float(-p.gather(1, y[:, None]).log().sum())

        def compute(self):
            seen.append(self.total)
            return self.total

    la.optimize_prior_precision(method="gridsearch", val_loader=cut(x, y, 6), loss=Metric(), grid_size=9)
    expected = []
    for value in torch.logspace(-4, 4, 9):
        la.prior_precision = value
        expected.append(float(-la(x).gather(1, y[:, None]).log().sum()))
    assert seen == pytest.approx(expected, rel=1e-6)


def test_grid_search_of_regression_depends_on_the_prior():
    """The score is the predictive likelihood; the mean alone would be the same for every prior."""
    scores = []
    la, x, y = fitted("regression")

    def loss(mean, variance, y):
        scores.append(float(variance.mean()))
        return variance.mean() - mean.mean()

    la.optimize_prior_precision(method="gridsearch", val_loader=[(x, y)], loss=loss, grid_size=5, log_prior_prec_max=8)
    assert len(set(scores)) == 5


def test_damping_does_something():
    plain, x, _ = fitted()
    damped, *_ = fitted(damping=True)
    assert not torch.allclose(plain(x), damped(x), atol=1e-4)


@pytest.mark.parametrize("how", [{"link_approx": "mc"}, {"pred_type": "nn"}])
def test_the_generator_is_honoured_by_a_call(how):
    la, x, _ = fitted()
    a, b = (la(x, generator=torch.Generator().manual_seed(7), **how) for _ in range(2))
    assert torch.equal(a, b)


def test_diagonal_output_never_builds_the_covariance():
    torch.manual_seed(0)
    model, x, y = nn.Linear(8, 2000), torch.randn(16, 8), torch.randn(16, 2000)
    la = Laplace(model, "regression").fit([(x, y)])
    la(x[:1], diagonal_output=True)
    shapes = []

    class Watch(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor):
                shapes.append(out.untyped_storage().nbytes())
            return out

    with Watch():
        assert la(x, diagonal_output=True)[1].shape == (16, 2000)
    assert max(shapes) < 16 * 2000 * 2000 * 4


@pytest.mark.parametrize("structure", ["full", "kron", "diag"])
def test_layerwise_priors_work_on_the_last_layer(structure):
    la, x, _ = fitted(hessian_structure=structure, prior_precision=torch.tensor([0.5, 3.0], dtype=torch.float64))
    assert la(x).isfinite().all()
    la.optimize_prior_precision(prior_structure="layerwise")
    assert la.prior_precision.shape == (2,)


@pytest.mark.parametrize("structure", ["full", "diag"])
def test_diagonal_priors_and_vector_means_work_on_subnetworks(structure):
    index = torch.arange(0, 59, 3)
    prior = {
        "prior_precision": torch.linspace(0.5, 3.0, len(index), dtype=torch.float64),
        "prior_mean": torch.linspace(-1.0, 1.0, len(index), dtype=torch.float64),
    }
    la, x, _ = fitted(subset_of_weights="subnetwork", subnetwork_indices=index, hessian_structure=structure, **prior)
    h = la.H if structure == "full" else la.H.diag()
    precision = h + prior["prior_precision"].diag()
    offset = la.mean - prior["prior_mean"]
    terms = (
        offset @ (prior["prior_precision"] * offset) + torch.logdet(precision) - prior["prior_precision"].log().sum()
    )
    torch.testing.assert_close(la.log_marginal_likelihood(), la.log_likelihood - 0.5 * terms)
    assert la(x).isfinite().all()
    la.prior_precision = torch.ones(la.n_layers)
    la.optimize_prior_precision(prior_structure="layerwise")
    assert la.prior_precision.shape == (4,)


def test_functional_samples_through_the_network_leave_the_weights_alone():
    la, x, _ = fitted()
    before = [p.clone() for p in la.model.parameters()]
    assert la.functional_samples(x, pred_type="nn", n_samples=5).shape == (5, 23, 3)
    assert all(torch.equal(a, b) for a, b in zip(before, la.model.parameters(), strict=True))


@pytest.mark.parametrize("sigma", [0.5, 2.0])
def test_empirical_fisher_of_regression_is_right_and_scales_with_sigma_to_the_minus_four(sigma):
    la, x, y = fitted("regression", hessian_structure="full", curvature="ef", sigma_noise=sigma)
    phi = torch.cat([torch.tanh(la.model[0](x)).detach(), torch.ones(23, 1, dtype=torch.float64)], 1)
    residual = (y - la.model(x)).detach() / sigma**2  # the score of N(y; f, sigma^2)
    weight = torch.einsum("nc,ni->nci", residual, phi[:, :7]).flatten(1)
    rows = torch.cat([weight, residual], 1)
    expected = rows.T @ rows + torch.eye(16, dtype=torch.float64)
    torch.testing.assert_close(la.posterior_precision, expected)


def test_pred_type_gp_on_weights_is_an_error():
    la, x, _ = fitted()
    with pytest.raises(UnsupportedError, match="'glm' or 'nn'"):
        la(x, pred_type="gp")


def test_one_logit_does_not_get_probability_one():
    with pytest.raises(InputError, match="Softmax of one logit is 1 everywhere"):
        Laplace(nn.Linear(4, 1), "classification").fit([(torch.randn(3, 4), torch.zeros(3, dtype=torch.long))])


def test_a_checkpoint_holds_no_training_data():
    model, x, y = make("mlp", "classification", n=100)
    la = Laplace(model, "classification").fit(cut(x, y, 50))
    buffer = io.BytesIO()
    torch.save(la.state_dict(), buffer)
    state = torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)
    for value in state.values():
        assert not isinstance(value, torch.Tensor) or value.numel() <= 64
    again = Laplace(model, "classification")
    again.load_state_dict(state)
    assert torch.equal(again(x), la(x))


def test_the_evidences_gradient_in_sigma_is_right_for_kron():
    la, *_ = fitted("regression")
    sigma = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(la.log_marginal_likelihood(sigma_noise=sigma), sigma)
    step = 1e-6
    up, down = (float(la.log_marginal_likelihood(sigma_noise=0.7 + d).detach()) for d in (step, -step))
    assert float(gradient) == pytest.approx((up - down) / (2 * step), rel=1e-7)


def test_drop_last_and_iterable_loaders_are_counted_right():
    la, x, y = fitted()
    assert la.n_data == 23
    assert Laplace(la.model, "classification").fit(batch for batch in cut(x, y, 10)[:2]).n_data == 20


def test_many_classes_just_work():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1500))
    x, y = torch.randn(40, 16), torch.randint(1500, (40,))
    la = Laplace(model, "classification").fit(cut(x, y, 20))
    la.optimize_prior_precision()
    for link in ("probit", "bridge", "mc"):
        assert la(x[:4], link_approx=link, n_samples=10).isfinite().all()


def test_gp_honours_new_noise_and_a_refit_counts_the_data_once():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, 1)).double()
    x, y = torch.randn(14, 2, dtype=torch.float64), torch.randn(14, 1, dtype=torch.float64)
    la = Laplace(model, "regression", "all", "gp").fit([(x, y)])
    before, loss = la(x)[1], la.loss
    la.sigma_noise = 0.3
    assert float((la(x)[1] - before).abs().max()) > 1e-3
    other = Laplace(model, "regression", "all", "gp", sigma_noise=0.3).fit([(x, y)])
    torch.testing.assert_close(la(x)[1], other(x)[1])
    la.fit([(x, y)])
    assert la.loss == pytest.approx(loss)
    torch.testing.assert_close(la(x)[1], other(x)[1])
