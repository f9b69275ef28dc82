"""The calls that users of laplace-torch know, with the same names, shapes and meaning."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import laplace
from laplace import HessianStructure, Laplace, LinkApprox, PredType
from laplace.compat import enums
from networks import cut, make


def test_shapes_of_regression():
    model, x, y = make("mlp", "regression")
    la = Laplace(model, "regression").fit(cut(x, y, 6))
    n, c = 23, 2
    assert [t.shape for t in la(x)] == [(n, c), (n, c, c)]
    assert [t.shape for t in la(x, diagonal_output=True)] == [(n, c), (n, c)]
    assert [t.shape for t in la(x, joint=True)] == [(n * c,), (n * c, n * c)]
    assert [t.shape for t in la(x, pred_type="nn")] == [(n, c), (n, c)]
    assert la.predictive_samples(x, n_samples=5).shape == (5, n, c)
    assert la.functional_samples(x, n_samples=5, diagonal_output=True).shape == (5, n, c)
    assert la.sample(5).shape == (5, la.n_params)


def test_shapes_of_classification():
    model, x, y = make("mlp", "classification")
    la = Laplace(model, "classification").fit(cut(x, y, 6))
    for link in ("probit", "mc", "bridge", "bridge_norm", "delta"):
        for diagonal in (False, True):
            p = la(x, link_approx=link, diagonal_output=diagonal)
            assert p.shape == (23, 3)
            torch.testing.assert_close(p.sum(-1), torch.ones(23, dtype=torch.float64))
    assert la(x, pred_type="nn").shape == (23, 3)
    samples = la.predictive_samples(x, "nn", 7)
    assert samples.shape == (7, 23, 3)
    torch.testing.assert_close(samples.sum(-1), torch.ones(7, 23, dtype=torch.float64))


def test_posterior_precision_has_each_structures_form():
    model, x, y = make("mlp", "classification")
    for structure, shape in (("full", (24, 24)), ("diag", (24,))):
        la = Laplace(model, "classification", hessian_structure=structure).fit(cut(x, y, 6))
        assert la.posterior_precision.shape == la.H.shape == shape
        assert la.posterior_scale.shape == shape
        scale = la.posterior_scale
        covariance = scale @ scale.T if structure == "full" else scale.square().diag()
        torch.testing.assert_close(covariance, la.posterior_covariance)
    kron = Laplace(model, "classification").fit(cut(x, y, 6))
    assert kron.posterior_precision.to_matrix().shape == (24, 24)
    torch.testing.assert_close(kron.posterior_precision.logdet(), kron.log_det_posterior_precision)
    assert "2 blocks, 24 weights" in repr(kron.posterior_precision)


def test_enums_are_strings_and_are_accepted():
    model, x, y = make("mlp", "classification")
    la = Laplace(model, enums.Likelihood.CLASSIFICATION, hessian_structure=HessianStructure.DIAG).fit(cut(x, y, 6))
    assert HessianStructure.DIAG == "diag"
    torch.testing.assert_close(
        la(x, pred_type=PredType.GLM, link_approx=LinkApprox.BRIDGE), la(x, link_approx="bridge")
    )
    la.optimize_prior_precision(method=laplace.TuningMethod.MARGLIK, prior_structure=laplace.PriorStructure.LAYERWISE)
    assert la.prior_precision.shape == (2,)


def test_likelihood_objects_and_names_are_the_same():
    for task, likelihood in (("classification", laplace.Categorical()), ("regression", laplace.Gaussian())):
        model, x, y = make("mlp", task)
        by_name = Laplace(model, task).fit(cut(x, y, 6)).log_marginal_likelihood()
        torch.testing.assert_close(Laplace(model, likelihood).fit(cut(x, y, 6)).log_marginal_likelihood(), by_name)


@pytest.mark.parametrize(
    ("backend", "kwargs", "kind"),
    [("CurvlinopsGGN", None, "ggn"), ("AsdlEF", None, "ef"), ("CurvlinopsGGN", {"stochastic": True}, "mc")],
)
def test_a_backend_class_says_which_curvature(backend, kwargs, kind):
    model, *_ = make("mlp", "classification")
    assert Laplace(model, "classification", backend=type(backend, (), {}), backend_kwargs=kwargs).curvature == kind


def test_marglik_is_another_name_and_given_values_are_kept():
    model, x, y = make("mlp", "regression")
    la = Laplace(model, "regression").fit(cut(x, y, 6))
    value = la.marglik(prior_precision=torch.tensor(2.0), sigma_noise=torch.tensor(0.4))
    assert float(la.prior_precision) == 2
    assert float(la.sigma_noise) == pytest.approx(0.4)
    torch.testing.assert_close(la.log_marginal_likelihood(), value)
    terms = la.log_likelihood - 0.5 * (la.scatter + la.log_det_ratio)
    torch.testing.assert_close(terms, value)


def test_loss_is_the_summed_training_loss():
    model, x, y = make("mlp", "regression")
    la = Laplace(model, "regression").fit(cut(x, y, 6))
    assert la.loss == pytest.approx(0.5 * float(nn.functional.mse_loss(model(x), y, reduction="sum")))
    model, x, y = make("mlp", "classification")
    la = Laplace(model, "classification").fit(cut(x, y, 6))
    assert la.loss == pytest.approx(float(nn.functional.cross_entropy(model(x), y, reduction="sum")))


class OneMapping(nn.Module):
    """Takes the whole batch, as wrappers of Hugging Face models for laplace-torch do."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 3)

    def forward(self, data):
        return self.fc(data["input_ids"] * data["mask"])


class Keywords(OneMapping):
    """Takes the mapping's entries by name and returns an object with logits, as Hugging Face models do."""

    def forward(self, input_ids=None, mask=None, labels=None):
        assert labels is None
        return type("Output", (), {"logits": self.fc(input_ids * mask)})()


@pytest.mark.parametrize("network", [OneMapping, Keywords])
def test_batches_may_be_mappings(network):
    torch.manual_seed(0)
    model = network().double()
    x, mask, y = torch.randn(9, 4).double(), torch.ones(9, 4).double(), torch.randint(3, (9,))
    batches = [{"input_ids": x[i : i + 4], "mask": mask[i : i + 4], "labels": y[i : i + 4]} for i in (0, 4, 8)]
    la = Laplace(model, "classification").fit(batches)
    plain = Laplace(nn.Sequential(model.fc), "classification").fit(cut(x, y, 4))
    torch.testing.assert_close(la.log_marginal_likelihood(), plain.log_marginal_likelihood())
    new = {"input_ids": x, "mask": mask}
    torch.testing.assert_close(la(new), plain(x))
    torch.testing.assert_close(la.predict(new, link_approx="probit").mean, plain(x))
    torch.testing.assert_close(la.predict(iter(batches), link_approx="probit").mean, plain(x))
    other = Laplace(model, "classification", dict_key_y="target")
    other.fit([{"input_ids": x, "mask": mask, "target": y}])
    torch.testing.assert_close(other(new), plain(x))


def test_several_inputs_and_model_kwargs_are_passed_on():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 3)

        def forward(self, a, b, scale=1.0):
            return self.fc(scale * (a + b))

    model = Two().double()
    x, y = torch.randn(9, 4).double(), torch.randint(3, (9,))
    la = Laplace(model, "classification").fit([((x, x), y)])
    plain = Laplace(nn.Sequential(model.fc), "classification").fit([(2 * x, y)])
    torch.testing.assert_close(la((x, x)), plain(2 * x))
    torch.testing.assert_close(la((x, x), scale=3.0), plain(6 * x))


def test_repr_is_a_readable_summary():
    model, x, y = make("mlp", "regression")
    la = Laplace(model, "regression")
    assert "not yet: call la.fit" in repr(la)
    text = repr(la.fit(cut(x, y, 6)))
    for part in (
        "Sequential",
        "last_layer: 2.weight, 2.bias (16 weights)",
        "kron; curvature ggn",
        "23 examples",
        "log evidence",
    ):
        assert part in text


def test_draws_are_smooth_functions_of_the_input():
    model, x, y = make("mlp", "regression")
    la = Laplace(model, "regression").fit(cut(x, y, 6))
    near = x[:1] + torch.linspace(0, 1e-6, 5, dtype=torch.float64).unsqueeze(1)
    draws = la.functional_samples(near, n_samples=6)
    assert float((draws - draws[:, :1]).abs().max()) < 1e-4
    assert float(draws.std(0).min()) > 1e-2


def test_progress_bar_only_when_asked(capsys):
    model, x, y = make("mlp", "classification")
    Laplace(model, "classification").fit(cut(x, y, 6))
    assert capsys.readouterr().err == ""
    Laplace(model, "classification").fit(cut(x, y, 6), progress_bar=True)
    assert "fit" in capsys.readouterr().err


def test_the_package_is_typed():
    from importlib.resources import files

    assert (files("laplace") / "py.typed").is_file()
